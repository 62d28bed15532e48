"""A fake data plane for the cache hierarchy: device, tiers and movers whose every byte is checked.

The device and each owned tier are maps from ``(rank, slot, offset)`` to what was last written there.  Computing a unit
writes content that names the tokens it depends on; whoever reads (a load or a store its source, a sequence all that its
attention mask reaches) compares with what must be there.  A slot that was handed out again since the last write reads
as poison.  Movers are scripted: nothing is moved or reported before the test says so, and any of it may go wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.masks import read_units
from ostinato.cache.keys import BlockKey, KeyChain
from ostinato.cache.kinds import keeps_checkpoints
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.cache.pool import SlotPool
from ostinato.cache.table import StatePlan
from ostinato.ids import DEVICE, HOLE, JobId, SlotId, Step, TierId
from ostinato.transfer.job import JobKind, Move, PageCopy, TransferOrder, TransferReport

POISON = b"poison"


def seed_of(salt: str) -> bytes:
    return hashlib.sha256(salt.encode()).digest()


def content_of(salt: str, tokens: Sequence[int], group: int) -> bytes:
    """What a unit of ``group`` holds whose last token is the last of ``tokens``."""
    return hashlib.blake2b(repr((salt, list(tokens), group)).encode(), digest_size=12).digest()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Arena:
    """Bytes of one tier.  A read of a slot that was taken again since it was written gives poison."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._bytes: dict[tuple[int, SlotId, int], tuple[int, bytes]] = {}

    def write(self, rank: int, slot: SlotId, offset: int, content: bytes) -> None:
        assert 0 <= slot < self._pool.capacity
        self._bytes[rank, slot, offset] = (self._pool.generation[slot], content)

    def read(self, rank: int, slot: SlotId, offset: int) -> bytes:
        assert 0 <= slot < self._pool.capacity
        generation, content = self._bytes.get((rank, slot, offset), (-1, POISON))
        return content if generation == self._pool.generation[slot] else POISON


class AskedTier:
    """A tier with an index of its own.  ``mood``: honest, silent (no answer yet), liar (claims everything)."""

    def __init__(self, name: str, ranks: int, greedy: bool = True) -> None:
        self.tier = TierId(name)
        self.mood = "honest"
        self.greedy = greedy
        self.stored: dict[tuple[int, BlockKey], bytes] = {}
        self.refutations = 0
        self.probes = 0
        self.deletes: bool | None = True
        self.removing: Sequence[BlockKey] = ()
        self._ranks = ranks

    def holds(self, key: BlockKey) -> bool:
        return all((rank, key) in self.stored for rank in range(self._ranks))

    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        self.probes += 1
        if self.mood == "silent":
            return None
        return [self.mood == "liar" or self.holds(key) for key in keys]

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return [(self.greedy or key.digest[0] % 3 == 0) and not self.holds(key) for key in keys]

    def refuted(self, keys: Sequence[BlockKey]) -> None:
        self.refutations += len(keys)
        for key in keys:
            for rank in range(self._ranks):
                self.stored.pop((rank, key), None)

    def remove(self, keys: Sequence[BlockKey]) -> bool | None:
        """``deletes``: at once; None: only when asked a second time; False: never."""
        if self.deletes is False:
            return False
        if self.deletes is None and keys != self.removing:
            self.removing = keys
            return None
        self.removing = ()
        for key in keys:
            for rank in range(self._ranks):
                self.stored.pop((rank, key), None)
        return True

    def forget(self) -> None:
        """It evicts on its own."""
        for item in sorted(self.stored)[::2]:
            del self.stored[item]


@dataclass(slots=True, eq=False)
class Errand:
    """One rank's part of one order."""

    order: TransferOrder
    rank: int
    reported: int = 0


@dataclass(slots=True)
class Work:
    """What the worker computes in one step for one request; ``rows`` are a copy, taken when the step was planned."""

    salt: str
    tokens: list[int]
    start: int
    stop: int
    rows: list[list[SlotId]]
    state: StatePlan | None = None
    alive: bool = True


@dataclass(slots=True)
class FakePlan:
    step: Step
    sequences: dict[str, Work] = field(default_factory=dict)
    copies: list[PageCopy] = field(default_factory=list)


