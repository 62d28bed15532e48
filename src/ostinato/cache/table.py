"""The block table of one request: per group, which slot holds which page of its tokens.

Owns: the rows, and through one lease the request's claim on its slots.  Does not own: keys, whether a slot is hittable.
Invariants: a row is indexed by page ordinal and never shifts; a position whose page is not held is a HOLE; every slot
of a row is in the lease, each exactly once.  Thread: the scheduler's only.

::

    group 0 (full)      [ 7 ][ 8 ][ 9 ][12 ][13 ]
    group 1 (window)    [ . ][ . ][ . ][ 3 ][ 5 ]      . = HOLE: behind the window, or never loaded
"""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.cache.kinds import Range, contains
from ostinato.cache.layout import GroupSpec
from ostinato.cache.pool import Lease
from ostinato.ids import HOLE, RequestId, SlotId, Step


class BlockTable:
    """Rows of one request; made when it is admitted, closed when it finishes, aborts or is preempted."""

    __slots__ = ("_trimmed", "groups", "lease", "request_id", "rows")

    def __init__(self, request_id: RequestId, groups: Sequence[GroupSpec], lease: Lease) -> None:
        self.request_id = request_id
        self.groups = groups
        self.lease = lease
        self.rows: tuple[list[SlotId], ...] = tuple([] for _ in groups)
        self._trimmed: list[int] = [0] * len(groups)

    def skip(self, tokens: int) -> None:
        """Holes up to token ``tokens``: pages before it that the hit does not need never get a slot."""
        for spec in self.groups:
            row = self.rows[spec.group]
            row.extend([HOLE] * (tokens // spec.page_tokens - len(row)))

    def missing_pages(self, tokens: int) -> int:
        """Pages that must be appended so that ``tokens`` tokens have room in every group."""
        return sum(max(0, spec.pages(tokens) - len(self.rows[spec.group])) for spec in self.groups)

    def grow(self, tokens: int, taken: Lease) -> None:
        """Append the slots of ``taken`` so that ``tokens`` tokens have room; ``taken`` must fit exactly."""
        slots = iter(list(taken.slots))
        self.lease.absorb(taken)
        for spec in self.groups:
            row = self.rows[spec.group]
            row.extend(next(slots) for _ in range(spec.pages(tokens) - len(row)))
        assert next(slots, None) is None, "more slots taken than the table needs"

    def trim(self, tokens: int, fence: Step | None) -> None:
        """Let go of pages that no token from ``tokens`` on can need; they stay hittable as long as there is room."""
        for spec in self.groups:
            row = self.rows[spec.group]
            units = spec.kind.live(tokens, spec.hash_unit)
            live = page_ranges(spec, units)
            # Where nothing is live (a chunk or a window ends here), the empty range still says how far.
            start, stop = self._trimmed[spec.group], min(units[-1][0] // spec.page_units if units else 0, len(row))
            stale = [page for page in range(start, stop) if row[page] != HOLE and not contains(live, page)]
            self.lease.drop((row[page] for page in stale), fence)
            for page in stale:
                row[page] = HOLE
            self._trimmed[spec.group] = max(start, stop)

    def slot(self, group: int, page: int) -> SlotId:
        row = self.rows[group]
        return row[page] if page < len(row) else HOLE

    def held(self) -> int:
        return len(self.lease.slots)


def page_ranges(spec: GroupSpec, ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    """Unit ranges of a group as the page ranges that touch them."""
    units = spec.page_units
    return tuple((low // units, -(-high // units)) for low, high in ranges if high > low)
