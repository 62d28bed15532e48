"""Layer specs to groups of layers whose pages are all of one size.

Owns: groups, page arithmetic, the layout's fingerprint.  Does not own: the search for the page size (``grouping``),
tensors (``runtime`` makes strided views from the offsets given here), slots.  Pure values; any thread.

Four units are kept apart, per group:

* ``hash_unit``: tokens per key; presence is asked per hash unit;
* ``page_tokens``: tokens per allocation page, ``page_units`` whole hash units;
* ``hit_granularity``: a hit ends at a multiple of it; itself a multiple of the hash unit;
* the transfer unit: what one move carries, a run of whole hash units inside one page.

::

    page of a group: page_units units at a stride of unit_stride bytes (64-byte aligned, padding at each unit's end)
    | unit 0                                         | unit 1 ...
    | layer a: K [heads, unit, dim] | V | layer b: ..| ...

    page of a state group: one unit, the states of all its layers after one token
    | layer a: conv [channels, kernel - 1] | recurrent | layer b: conv | recurrent | ... | padding |
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ostinato.cache import grouping
from ostinato.cache.grouping import Bucket, find_cuts
from ostinato.cache.kinds import Kind, ceil_div, describe, keeps_checkpoints, peak_units
from ostinato.ids import GroupId

ALIGNMENT: Final = grouping.ALIGNMENT
"""Bytes; a cache line, and the width of the widest vector load."""
MAX_PAGE_UNITS: Final = 256
"""Pages of more tokens would make a short prompt's last page mostly empty."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer puts into the cache: ``parts`` = bytes of each of its buffers.

    Per token (K, V; a latent; ...), or, for recurrent state, of one state; each of those a multiple of 64.
    """

    index: int
    kind: Kind
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers that share one block table.

    ``parts``: as in :class:`LayerSpec`, of each layer; ``unit_bytes`` are used, ``unit_stride`` allocated, per unit.
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


def build_layout(layers: Sequence[LayerSpec], hash_unit: int = 16, max_page_units: int = MAX_PAGE_UNITS) -> CacheLayout:
    """Group ``layers`` so that all pages are equal, little is wasted, groups are few and short requests take little.

    Layers of one kind and size form a bucket; ``grouping`` finds the page size and the cut of each bucket into groups.
    Pages of at most ``max_page_units`` hash units; a page of recurrent state always holds one state of each layer.
    """
    if not layers:
        raise ValueError("the model has no layer that caches anything")
    members: dict[tuple[Kind, tuple[int, ...]], list[int]] = {}
    for layer in layers:
        members.setdefault((layer.kind, layer.parts), []).append(layer.index)
    buckets = [
        Bucket(kind, unit_size(kind, parts, hash_unit), len(indices), 1 if keeps_checkpoints(kind) else max_page_units)
        for (kind, parts), indices in members.items()
    ]
    page_bytes, cuts = find_cuts(buckets, hash_unit)
    groups: list[GroupSpec] = []
    for ((kind, parts), indices), bucket, cut in zip(members.items(), buckets, cuts, strict=True):
        for number in range(cut.groups):
            some = tuple(indices[len(indices) * number // cut.groups : len(indices) * (number + 1) // cut.groups])
            groups.append(
                GroupSpec(
                    group=GroupId(len(groups)),
                    kind=kind,
                    layers=some,
                    parts=parts,
                    hash_unit=hash_unit,
                    page_units=cut.units,
                    hit_granularity=hash_unit,
                    unit_bytes=len(some) * bucket.layer_bytes,
                    unit_stride=page_bytes // cut.units,
                )
            )
    return CacheLayout(tuple(groups), page_bytes)


def unit_size(kind: Kind, parts: tuple[int, ...], hash_unit: int) -> int:
    """Bytes of one unit of one layer: of its ``hash_unit`` tokens, or of one state."""
    return sum(parts) * (1 if keeps_checkpoints(kind) else hash_unit)
