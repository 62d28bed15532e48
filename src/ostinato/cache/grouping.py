"""The search for one page size that suits every layer of a model.

Owns: what a good page is, and finding it.  Does not own: groups and their bytes (``layout``).  Pure; any thread.

Layers of one kind and size are a *bucket*.  A bucket is cut into groups of nearly equal width; a page holds one unit
(or several, if layers grow by the token) of one group.  Every group of every bucket has pages of the same size, so a
big recurrent state is spread over several groups, and a small layer's page holds several of its units::

    page      |<------------------------------ page_bytes ------------------------------>|
    state     | layer 0            | layer 1            | layer 2            | padding    |   width 3, 1 unit
    attention | unit 0     | unit 1     | unit 2     | unit 3     | unit 4     | unit 5  .|   width 4, 6 units

What it costs to hold one request, compared with the bytes that it needs, is weighed at three lengths; groups and pages
of several units have a price, because they cost time per request and copies of parts of pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ostinato.cache.kinds import Kind, ceil_div

ALIGNMENT: Final = 64
MEDIUM_TOKENS: Final = 2048
LONG_TOKENS: Final = 32768
LONG_WASTE: Final = 0.04
"""More than this share of padding in a long request is avoided, if any page size allows it."""
SHORT_WASTE: Final = 0.30
"""The same for a request of one unit: it must not take a giant page per group."""
MANY_GROUPS: Final = 12

_SHORT_WEIGHT: Final = 0.1
_MEDIUM_WEIGHT: Final = 0.5
_LONG_WEIGHT: Final = 1.0
_GROUP_PRICE: Final = 0.006
_UNITS_PRICE: Final = 0.01
_EXCESS_PRICE: Final = 25.0
_MANY_GROUPS_PRICE: Final = 0.04
_PRICE_FACTORS: Final = (1.0, 0.1, 6.0)
"""Each bucket's cuts are also chosen as if groups were cheaper or dearer: the limits hold for all buckets together."""
_FILL_TRIES: Final = 8


