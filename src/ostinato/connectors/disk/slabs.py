"""Which slots of which slabs are taken; slots come in runs, so that one call moves many records.

Owns: occupancy of slots, runs.  Does not own: files, what a slot holds (``index``), when a slab is made or given up
(``store``).  Not thread-safe; the store's lock protects it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

MAX_SLOTS: Final = 1 << 24
"""Of one slab; an index that says more is not believed."""


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` adjacent slots from ``first`` on."""

    slab: Slab
    first: int
    count: int


@dataclass(slots=True, eq=False)
class Slab:
    """One file of equal slots.  ``busy``: transfers under way; ``last_use``: the newest use of any of its records."""

    number: int
    slot_bytes: int
    slots: int
    used: bytearray = field(init=False)
    free: int = field(init=False)
    busy: int = 0
    last_use: int = 0

    def __post_init__(self) -> None:
        self.used = bytearray(self.slots)
        self.free = self.slots

    @property
    def file_bytes(self) -> int:
        return self.slots * self.slot_bytes

    def take(self, first: int, count: int) -> Run:
        assert not any(self.used[first : first + count])
        self.used[first : first + count] = b"\1" * count
        self.free -= count
        return Run(self, first, count)

    def give(self, slot: int) -> None:
        assert self.used[slot]
        self.used[slot] = 0
        self.free += 1


@dataclass(slots=True)
class SlabClass:
    """All slabs of one slot size."""

    slot_bytes: int
    slabs: dict[int, Slab] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return sum(slab.free for slab in self.slabs.values())

    def take(self, count: int) -> list[Run]:
        """Up to ``count`` free slots in as few runs as are easily found."""
        runs: list[Run] = []
        size = count
        while count and size:
            run = self._find(size)
            if run is None:
                size //= 2
                continue
            runs.append(run)
            count -= run.count
            size = min(size, count)
        return runs

    def _find(self, size: int) -> Run | None:
        pattern = bytes(size)
        for slab in self.slabs.values():
            if slab.free >= size:
                first = slab.used.find(pattern)
                if first >= 0:
                    return slab.take(first, size)
        return None
