"""Which idle slot of a tier goes first.

Owns: the order of idle slots.  Does not own: when to evict (``pool.take``), what a slot contains (``directory``).
Policy, plain LRU with one rule for hybrids: every cut is kept while there is room; then interior window and state
units go (no boundary needs them), least recently used first; only then boundaries, the tail of a prompt before its
head.  Thread: the scheduler's only.

The order is a heap of ``(boundary, tick, -ordinal, slot)`` with lazy corrections: recency and marks live in the
directory's entries and only grow, so an outdated heap item is too early, never too late, and is pushed back when it
surfaces.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TypeAlias

from ostinato.cache.directory import Directory, Entry
from ostinato.ids import SlotId, TierId

Rank: TypeAlias = tuple[bool, int, int]
"""``(boundary, tick of last use, -ordinal)``: smallest goes first."""


def rank_of(entries: Iterable[Entry]) -> Rank:
    """The most valuable of a page's units speaks for it."""
    return max((entry.boundary, entry.tick, -entry.ordinal) for entry in entries)


class Retention:
    """Idle slots of ``tier`` in order of eviction; the pool's :class:`~ostinato.cache.pool.Evictable`."""

    def __init__(self, tier: TierId, directory: Directory) -> None:
        self._tier = tier
        self._directory = directory
        self._heap: list[tuple[Rank, SlotId, int]] = []
        self._stamps: dict[SlotId, int] = {}
        self._next_stamp = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._stamps)

    def __contains__(self, slot: object) -> bool:
        return slot in self._stamps

    def rank(self, slot: SlotId) -> Rank:
        return rank_of(self._directory.contents(self._tier, slot))

    def has_content(self, slot: SlotId) -> bool:
        return bool(self._directory.contents(self._tier, slot))

    def add(self, slot: SlotId) -> None:
        self._next_stamp += 1
        self._stamps[slot] = self._next_stamp
        heapq.heappush(self._heap, (self.rank(slot), slot, self._next_stamp))
        if len(self._heap) > 4 * len(self._stamps) + 64:
            self._rebuild()

    def remove(self, slot: SlotId) -> None:
        del self._stamps[slot]

    def evict(self) -> SlotId:
        slot = self._surface()
        assert slot is not None, "nothing is idle"
        heapq.heappop(self._heap)
        del self._stamps[slot]
        self._directory.evict(self._tier, slot)
        self.evictions += 1
        return slot

    def lowest_rank(self) -> Rank | None:
        """Rank of the next slot to go, or None when nothing is idle."""
        slot = self._surface()
        return None if slot is None else self.rank(slot)

    def candidates(self, count: int) -> list[SlotId]:
        """The next ``count`` slots to go, first one first; changes nothing that can be seen."""
        items: list[tuple[Rank, SlotId, int]] = []
        while len(items) < count and self._surface() is not None:
            items.append(heapq.heappop(self._heap))
        for item in items:
            heapq.heappush(self._heap, item)
        return [slot for _, slot, _ in items]

    def _surface(self) -> SlotId | None:
        """Bring a valid, current item to the top of the heap."""
        while self._heap:
            rank, slot, stamp = self._heap[0]
            if self._stamps.get(slot) != stamp:
                heapq.heappop(self._heap)
                continue
            current = self.rank(slot)
            if current == rank:
                return slot
            heapq.heapreplace(self._heap, (current, slot, stamp))
        return None

    def _rebuild(self) -> None:
        self._heap = [(self.rank(slot), slot, stamp) for slot, stamp in self._stamps.items()]
        heapq.heapify(self._heap)
