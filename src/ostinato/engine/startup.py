"""What an engine tells at start: its groups, its tiers, what is off and why.

Owns: the facts, as plain values; ``serve.tables`` draws them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.cache.kinds import describe, keeps_checkpoints
from ostinato.cache.layout import CacheLayout


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One KV cache group; ``blocks`` = all device blocks, which the groups share.

    ``page_tokens``: tokens of a page, None where a page holds one recurrent state of each layer.
    """

    group: int
    kind: str
    layers: int
    hash_unit: int
    page_tokens: int | None
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
        GroupRow(
            group=spec.group,
            kind=describe(spec.kind),
            layers=len(spec.layers),
            hash_unit=spec.hash_unit,
            page_tokens=None if keeps_checkpoints(spec.kind) else spec.page_tokens,
            page_bytes=spec.page_bytes,
            blocks=blocks,
        )
        for spec in layout.groups
    )
