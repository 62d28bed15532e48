"""A tier whose every transfer waits for the test: nothing is copied or reported before the script says so.

:class:`ScriptedTier` is the connector (owned slots, or kept and asked), :class:`ScriptedMover` its worker half.  The
mover works on any device pool of torch pages, real or fake, on the caller's thread: no sleeping, no races.  It notes
every byte range that it read or wrote.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.cache.keys import BlockKey
from ostinato.connectors.api import Capabilities, Connector, DevicePages, Hook, Ownership
from ostinato.connectors.context import KVConnectorSchedulerContext
from ostinato.ids import HOLE, JobId, SlotId, TierId
from ostinato.transfer.job import JobKind, Move, TransferOrder, TransferReport

LOAD, STORE = JobKind.LOAD, JobKind.STORE


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Touch:
    """One byte range that a mover read or wrote: in the device pool, in its own slots, or under a key."""

    job: JobId
    kind: JobKind
    write: bool
    place: SlotId | BlockKey
    on_device: bool
    offset: int
    length: int
    digest: bytes


class ScriptedMover:
    """Gates per kind: a closed gate keeps orders in ``pending`` until :meth:`finish` or :meth:`open`.

    ``broken``: pairs ``(group, ordinal)`` whose bytes arrive as garbage and are reported as failed.  ``early``: copy
    inside ``submit``, as soon as the contract allows at all.
    """

    def __init__(self, tier: ScriptedTier, device: DevicePages, slots: int, notify: Callable[[], None]) -> None:
        self.pages = torch.full((slots, device.pages.shape[1]), 0xFF, dtype=torch.uint8)
        self.device = device
        self.open_gates = {LOAD, STORE}
        self.early = False
        self.broken: set[tuple[int, int]] = set()
        self.pending: dict[JobId, TransferOrder] = {}
        self.submitted: list[TransferOrder] = []
        self.cancelled: list[JobId] = []
        self.log: list[Touch] = []
        self.reports: list[TransferReport] = []
        self.closed = False
        self._copied: dict[JobId, tuple[int, ...]] = {}
        self._tier = tier
        self._notify = notify

    # What the worker calls.

    def submit(self, order: TransferOrder) -> None:
        assert order.moves, "an order without moves"
        self.submitted.append(order)
        self.pending[order.job_id] = order
        if self.early:
            self._copied[order.job_id] = self.copy(order)

    def poll(self) -> list[TransferReport]:
        for order in list(self.pending.values()):
            if order.kind in self.open_gates:
                self.finish(order)
        reports, self.reports = self.reports, []
        return reports

    def cancel(self, job_id: JobId) -> None:
        self.cancelled.append(job_id)

    def close(self) -> None:
        self.closed = True

    # What a test calls.

    def shut(self, *kinds: JobKind) -> None:
        self.open_gates -= set(kinds)

    def open(self, *kinds: JobKind) -> None:
        self.open_gates |= set(kinds)

    def waiting(self, kind: JobKind) -> list[TransferOrder]:
        return [order for order in self.pending.values() if order.kind is kind]

    def orders(self, kind: JobKind) -> list[TransferOrder]:
        """All that were ever submitted."""
        return [order for order in self.submitted if order.kind is kind]

    def copy(self, order: TransferOrder) -> tuple[int, ...]:
        """Move the bytes and say nothing; returns what failed.  Any number of times, however late."""
        return tuple(index for index, move in enumerate(order.moves) if not self._move(order, move))

    def finish(self, order: TransferOrder, copies: int = 1) -> None:
        """Move (unless that was done early), then report (``copies`` times)."""
        early = self._copied.pop(order.job_id, None)
        failed = self.copy(order) if early is None else early
        del self.pending[order.job_id]
        report = TransferReport(order.job_id, 0, failed, order.total_bytes)
        self.reports.extend([report] * copies)
        self._notify()

    def fail(self, order: TransferOrder) -> None:
        """Report everything as failed without touching a byte."""
        del self.pending[order.job_id]
        self.reports.append(TransferReport(order.job_id, 0, tuple(range(len(order.moves)))))
        self._notify()

    def drop(self, order: TransferOrder) -> TransferOrder:
        """Lose the order: it is never reported unless the test says so later."""
        return self.pending.pop(order.job_id)

    def deliver(self, order: TransferOrder, failed: Sequence[int] = ()) -> None:
        """A report for a dropped order, or a second one."""
        self.reports.append(TransferReport(order.job_id, 0, tuple(failed), order.total_bytes))
        self._notify()

    # Bytes.

    def _move(self, order: TransferOrder, move: Move) -> bool:
        span = slice(move.offset, move.offset + move.length)
        inside = self.device.pages[move.device_slot, span]
        good = (move.key.group, move.ordinal) not in self.broken
        if order.kind is LOAD:
            content = self._read(move)
            good = good and content is not None
            inside.copy_(content if good else torch.full_like(inside, 0xFF))
            self._note(order, move, True, True, inside)
            return good
        self._note(order, move, False, True, inside)
        if good:
            self._write(move, inside)
        return good

    def _read(self, move: Move) -> torch.Tensor | None:
        if move.tier_slot != HOLE:
            return self.pages[move.tier_slot, move.offset : move.offset + move.length]
        return self._tier.stored.get(move.key)

    def _write(self, move: Move, content: torch.Tensor) -> None:
        if move.tier_slot != HOLE:
            self.pages[move.tier_slot, move.offset : move.offset + move.length] = content
        self._tier.stored[move.key] = content.clone()

    def _note(self, order: TransferOrder, move: Move, write: bool, on_device: bool, content: torch.Tensor) -> None:
        digest = hashlib.sha256(content.numpy().tobytes()).digest()
        place = move.device_slot if on_device else move.key
        self.log.append(
            Touch(order.job_id, order.kind, write, place, on_device, move.offset, move.length, digest),
        )


class ScriptedTier(Connector):
    """OWNED: ``slots`` pages of ours.  KEPT or SHARED: an index by key, asked; ``mood`` says how it answers.

    ``stored`` has the last bytes that were stored under each key (of an owned tier: for inspection only).
    """

    def __init__(
        self,
        name: str = "host",
        ownership: Ownership = Ownership.OWNED,
        slots: int = 256,
        eager: bool = True,
        hooks: Iterable[Hook] = (),
    ) -> None:
        self.capabilities = Capabilities(TierId(name), ownership, eager, frozenset(hooks))
        self.mood = "honest"
        self.stored: dict[BlockKey, torch.Tensor] = {}
        self.refutations: list[BlockKey] = []
        self.context: KVConnectorSchedulerContext | None = None
        self._slots = slots
        self._mover: ScriptedMover | None = None

    @property
    def mover(self) -> ScriptedMover:
        assert self._mover is not None, "the engine has not started"
        return self._mover

    def make_mover(self, device: DevicePages, notify: Callable[[], None]) -> ScriptedMover:
        owned = self.capabilities.ownership is Ownership.OWNED
        self._mover = ScriptedMover(self, device, self._slots if owned else 0, notify)
        return self._mover

    def slots(self, page_bytes: int) -> int:
        return self._slots

    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        if self.mood == "silent":
            return None
        return [self.mood == "liar" or key in self.stored for key in keys]

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return [key not in self.stored for key in keys]

    def refuted(self, keys: Sequence[BlockKey]) -> None:
        self.refutations.extend(keys)
        for key in keys:
            self.stored.pop(key, None)

    def bind(self, context: KVConnectorSchedulerContext) -> None:
        self.context = context


def kept(name: str = "disk") -> ScriptedTier:
    return ScriptedTier(name, Ownership.KEPT)


def poison_on_take(pool: Any, poison: Callable[[SlotId], None]) -> None:
    """Whoever takes a slot finds poison in it, so that reading what was not written there shows at once."""
    take = pool.take

    def take_poisoned(count: int, owner: str) -> Any:
        lease = take(count, owner)
        for slot in lease.slots if lease is not None else ():
            poison(slot)
        return lease

    pool.take = take_poisoned
