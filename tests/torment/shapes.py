"""Layouts to try: every kind, pages of several units, different hash units."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from ostinato.cache.kinds import Chunked, Full, Kind, State, Window
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.ids import GroupId

PAGE_BYTES = 384


def shape(unit: int, *groups: tuple[Kind, int] | tuple[Kind, int, int]) -> CacheLayout:
    """Each group: kind, hash units per page, and its hash unit in multiples of ``unit``."""
    specs = []
    for index, (kind, page_units, *factor) in enumerate(groups):
        hash_unit, stride = unit * (factor[0] if factor else 1), PAGE_BYTES // page_units
        specs.append(GroupSpec(GroupId(index), kind, (index,), hash_unit, page_units, hash_unit, stride - 32, stride))
    return CacheLayout(tuple(specs), PAGE_BYTES)


def shapes_of(unit: int) -> Sequence[CacheLayout]:
    """Layouts whose groups share one hash unit: what every connector can serve."""
    window = 2 * unit + unit // 2
    return (
        shape(unit, (Full(), 1)),
        shape(unit, (Full(), 4)),
        shape(unit, (Full(), 1), (Window(window), 1)),
        shape(unit, (Full(), 4), (Window(window), 2), (State(), 1)),
        shape(unit, (Full(), 1), (State(), 1), (State(), 1)),
        shape(unit, (Full(), 2), (Window(unit + 2, 3), 3), (Chunked(3 * unit), 4)),
        shape(unit, (Window(window), 1), (Chunked(2 * unit + 1), 2)),
        shape(unit, (State(), 1)),
    )


UNEQUAL = (
    shape(2, (Full(), 4), (Window(9), 2, 2), (State(), 1, 4)),
    shape(3, (Full(), 2, 2), (Chunked(9), 4), (Window(7, 2), 3)),
)
"""Layouts of several hash units, which LMCache cannot serve."""

LAYOUTS = MappingProxyType({4: (*shapes_of(4), *UNEQUAL), 16: shapes_of(16)})
