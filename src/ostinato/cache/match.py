"""The longest prefix that can be resumed, for any mix of kinds and tiers.

Owns: the search.  Does not own: presence (the caller answers for all tiers at once), tables.
Exact because of the law in ``kinds``: a missing ordinal ``m`` rules out every cut in ``(m * unit, n]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ostinato.cache.layout import GroupSpec

Present: TypeAlias = Callable[[int, int], bool]
"""``present(index of the group, ordinal)``: does any tier hold this unit?"""


def longest_hit(groups: Sequence[GroupSpec], cap: int, granularity: int, present: Present) -> int:
    """Largest ``n <= cap``, a multiple of ``granularity``, at which every group can resume; 0 when there is none.

    Each unit is asked about at most once (sinks that a gap separates from their window: once a pass): what a pass has
    proven is remembered as one run per group, and later passes (at smaller ``n``) need a part of it plus, perhaps,
    something to its left.
    """
    n = cap // granularity * granularity
    proven: list[tuple[int, int]] = [(0, 0)] * len(groups)
    while n > 0:
        missing = -1
        for index, spec in enumerate(groups):
            missing = _first_gap(index, spec, n, proven, present)
            if missing >= 0:
                n = missing * spec.hash_unit // granularity * granularity
                break
        if missing < 0:
            return n
    return 0


def _first_gap(index: int, spec: GroupSpec, n: int, proven: list[tuple[int, int]], present: Present) -> int:
    """Highest ordinal that the group needs at ``n`` and nobody holds, or -1.

    Walks from the right, since a gap near ``n`` rules out the fewest cuts, and so never skips a good one.
    """
    known_low, known_high = proven[index]
    ranges = spec.kind.required(n, spec.hash_unit)
    for low, high in reversed(ranges):
        ordinal = high - 1
        while ordinal >= low:
            if known_low <= ordinal < known_high:
                ordinal = known_low - 1
                continue
            if not present(index, ordinal):
                return ordinal
            ordinal -= 1
        if low <= known_high and known_low <= high:
            known_low, known_high = min(known_low, low), max(known_high, high)
        elif high > low and (low, high) == ranges[-1]:
            # Later passes are at smaller n: an older run further right is of no more use.
            known_low, known_high = low, high
        proven[index] = (known_low, known_high)
    return -1
