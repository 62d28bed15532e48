"""Room for records within a budget: slabs are made while there is room, records and whole slabs evicted when not.

Owns: the budget, growing, eviction, writing of the log in the right order.  Does not own: the bytes of records.
Everything counts: slabs at their full size, and what snapshots and logs of their slots can take at most, so the folder
is never larger than the budget.  All under the store's lock.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterable
from typing import Final

from ostinato.connectors.disk.catalog import Catalog, Owner, identity_body, model_body, put_bodies, slab_body
from ostinato.connectors.disk.format import MAX_FRAME_PUTS, Kind, slot_bytes
from ostinato.connectors.disk.index import Entry
from ostinato.connectors.disk.journal import Journal, reserve_bytes
from ostinato.connectors.disk.slab_io import SlabFiles
from ostinato.connectors.disk.slabs import MAX_SLOTS, Run, Slab
from ostinato.errors import CapacityError

log: Final = logging.getLogger(__name__)
FULL_S: Final = 60.0
"""For so long no slab is made after the disk was full."""
MAX_STEALS: Final = 16
"""Slabs given up for one allocation at most: on a full disk none of them may help."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def slab_size(budget: int) -> int:
    """Bytes of a slab: a sixteenth of the budget, but at most 256 MiB, unless there would be more than 256 slabs."""
    return max(budget // 256, min(budget // 16, 256 << 20))


def check_budget(budget: int, lengths: Iterable[int], direct: bool = False) -> None:
    """Raise CapacityError when ``budget`` bytes cannot hold one record of each of these lengths."""
    slots = sorted({slot_bytes(length, direct) for length in lengths})
    least = sum(slots) + reserve_bytes(len(slots))
    if budget < least:
        raise CapacityError(f"the disk tier's budget of {budget} bytes is too small for this model: at least {least}")


class Space:
    """Slots of one folder."""

    def __init__(self, catalog: Catalog, journal: Journal, files: SlabFiles, budget: int) -> None:
        self.budget = budget
        self.evictions = 0
        self._catalog = catalog
        self._journal = journal
        self._files = files
        self._full_until = 0.0

    def used(self) -> int:
        """Bytes that are spoken for."""
        return self._catalog.slab_bytes() + reserve_bytes(self._catalog.slots())

    def allocate(self, size: int, count: int) -> list[Run]:
        """Runs of up to ``count`` slots of ``size`` bytes.  Raises OSError when the log cannot be written."""
        runs: list[Run] = []
        missing, steals = count, MAX_STEALS
        while missing:
            some = self._catalog.classes.get(size)
            taken = some.take(missing) if some is not None and some.free else []
            missing -= sum(run.count for run in taken)
            runs += taken
            if not missing or self._grow(size):
                continue
            if steals and self._steal(size):
                steals -= 1
            elif not self._evict(size, missing):
                break
        return runs

    def put(self, entries: Iterable[Entry]) -> int:
        """Log entries whose bytes were synced; returns how many."""
        count = 0
        for body, records in put_bodies(entries):
            self._append(Kind.PUT, body)
            count += records
        return count

    def drop(self, entries: list[Entry]) -> None:
        """Forget entries, in the log before their slots are used again."""
        for entry in entries:
            self._catalog.index.remove(entry)
        for start in range(0, len(entries), MAX_FRAME_PUTS):
            self._append(Kind.DROP, b"".join(entry.name for entry in entries[start : start + MAX_FRAME_PUTS]))

    def number_of(self, owner: Owner, model: str = "") -> int:
        """The owner's number in the index; a new one when it has none.  ``model``: what people call its model."""
        number = self._catalog.number_of(owner)
        if number is None:
            number = next(number for number in range(1 << 16) if number not in self._catalog.owners)
            self._catalog.owners[number] = owner
            self._append(Kind.IDENTITY, identity_body(number, owner))
        if model and number not in self._catalog.models:
            self._catalog.models[number] = model
            self._append(Kind.MODEL, model_body(number, model))
        return number

    def shrink(self, budget: int) -> int:
        """Give up the coldest slabs until ``budget`` is kept; returns the bytes freed."""
        before = self._catalog.slab_bytes()
        while self.used() > budget:
            idle = [slab for slab in self._catalog.slabs.values() if not slab.busy]
            if not idle:
                break
            self.give_up(min(idle, key=lambda slab: slab.last_use))
        return before - self._catalog.slab_bytes()

    def give_up_empty(self) -> None:
        for slab in list(self._catalog.slabs.values()):
            if slab.free == slab.slots and not slab.busy:
                self.give_up(slab)

    def give_up(self, slab: Slab) -> None:
        """Remove a slab that no transfer uses, and all that lies in it."""
        assert not slab.busy
        before = len(self._catalog.index)
        self._catalog.drop_slab(slab)
        self.evictions += before - len(self._catalog.index)
        self._append(Kind.DROP_SLAB, slab_body(slab))
        self._files.remove(slab)

    def snapshot(self) -> None:
        self._journal.rotate(self._catalog.bodies())

    def _append(self, kind: Kind, body: bytes) -> None:
        """The catalog says already what is appended, so that a snapshot made now is not behind."""
        if self._journal.room_for(len(body), self._catalog.slots()):
            self._journal.append(kind, body)
        else:
            self.snapshot()
            if kind in (Kind.PUT, Kind.IDENTITY, Kind.MODEL):
                return
            self._journal.append(kind, body)

    def _grow(self, size: int) -> bool:
        if time.monotonic() < self._full_until:
            return False
        slots = max(1, min(MAX_SLOTS, slab_size(self.budget) // size))
        least = slots // 4 if size in self._catalog.classes else 1
        while self._catalog.slab_bytes() + slots * size + reserve_bytes(self._catalog.slots() + slots) > self.budget:
            slots //= 2
            if slots < max(1, least):
                return False
        slab = Slab(self._catalog.next_slab, size, slots)
        try:
            self._files.create(slab)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            if not self._full_until:
                log.warning("the disk is full: the disk tier stays at %d MiB", self._catalog.slab_bytes() >> 20)
            self._full_until = time.monotonic() + FULL_S
            return False
        self._catalog.add_slab(slab)
        self._append(Kind.SLAB, slab_body(slab))
        return True

    def _steal(self, size: int) -> bool:
        """Give up a slab of other slots when all in it was used longer ago than what would be evicted instead."""
        others = [slab for slab in self._catalog.slabs.values() if slab.slot_bytes != size and not slab.busy]
        if not others:
            return False
        coldest = min(others, key=lambda slab: slab.last_use)
        own = self._catalog.index.oldest(size)
        if own is not None and coldest.last_use >= own.used:
            return False
        self.give_up(coldest)
        self._full_until = min(self._full_until, time.monotonic())  # there is room now
        return True

    def _evict(self, size: int, count: int) -> bool:
        victims: list[Entry] = []
        index = self._catalog.index
        while len(victims) < count and (entry := index.oldest(size)) is not None:
            victims.append(entry)
            index.remove(entry)
        if not victims:
            return False
        for start in range(0, len(victims), MAX_FRAME_PUTS):
            self._append(Kind.DROP, b"".join(entry.name for entry in victims[start : start + MAX_FRAME_PUTS]))
        self.evictions += len(victims)
        return True
