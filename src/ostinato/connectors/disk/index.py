"""What the cache holds and what goes first: records by name, in memory.

Owns: entries, their use, the order of eviction.  Does not own: slots (``slabs``), the log (``journal``).
Order: the records used longest ago go first; of those used within the same second the ones furthest behind in their
sequence, since a head without its tail is worth more than a tail without its head.
Changes under the store's lock; :meth:`Index.get` from any thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from ostinato.connectors.disk.slabs import Slab


@dataclass(slots=True, eq=False)
class Entry:
    """One record.  ``durable``: its bytes were synced; ``pins``: loads under way."""

    name: bytes
    identity: int
    slab: Slab
    slot: int
    used: int
    length: int
    ordinal: int
    durable: bool = True
    pins: int = 0


@dataclass(slots=True)
class _Queue:
    """Candidates of one slot size by (last use, latest in the sequence first); stale items are skipped."""

    heap: list[tuple[int, int, int, Entry]] = field(default_factory=list)
    pushes: int = 0


class Index:
    """Entries by name."""

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._queues: dict[int, _Queue] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, name: bytes) -> Entry | None:
        return self._entries.get(name)

    def add(self, entry: Entry) -> None:
        """The name must be free."""
        self._entries[entry.name] = entry
        entry.slab.last_use = max(entry.slab.last_use, entry.used)
        self._push(entry)

    def remove(self, entry: Entry) -> None:
        """Forget the entry and free its slot."""
        assert self._entries.pop(entry.name) is entry
        entry.slab.give(entry.slot)

    def touch(self, entry: Entry, now: int) -> None:
        if now > entry.used:
            entry.used = now
            entry.slab.last_use = max(entry.slab.last_use, now)
            self._push(entry)

    def oldest(self, slot_bytes: int) -> Entry | None:
        """The next entry to evict among those with slots of ``slot_bytes``; it stays."""
        queue = self._queue(slot_bytes)
        held = []
        found = None
        while queue.heap:
            used, _, _, entry = queue.heap[0]
            if self._entries.get(entry.name) is not entry or entry.used != used:
                heapq.heappop(queue.heap)
            elif entry.pins:
                held.append(heapq.heappop(queue.heap))
            else:
                found = entry
                break
        for item in held:
            heapq.heappush(queue.heap, item)
        return found

    def in_slab(self, slab: Slab) -> list[Entry]:
        return [entry for entry in self if entry.slab is slab]

    def _push(self, entry: Entry) -> None:
        queue = self._queues.get(entry.slab.slot_bytes)
        if queue is not None:
            queue.pushes += 1
            heapq.heappush(queue.heap, (entry.used, -entry.ordinal, queue.pushes, entry))
            if len(queue.heap) > 4 * len(self._entries) + 1024:
                del self._queues[entry.slab.slot_bytes]  # mostly stale: built anew when it is needed

    def _queue(self, slot_bytes: int) -> _Queue:
        """Made at the first eviction: a cache that is not full needs none."""
        queue = self._queues.get(slot_bytes)
        if queue is None:
            some = (entry for entry in self if entry.slab.slot_bytes == slot_bytes)
            heap = [(entry.used, -entry.ordinal, number, entry) for number, entry in enumerate(some)]
            heapq.heapify(heap)
            queue = self._queues[slot_bytes] = _Queue(heap, len(heap))
        return queue