class Worker:
    """Ranks, arenas and movers."""

    def __init__(
        self, layout: CacheLayout, pools: dict[TierId, SlotPool], asked: Sequence[AskedTier], ranks: int
    ) -> None:
        self.layout = layout
        self.ranks = ranks
        self.arenas = {tier: Arena(pool) for tier, pool in pools.items()}
        self.asked = {tier.tier: tier for tier in asked}
        self.errands: list[Errand] = []
        self.inbox: list[TransferReport] = []
        self.finished_step = Step(0)
        self.reads = 0
        self._truth: dict[BlockKey, bytes] = {}

    # What must be where.

    def learn(self, salt: str, tokens: Sequence[int]) -> None:
        """Note what each key of a sequence stands for; two meanings of one key would be a collision."""
        chain = KeyChain(seed_of(salt), self.layout.base_unit)
        chain.update(tokens)
        for spec in self.layout.groups:
            for ordinal in range(len(tokens) // spec.hash_unit):
                key = BlockKey(spec.group, chain.digest(spec.hash_unit, ordinal))
                content = content_of(salt, tokens[: (ordinal + 1) * spec.hash_unit], spec.group)
                assert self._truth.setdefault(key, content) == content, "two sequences share a key"

    # The forward pass.

    def execute(self, plan: FakePlan) -> None:
        for rank in range(self.ranks):
            device = self.arenas[DEVICE]
            for copy in plan.copies:
                device.write(rank, copy.target, copy.offset, device.read(rank, copy.source, copy.offset))
            for name, sequence in plan.sequences.items():
                for spec in self.layout.groups:
                    if keeps_checkpoints(spec.kind):
                        self._scan(rank, name, sequence, spec)
                    else:
                        self._compute(rank, name, sequence, spec)
        self.finished_step = plan.step

    def _compute(self, rank: int, name: str, sequence: Work, spec: GroupSpec) -> None:
        device, row, unit = self.arenas[DEVICE], sequence.rows[spec.group], spec.hash_unit

        def locate(ordinal: int) -> tuple[SlotId, int]:
            page = ordinal // spec.page_units
            slot = row[page] if page < len(row) else HOLE
            return slot, ordinal % spec.page_units * spec.unit_stride

        if sequence.alive:
            for ordinal in read_units(spec.kind, sequence.start, sequence.stop, unit):
                slot, offset = locate(ordinal)
                assert slot != HOLE, f"{name} reads unit {ordinal} of group {spec.group} at {sequence.start}: a hole"
                end = min((ordinal + 1) * unit, sequence.start)
                expected = content_of(sequence.salt, sequence.tokens[:end], spec.group)
                found = device.read(rank, slot, offset)
                self.reads += 1
                assert found == expected, f"{name} reads wrong content: group {spec.group}, unit {ordinal}, slot {slot}"
        for ordinal in range(sequence.start // unit, -(-sequence.stop // unit)):
            slot, offset = locate(ordinal)
            assert slot != HOLE, f"{name} has no page for unit {ordinal} of group {spec.group}"
            end = min((ordinal + 1) * unit, sequence.stop)
            device.write(rank, slot, offset, content_of(sequence.salt, sequence.tokens[:end], spec.group))

    def _scan(self, rank: int, name: str, sequence: Work, spec: GroupSpec) -> None:
        """Recurrent state: read once at the start of the chunk, written at each stop."""
        device, plan = self.arenas[DEVICE], sequence.state
        assert plan is not None, f"{name} is not told where its state lies"
        slot = plan.read[spec.group]
        assert (slot == HOLE) == (sequence.start == 0), f"{name} at {sequence.start} starts from page {slot}"
        if sequence.alive and sequence.start:
            found = device.read(rank, slot, 0)
            self.reads += 1
            expected = content_of(sequence.salt, sequence.tokens[: sequence.start], spec.group)
            assert found == expected, f"{name} at {sequence.start} reads another state: group {spec.group}, slot {slot}"
        stops = [stop for stop, _ in plan.stops]
        assert stops == sorted(set(stops)), stops
        assert sequence.start < stops[0], (sequence.start, stops)
        assert stops[-1] == sequence.stop, (sequence.stop, stops)
        for stop, pages in plan.stops:
            assert pages[spec.group] != HOLE, f"{name} has no page for its state at {stop}"
            device.write(rank, pages[spec.group], 0, content_of(sequence.salt, sequence.tokens[:stop], spec.group))

    # Movers.

    def accept(self, orders: Sequence[TransferOrder]) -> None:
        for order in orders:
            assert order.moves, "an order without moves"
            self.errands.extend(Errand(order, rank) for rank in range(self.ranks))

    def open_errands(self) -> list[Errand]:
        """Those whose mover may act now: it waits for the step before which it must not touch the device."""
        return [errand for errand in self.errands if errand.order.after_step <= self.finished_step]

    def move(self, errand: Errand, broken: frozenset[int] = frozenset()) -> tuple[int, ...]:
        """Move all units; ``broken`` ones write garbage.  Returns what failed.  May be called any number of times."""
        failed = []
        for index, move in enumerate(errand.order.moves):
            if not self._move_one(errand, move, index in broken):
                failed.append(index)
        return tuple(failed)

    def _move_one(self, errand: Errand, move: Move, broken: bool) -> bool:
        order, rank = errand.order, errand.rank
        device, asked = self.arenas[DEVICE], self.asked.get(order.tier)
        if order.kind is JobKind.LOAD:
            if asked is not None:
                assert move.tier_slot == HOLE
                content = asked.stored.get((rank, move.key), b"")
            else:
                content = self.arenas[order.tier].read(rank, move.tier_slot, move.offset)
                assert content == self._truth[move.key], f"a load reads a wrong source: {move}"
            good = content == self._truth[move.key] and not broken
            device.write(rank, move.device_slot, move.offset, content if good else b"garbage of a load")
            return good
        content = device.read(rank, move.device_slot, move.offset)
        self.reads += 1
        assert content == self._truth[move.key], f"a store reads a wrong source: {move}"
        if asked is None:
            self.arenas[order.tier].write(rank, move.tier_slot, move.offset, b"garbage" if broken else content)
        elif not broken:
            asked.stored[rank, move.key] = content
        return not broken

    def report(self, errand: Errand, broken: frozenset[int] = frozenset(), copies: int = 1) -> None:
        """Move, then report: after this the mover is quiet."""
        failed = self.move(errand, broken)
        self.errands.remove(errand)
        report = TransferReport(errand.order.job_id, errand.rank, failed, errand.order.total_bytes)
        self.inbox.extend([report] * copies)

    def forge(self, job_id: JobId, rank: int) -> None:
        """A report that nobody owes."""
        self.inbox.append(TransferReport(job_id, rank, (0, 99)))

    def take_reports(self, order: Sequence[int] = ()) -> list[TransferReport]:
        reports, self.inbox = self.inbox, []
        ranks = dict(enumerate(order))
        return [report for _, report in sorted(enumerate(reports), key=lambda item: ranks.get(item[0], item[0]))]
