"""Numbers of a running cache, as plain values.

Owns: the shapes.  Does not own: the counting (each part counts what it does) or any export format.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierStats:
    """Blocks of one owned tier by state; ``free + idle + held + limbo + quarantine`` is all of them.

    Idle blocks are hittable and may be evicted; blocks in quarantine belong to a transfer that is in doubt.
    """

    tier: str
    blocks: int
    free: int
    idle: int
    held: int
    limbo: int
    quarantine: int
    evictions: int


@dataclass(frozen=True, slots=True)
class LoadSpeed:
    """What loads from a tier have taken lately: ``latency_s`` and, on top, a byte per ``1 / bytes_per_second``."""

    tier: str
    latency_s: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class CacheStats:
    """All owned tiers, fastest first, and transfers since start.

    ``declined_tokens``: found in a tier, and computed since that was faster.  ``coalesced_tokens``: not computed twice,
    since a request waited for the one that was computing them.
    """

    tiers: tuple[TierStats, ...]
    keys: int
    open_transfers: int
    bytes_loaded: int
    bytes_stored: int
    failed_moves: int
    in_doubt: int
    late_reports: int
    revoked: int
    load_speeds: tuple[LoadSpeed, ...] = ()
    prefill_tokens_per_second: float = 0.0
    declined_tokens: int = 0
    coalesced_tokens: int = 0
