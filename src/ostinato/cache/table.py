"""The block table of one request: per group, which slot holds which page of its tokens.

Owns: the rows, and through one lease the request's claim on its slots.  Does not own: keys, whether a slot is hittable.
Invariants: a row is indexed by page ordinal and never shifts; a position whose page is not held is a HOLE; every slot
of a row is in the lease, each exactly once.  Thread: the scheduler's only.

::

    group 0 (full)      [ 7 ][ 8 ][ 9 ][12 ][13 ]
    group 1 (window)    [ . ][ . ][ . ][ 3 ][ 5 ]      . = HOLE: behind the window, or never loaded
    group 2 (state)     [ . ][ . ][ . ][ 6 ][ 2 ]      6: the checkpoint after unit 3, 2: the working state

A state page at position ``m`` holds the state after unit ``m``, or, in the unit that is being filled, after the last
computed token.  The next chunk carries an unfinished page along, to the position where the chunk stops; a finished one
stays behind as a checkpoint and is never written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.cache.kinds import Range, contains, keeps_checkpoints
from ostinato.cache.layout import GroupSpec
from ostinato.cache.pool import Lease
from ostinato.ids import HOLE, RequestId, SlotId, Step


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Recurrent state of one sequence in one step.

    Tuples of pages have one entry per group, HOLE where the group keeps no state.  ``read``: where the state after the
    token before the chunk lies; all HOLE at the start of a sequence: zeros.  ``stops``: ascending ``(tokens, pages)``;
    the state after token ``tokens - 1`` is written to ``pages``.  The last stop is the end of the chunk, earlier ones
    are checkpoints.  A page that is both read and written is this sequence's own.
    """

    read: tuple[SlotId, ...]
    stops: tuple[tuple[int, tuple[SlotId, ...]], ...]


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

    def missing_pages(self, start: int, stops: Sequence[int]) -> int:
        """Pages that must be taken to compute the tokens from ``start`` to ``stops[-1]``.

        ``stops`` are the ascending positions at which recurrent state is kept.
        """
        count = 0
        for spec in self.groups:
            if keeps_checkpoints(spec.kind):
                count += len(stops) - (start % spec.hash_unit > 0)
            else:
                count += max(0, spec.pages(stops[-1]) - len(self.rows[spec.group]))
        return count

    def grow(self, start: int, stops: Sequence[int], taken: Lease) -> StatePlan | None:
        """Make room for the tokens from ``start`` to ``stops[-1]`` with the slots of ``taken``, which must fit exactly.

        Returns where recurrent state is read and written, or None when no group keeps any.
        """
        slots = iter(list(taken.slots))
        self.lease.absorb(taken)
        read = [HOLE] * len(self.groups)
        written = [[HOLE] * len(self.groups) for _ in stops]
        for spec in self.groups:
            row = self.rows[spec.group]
            if keeps_checkpoints(spec.kind):
                read[spec.group] = self._last_state(spec, start)
                unfinished = self._take_unfinished(spec, start)
                for pages, stop in zip(written, stops, strict=True):
                    page = next(slots) if unfinished is None else unfinished
                    pages[spec.group] = self._put_state(spec, stop, page)
                    unfinished = None
            else:
                row.extend(next(slots) for _ in range(spec.pages(stops[-1]) - len(row)))
        assert next(slots, None) is None, "more slots taken than the table needs"
        if not any(keeps_checkpoints(spec.kind) for spec in self.groups):
            return None
        return StatePlan(tuple(read), tuple((stop, tuple(pages)) for stop, pages in zip(stops, written, strict=True)))

    def new_pages(self, sent: list[int]) -> tuple[tuple[SlotId, ...], ...]:
        """What was appended to each row since ``sent``, which is brought up to date; state pages go their own way."""
        pages = tuple(
            () if keeps_checkpoints(spec.kind) else tuple(row[known:])
            for spec, row, known in zip(self.groups, self.rows, sent, strict=True)
        )
        sent[:] = [len(row) for row in self.rows]
        return pages

    def _last_state(self, spec: GroupSpec, start: int) -> SlotId:
        if not start:
            return HOLE
        slot = self.slot(spec.group, (start - 1) // spec.hash_unit)
        assert slot != HOLE, f"{self.request_id}: the state of group {spec.group} at token {start} is not held"
        return slot

    def _take_unfinished(self, spec: GroupSpec, start: int) -> SlotId | None:
        """The page whose state belongs to no whole unit: the first stop carries it along."""
        if start % spec.hash_unit == 0:
            return None
        row, position = self.rows[spec.group], start // spec.hash_unit
        slot, row[position] = row[position], HOLE
        return slot

    def _put_state(self, spec: GroupSpec, stop: int, page: SlotId) -> SlotId:
        row, position = self.rows[spec.group], (stop - 1) // spec.hash_unit
        row.extend([HOLE] * (position + 1 - len(row)))
        assert row[position] == HOLE, "a checkpoint is never written again"
        row[position] = page
        return page

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