@dataclass(frozen=True, slots=True)
class Bucket:
    """``count`` layers of one kind and size; ``layer_bytes`` of one unit of one layer, at most ``max_units`` a page."""

    kind: Kind
    layer_bytes: int
    count: int
    max_units: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A bucket as ``groups`` groups, whose pages hold ``units`` units."""

    groups: int
    units: int


@dataclass(frozen=True, slots=True)
class _Demand:
    """A bucket, the ways to cut it, and what one more byte per page of it costs.

    ``growth`` is the price of holding one byte for each live unit, ``fixed`` of one byte in every request,
    ``spare`` of one byte in the part of a page that, on average, is not yet or no longer used.
    """

    bucket: Bucket
    widths: tuple[tuple[int, int], ...]
    """(groups, layers in the widest)."""
    long_units: int
    long_runs: int
    growth: float
    fixed: float
    spare: float


def find_cuts(buckets: Sequence[Bucket], hash_unit: int) -> tuple[int, tuple[Cut, ...]]:
    """The page size in bytes and the cut of each bucket.  Deterministic; the smaller page wins a tie."""
    search = _Search(buckets, hash_unit)
    best: tuple[float, int, tuple[Cut, ...]] | None = None
    for bound, page_bytes in sorted((search.bound(size), size) for size in search.sizes()):
        if best is not None and bound > best[0]:
            break
        for cuts in search.cuts(page_bytes):
            found = (search.cost(page_bytes, cuts), page_bytes, cuts)
            if best is None or found[:2] < best[:2]:
                best = found
    assert best is not None, "a page of the largest layer fits one layer of every bucket"
    return best[1], best[2]


class _Search:
    """The fixed part of one search: what a request needs at each length, and the prices that follow from it."""

    def __init__(self, buckets: Sequence[Bucket], hash_unit: int) -> None:
        units = {n: [_live(bucket.kind, n, hash_unit) for bucket in buckets] for n in (MEDIUM_TOKENS, LONG_TOKENS)}
        sizes = [bucket.layer_bytes * bucket.count for bucket in buckets]
        self.short = sum(sizes)
        medium = _MEDIUM_WEIGHT / sum(a * b for a, (b, _) in zip(sizes, units[MEDIUM_TOKENS], strict=True))
        self.long = sum(a * b for a, (b, _) in zip(sizes, units[LONG_TOKENS], strict=True))
        long = _LONG_WEIGHT / self.long
        self.demands = [
            _Demand(
                bucket,
                _widths(bucket.count),
                at_long[0],
                at_long[1],
                medium * at_medium[0] + long * at_long[0],
                _SHORT_WEIGHT / self.short,
                medium * at_medium[1] + long * at_long[1],
            )
            for bucket, at_medium, at_long in zip(buckets, units[MEDIUM_TOKENS], units[LONG_TOKENS], strict=True)
        ]

    def bound(self, page_bytes: int) -> float:
        """No cut for this page size costs less: as if pages of several units had no padding."""
        total, cost = 0, 0.0
        for demand in self.demands:
            bucket = demand.bucket
            groups = ceil_div(bucket.count, page_bytes // bucket.layer_bytes)
            filled = groups * page_bytes if bucket.max_units == 1 else bucket.count * bucket.layer_bytes
            cost += filled * demand.growth + groups * page_bytes * demand.fixed
            total += groups
        return cost + self._price(page_bytes, total)

    def sizes(self) -> set[int]:
        """Page sizes worth trying: those that some cut of a bucket fills, or that it fills but for a few bytes."""
        least = max(_align(demand.bucket.layer_bytes) for demand in self.demands)
        # With larger ones a short request, which takes one page per bucket at least, is over its limit for sure; but
        # where that cannot be helped, a page of two of the largest layers may still be the lesser evil.
        most = max(2 * least, int((1 + SHORT_WASTE) * self.short / len(self.demands)) + ALIGNMENT)
        anchors = {
            size
            for demand in self.demands
            for _, width in demand.widths
            if least <= (size := _align(width * demand.bucket.layer_bytes)) <= most
        }
        found = {least} | anchors
        for demand in self.demands:
            if demand.bucket.max_units > 1:
                for _, width in demand.widths:
                    found.update(_filled(_align(width * demand.bucket.layer_bytes), anchors | {least}))
        return {size for size in found if least <= size <= most}

    def cuts(self, page_bytes: int) -> list[tuple[Cut, ...]]:
        """A few ways to cut all buckets for one page size."""
        rows = [
            [(demand, cut, _memory_cost(demand, cut, page_bytes)) for cut in _possible(demand, page_bytes)]
            for demand in self.demands
        ]
        ways = (
            tuple(min(row, key=lambda item: item[2] + price * item[1].groups)[1] for row in rows)
            for price in (_GROUP_PRICE * factor for factor in _PRICE_FACTORS)
        )
        return list(dict.fromkeys(ways))

    def cost(self, page_bytes: int, cuts: Sequence[Cut]) -> float:
        """What is minimised: padding, groups, coarse pages, and dearly what is over a limit."""
        groups = sum(cut.groups for cut in cuts)
        held, cost = 0, 0.0
        for demand, cut in zip(self.demands, cuts, strict=True):
            cost += _memory_cost(demand, cut, page_bytes)
            # The last run of units ends inside a page, and a run that starts late starts inside one.
            pages = ceil_div(demand.long_units, cut.units) + (cut.units > 1) * (demand.long_runs - 1)
            held += cut.groups * page_bytes * pages
        over = max(0.0, held / self.long - 1 - LONG_WASTE)
        coarse = any(cut.units > 1 for cut in cuts)
        return cost + _UNITS_PRICE * coarse + _EXCESS_PRICE * over + self._price(page_bytes, groups)

    def _price(self, page_bytes: int, groups: int) -> float:
        """Of groups, and of too many bytes for a short request."""
        over = max(0.0, groups * page_bytes / self.short - 1 - SHORT_WASTE)
        return _GROUP_PRICE * groups + _MANY_GROUPS_PRICE * max(0, groups - MANY_GROUPS) + _EXCESS_PRICE * over


def _align(size: int) -> int:
    return ceil_div(size, ALIGNMENT) * ALIGNMENT


def _live(kind: Kind, tokens: int, hash_unit: int) -> tuple[int, int]:
    """Live units, at least one, and the ends of their runs that lie somewhere inside a page."""
    # One token less: at the end of a chunk of local attention nothing is live, which is not typical.
    runs = [(low, high) for low, high in kind.live(tokens - 1, hash_unit) if high > low]
    units = sum(high - low for low, high in runs)
    return max(1, units), sum(1 + (low > 0) for low, _ in runs) or 1


def _widths(count: int) -> tuple[tuple[int, int], ...]:
    """Every number of groups that a width needs, with the smallest width that needs no more."""
    found: dict[int, int] = {}
    for width in range(count, 0, -1):
        found[ceil_div(count, width)] = width
    return tuple(found.items())


def _filled(unit: int, anchors: set[int]) -> Iterator[int]:
    """Page sizes near the anchors of which several units of ``unit`` bytes fill all or nearly all."""
    for anchor in anchors:
        units = anchor // unit
        if units:
            yield units * unit
            yield ceil_div(anchor, units * ALIGNMENT) * units * ALIGNMENT
        yield (units + 1) * unit


def _possible(demand: _Demand, page_bytes: int) -> Iterator[Cut]:
    """For each width the most units that share the page evenly, at strides that keep the alignment."""
    lines, limit, layer_bytes = page_bytes // ALIGNMENT, demand.bucket.max_units, demand.bucket.layer_bytes
    for groups, width in demand.widths:
        units = min(limit, page_bytes // _align(width * layer_bytes))
        if units:
            stop = max(1, units - _FILL_TRIES)
            while lines % units and units > stop:
                units -= 1
            yield Cut(groups, units if lines % units == 0 else 1)


def _memory_cost(demand: _Demand, cut: Cut, page_bytes: int) -> float:
    """The weighed bytes of the pages of a bucket; the bytes needed are the same for every cut, so they are left out."""
    per_unit = demand.growth + demand.spare * (cut.units - 1) / 2
    return cut.groups * page_bytes * (per_unit / cut.units + demand.fixed)
