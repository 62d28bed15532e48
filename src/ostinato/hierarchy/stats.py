"""A snapshot of the hierarchy's numbers.

Owns: reading them together.  Costs a walk over all slots: for dashboards and tests, not for every step.
"""

from __future__ import annotations

from collections import Counter

from ostinato.cache.pool import SlotState
from ostinato.hierarchy.hierarchy import CacheHierarchy
from ostinato.hierarchy.tiers import OwnedTier
from ostinato.ids import SlotId
from ostinato.observe.stats import CacheStats, TierStats


def snapshot(hierarchy: CacheHierarchy) -> CacheStats:
    core, book = hierarchy.core, hierarchy.core.book.stats
    return CacheStats(
        tiers=tuple(_tier(tier) for tier in (core.device, *core.lower.values())),
        keys=len(core.directory),
        open_transfers=len(core.book),
        bytes_loaded=book.bytes_loaded,
        bytes_stored=book.bytes_stored,
        failed_moves=book.failed_moves,
        in_doubt=book.in_doubt,
        late_reports=book.late_reports,
        revoked=book.revoked,
        load_speeds=hierarchy.costs.speeds(),
        prefill_tokens_per_second=hierarchy.costs.tokens_per_second,
        declined_tokens=hierarchy.costs.declined_tokens,
        coalesced_tokens=hierarchy.followers.stats.tokens,
    )


def _tier(tier: OwnedTier) -> TierStats:
    pool = tier.pool
    states = Counter(pool.state(SlotId(slot)) for slot in range(pool.capacity))
    return TierStats(
        tier.tier,
        pool.capacity,
        free=states[SlotState.FREE],
        idle=states[SlotState.IDLE],
        held=states[SlotState.HELD],
        limbo=states[SlotState.LIMBO],
        quarantine=states[SlotState.QUARANTINE],
        evictions=tier.retention.evictions,
    )
