"""Host memory: the owned tier between vLLM's blocks and the tiers below.

Owns: slots, keys, eviction of host memory, and the book of copies that vLLM's workers make.  Does not own: vLLM's
blocks, which are foreign: vLLM says which of them a request has, and keeps them until the step that copies them is
done.  Thread: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ostinato.cache.directory import Directory, Entry, Place
from ostinato.cache.keys import BlockKey
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.cache.pool import Lease, SlotPool
from ostinato.cache.retention import Rank, Retention
from ostinato.ids import HOLE, JobId, Ordinal, SlotId, Step, TierId
from ostinato.transfer.book import Book, release
from ostinato.transfer.job import JobKind, Move, TransferOrder, TransferReport

HOST: Final = TierId("host")
FOREVER: Final = float("inf")
"""Workers copy inside of the step that orders it: there is nothing to wait for."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A block of vLLM's that may be saved.  ``boundary``: a cut worth keeping needs it."""

    key: BlockKey
    ordinal: int
    block: int
    boundary: bool


class HostCache:
    """``slots`` pages, shared by all groups."""

    def __init__(self, layout: CacheLayout, slots: int, world_size: int = 1) -> None:
        self.layout = layout
        self.directory = Directory()
        self.retention = Retention(HOST, self.directory)
        self.pool = SlotPool(HOST, slots, self.retention)
        self.copies = Book(world_size)
        self.declined = 0
        """Units that were not saved for want of room."""

    def holds(self, key: BlockKey) -> bool:
        """Whether the key is here, or about to be."""
        return self.directory.place(key, HOST) is not None

    def touch(self, keys: Iterable[BlockKey], boundary: bool = False) -> None:
        """A request used these (or needs them, for a cut worth keeping)."""
        for key in keys:
            entry = self.directory.get(key)
            if entry is not None:
                entry.tick = self.directory.tick
                entry.boundary |= boundary

    def reserve(self, units: Sequence[Unit], owner: str) -> tuple[Lease, list[Unit]]:
        """Slots for ``units``, or for the most valuable of them; interior units push out no boundary."""

        def rank(unit: Unit) -> Rank:
            return (unit.boundary, self.directory.tick, -unit.ordinal)

        ordered = sorted(units, key=rank, reverse=True)
        lease = self.pool.take(min(len(ordered), len(self.pool.free_slots)), owner)
        assert lease is not None, "free slots can be taken"
        for unit in ordered[len(lease.slots) :]:
            lowest = self.retention.lowest_rank()
            if lowest is None or lowest >= rank(unit):
                break
            more = self.pool.take(1, owner)
            assert more is not None, "something is idle"
            lease.absorb(more)
        self.declined += len(units) - len(lease.slots)
        return lease, ordered[: len(lease.slots)]

    def save(self, units: Sequence[Unit], step: Step) -> TransferOrder | None:
        """Order a copy of ``units`` from vLLM's blocks; None when nothing is to be done."""
        wanted = list({unit.key: unit for unit in units if not self.holds(unit.key)}.values())
        if not wanted:
            return None
        lease, taken = self.reserve(wanted, "save")
        if not taken:
            lease.release()
            return None
        job_id = self.copies.new_id()
        moves = []
        for unit, slot in zip(taken, lease.slots, strict=True):
            self.write(unit.key, unit.ordinal, slot, job_id, unit.boundary)
            moves.append(self.move(unit.key, unit.ordinal, SlotId(unit.block), slot))
        return self._open(TransferOrder(job_id, JobKind.STORE, HOST, tuple(moves), step), lease)

    def load(self, moves: Sequence[Move], lease: Lease, step: Step) -> TransferOrder:
        """Order a copy into vLLM's blocks; ``lease`` holds the slots that it reads, and is the order's from now on."""
        return self._open(TransferOrder(self.copies.new_id(), JobKind.LOAD, HOST, tuple(moves), step), lease)

    def settle(self, report: TransferReport) -> list[Entry]:
        """A rank's report; the entries that can be hit from now on, when it was a save's last one."""
        job = self.copies.report(report)
        if job is None:
            return []
        done: list[Entry] = []
        if job.order.kind is JobKind.STORE:
            for index, move in enumerate(job.order.moves):
                done += self.conclude(move.key, job.job_id, index not in job.failed)
        release(job)
        return done

    def write(self, key: BlockKey, ordinal: int, slot: SlotId, job_id: JobId, boundary: bool) -> None:
        place = Place(slot, self.pool.generation[slot], job_id)
        self.directory.write(key, Ordinal(ordinal), HOST, place, boundary)

    def conclude(self, key: BlockKey, job_id: JobId, good: bool) -> list[Entry]:
        """The copy of ``key`` that ``job_id`` wrote is there, or is forgotten."""
        entry = self.directory.get(key)
        place = entry.places.get(HOST) if entry is not None else None
        if entry is None or place is None or place.job != job_id:
            return []
        if good:
            self.directory.confirm(entry, HOST)
            return [entry]
        self.directory.withdraw(key, HOST)
        return []

    def move(self, key: BlockKey, ordinal: int, device_slot: SlotId, tier_slot: SlotId = HOLE) -> Move:
        spec: GroupSpec = self.layout.groups[key.group]
        return Move(key, Ordinal(ordinal), device_slot, tier_slot, 0, spec.unit_bytes)

    def _open(self, order: TransferOrder, lease: Lease) -> TransferOrder:
        self.copies.open(order, lease, None, FOREVER)
        self.copies.dispatch(0.0)
        return order
