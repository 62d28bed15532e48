"""What of a prompt is cached where, and which prefixes are pinned, as plain values.

Owns: the shapes.  Does not own: finding out (``hierarchy.inspection``).  Positions are in tokens from the prompt's
start; spans are ``(start, end)`` with ``end`` excluded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class GroupPresence:
    """One KV cache group.  ``cached``: by tier, what it holds of the prompt; of recurrent state, the units at whose end
    a checkpoint lies.  ``boundaries``: ends of units that are kept longest, since others may resume there.
    """

    group: int
    kind: str
    unit: int
    cached: Mapping[str, tuple[Span, ...]]
    boundaries: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PinView:
    """``blocks``: by tier.  ``yielded``: its blocks on the device were given to a request that could not run else."""

    pin: str
    tokens: int
    expires_in_s: float
    blocks: Mapping[str, int]
    yielded: bool = False


@dataclass(frozen=True, slots=True)
class Inspection:
    """``longest_hit``: tokens that the prompt, continued by at least one token, would not have to compute now.

    ``by_tier`` sums to it.  ``resumable``: cuts at which a prompt that parts from this one could resume, as
    ``(first, last)``, every ``unit`` tokens.  ``pins``: those that keep any of it.  ``silent``: tiers that have not
    answered; what they hold is missing here.
    """

    prompt_tokens: int
    unit: int
    longest_hit: int
    by_tier: Mapping[str, int]
    resumable: tuple[Span, ...]
    groups: tuple[GroupPresence, ...]
    pins: tuple[PinView, ...]
    silent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeletionView:
    """``forgotten``: units in our own tiers.  ``tiers``: of the others, ``deleted``, ``pending`` or ``hidden``."""

    prompt_tokens: int
    units: int
    forgotten: Mapping[str, int]
    tiers: Mapping[str, str]
    unpinned: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TierPins:
    """Blocks of an own tier that pins hold, and may hold; ``blocks``: all that it has."""

    tier: str
    pinned: int
    limit: int
    blocks: int


@dataclass(frozen=True, slots=True)
class CacheSummary:
    """``pins``: the caller's.  ``units``: cached by tier and group, of everybody.  ``open_deletions``: not confirmed.

    ``hidden``: keys that nobody may find in a tier which has not, or cannot, delete them.
    """

    pins: tuple[PinView, ...]
    tiers: tuple[TierPins, ...]
    units: Mapping[str, tuple[int, ...]]
    open_deletions: int
    hidden: Mapping[str, int]
