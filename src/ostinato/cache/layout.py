"""Layer specs to groups of layers whose pages are all of one size.

Owns: grouping, page arithmetic, the layout's fingerprint.  Does not own: tensors (``runtime`` makes strided views from
the offsets given here), slots.  Pure values; any thread.

Four units are kept apart, per group:

* ``hash_unit``: tokens per key; presence is asked per hash unit;
* ``page_tokens``: tokens per allocation page, ``page_units`` whole hash units;
* ``hit_granularity``: a hit ends at a multiple of it; itself a multiple of the hash unit;
* the transfer unit: what one move carries, a run of whole hash units inside one page.

::

    page of a group: page_units units at a stride of unit_stride bytes (64-byte aligned, padding at each unit's end)
    | unit 0                                         | unit 1 ...
    | layer a: K [heads, unit, dim] | V | layer b: ..| ...
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.cache.kinds import Kind, ceil_div, describe, peak_units
from ostinato.ids import GroupId

ALIGNMENT = 64
"""Bytes; a cache line, and the width of the widest vector load."""
_GROUP_COST = 0.005
_PAGE_UNIT_COST = 0.02


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer puts into the cache: ``parts`` = bytes per token of each of its buffers (K, V; a latent; ...)."""

    index: int
    kind: Kind
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers that share one block table.

    ``parts``: bytes per token of each buffer of a layer; ``unit_bytes`` are used, ``unit_stride`` allocated, per unit.
    """

    group: GroupId
    kind: Kind
    layers: tuple[int, ...]
    hash_unit: int
    page_units: int
    hit_granularity: int
    unit_bytes: int
    unit_stride: int
    parts: tuple[int, ...] = ()

    @property
    def page_tokens(self) -> int:
        return self.hash_unit * self.page_units

    @property
    def page_bytes(self) -> int:
        return self.unit_stride * self.page_units

    def pages(self, tokens: int) -> int:
        """Pages that cover ``tokens`` tokens."""
        return ceil_div(tokens, self.page_tokens)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All groups of a model; every page of every group has ``page_bytes`` bytes, so one pool serves them all."""

    groups: tuple[GroupSpec, ...]
    page_bytes: int

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("a layout needs at least one group")
        for spec in self.groups:
            if spec.page_bytes != self.page_bytes:
                raise ValueError(f"group {spec.group} has pages of {spec.page_bytes} bytes, not {self.page_bytes}")
            if spec.hit_granularity % spec.hash_unit:
                raise ValueError(f"group {spec.group}: hit granularity is not a multiple of its hash unit")

    @property
    def base_unit(self) -> int:
        """Tokens per link of the key chain: the greatest unit of which every hash unit is a multiple."""
        return math.gcd(*(spec.hash_unit for spec in self.groups))

    @property
    def granularity(self) -> int:
        """Hits end at multiples of this many tokens."""
        return math.lcm(*(spec.hit_granularity for spec in self.groups))

    def peak_pages(self, tokens: int, in_flight: int) -> int:
        """Most pages that one request of ``tokens`` tokens holds at once (``in_flight`` = tokens of one step)."""
        total = 0
        for spec in self.groups:
            units = peak_units(spec.kind, tokens, in_flight, spec.hash_unit)
            # Each run of units may straddle one page more than it fills.
            spare = len(spec.kind.live(tokens, spec.hash_unit)) if spec.page_units > 1 else 0
            total += min(spec.pages(tokens), ceil_div(units, spec.page_units) + spare)
        return total

    def resident_pages(self, tokens: int) -> int:
        """Pages that a request of ``tokens`` tokens holds between steps."""
        total = 0
        for spec in self.groups:
            for low, high in spec.kind.live(tokens, spec.hash_unit):
                total += ceil_div(high, spec.page_units) - low // spec.page_units
        return total

    def fingerprint(self) -> bytes:
        """32-byte digest of everything that gives a page its meaning; part of every persisted identity."""
        text = ";".join(
            f"{spec.group},{describe(spec.kind)},{spec.layers},{spec.parts},{spec.hash_unit},{spec.page_units},"
            f"{spec.hit_granularity},{spec.unit_bytes},{spec.unit_stride}"
            for spec in self.groups
        )
        return hashlib.sha256(f"ostinato-layout-1;{self.page_bytes};{text}".encode()).digest()


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to lay out a bucket of like layers: ``width`` layers a group, ``units`` hash units a page."""

    width: int
    units: int
    unit_bytes: int
    groups: int


def build_layout(layers: Sequence[LayerSpec], hash_unit: int = 16, max_page_units: int = 1) -> CacheLayout:
    """Group ``layers`` so that all pages are equal and little is wasted.

    Layers of one kind and size form a bucket; a bucket is cut into groups of ``width`` layers.  Among all page sizes
    that some cut fills exactly, the cheapest in padding, number of groups and coarseness of pages wins.
    ``max_page_units`` > 1 also allows pages of several hash units, for models whose layers differ in size.
    """
    if not layers:
        raise ValueError("the model has no layer that caches anything")
    buckets: dict[tuple[Kind, tuple[int, ...]], list[int]] = {}
    for layer in layers:
        buckets.setdefault((layer.kind, layer.parts), []).append(layer.index)
    menu = {
        key: [
            _Option(width, units, width * sum(key[1]) * hash_unit, ceil_div(len(indices), width))
            for width in range(1, len(indices) + 1)
            for units in range(1, max_page_units + 1)
        ]
        for key, indices in buckets.items()
    }
    sizes = {
        math.lcm(ALIGNMENT * option.units, _align(option.unit_bytes) * option.units)
        for options in menu.values()
        for option in options
    }
    best: tuple[float, int, list[_Option]] | None = None
    for page_bytes in sorted(sizes):
        choice = _choose(list(menu.values()), [len(v) for v in buckets.values()], page_bytes)
        if choice is not None and (best is None or choice[0] < best[0]):
            best = (choice[0], page_bytes, choice[1])
    assert best is not None, "the largest one-unit page always fits every bucket"
    _, page_bytes, options = best
    return CacheLayout(_make_groups(buckets, options, page_bytes, hash_unit), page_bytes)


def _align(size: int) -> int:
    return ceil_div(size, ALIGNMENT) * ALIGNMENT


def _choose(menu: list[list[_Option]], counts: list[int], page_bytes: int) -> tuple[float, list[_Option]] | None:
    """Cost and cheapest option per bucket for one page size, or None when some bucket cannot fill such pages."""
    total, chosen = 0.0, []
    for options, count in zip(menu, counts, strict=True):
        scored = []
        for option in options:
            stride, rest = divmod(page_bytes, option.units)
            if rest or stride % ALIGNMENT or option.unit_bytes > stride:
                continue
            used = option.unit_bytes * count / (option.groups * option.width)
            waste = 1 - used / stride
            cost = waste * count + _GROUP_COST * option.groups + _PAGE_UNIT_COST * (option.units - 1)
            scored.append((cost, option.groups, option))
        if not scored:
            return None
        cost, _, option = min(scored, key=lambda item: item[:2])
        total += cost
        chosen.append(option)
    return total, chosen


def _make_groups(
    buckets: dict[tuple[Kind, tuple[int, ...]], list[int]], options: list[_Option], page_bytes: int, hash_unit: int
) -> tuple[GroupSpec, ...]:
    groups: list[GroupSpec] = []
    for ((kind, parts), indices), option in zip(buckets.items(), options, strict=True):
        for start in range(0, len(indices), option.width):
            members = tuple(indices[start : start + option.width])
            groups.append(
                GroupSpec(
                    group=GroupId(len(groups)),
                    kind=kind,
                    layers=members,
                    parts=parts,
                    hash_unit=hash_unit,
                    page_units=option.units,
                    hit_granularity=hash_unit,
                    unit_bytes=len(members) * sum(parts) * hash_unit,
                    unit_stride=page_bytes // option.units,
                )
            )
    return tuple(groups)
