"""What an engine tells at start: its groups, its tiers, what is off and why.

Owns: the facts, as plain values; ``serve.tables`` draws them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.cache.kinds import describe
from ostinato.cache.layout import CacheLayout


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One KV cache group; ``blocks`` = all device blocks, which the groups share."""

    group: int
    kind: str
    layers: int
    hash_unit: int
    page_bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class TierRow:
    """One tier, fastest first."""

    tier: str
    blocks: int | None
    size: int | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class StartupReport:
    """Everything the start-up table shows.  ``promise``: bitwise, or within tolerance and why."""

    model: str
    dtype: str
    promise: str
    max_model_len: int
    groups: tuple[GroupRow, ...]
    tiers: tuple[TierRow, ...]
    off: tuple[str, ...]


def group_rows(layout: CacheLayout, blocks: int) -> tuple[GroupRow, ...]:
    return tuple(
        GroupRow(spec.group, describe(spec.kind), len(spec.layers), spec.hash_unit, spec.page_bytes, blocks)
        for spec in layout.groups
    )
