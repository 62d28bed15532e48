"""What the scheduler half knows of one request of vLLM's.

Owns: the shape.  Does not own: the request's blocks (vLLM's), what is decided about it (``lookup``, ``saving``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ostinato.cache.keys import BlockKey, KeyChain
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.cache.pool import Lease
from ostinato.cache.presence import HitPlan
from ostinato.ids import JobId, SlotId, TierId
from ostinato.integrations.vllm.compat import VllmRequest
from ostinato.integrations.vllm.identity import extend_chain


@dataclass(slots=True)
class Claim:
    """A hit of ``plan.tokens`` tokens beyond the ``local`` ones that vLLM's own pool holds.

    ``slots``: host slots of all that it needs beyond those, by group and ordinal; ``lease`` holds them, so nothing of
    it can vanish.  ``jobs``: loads into some of them that are still under way.
    """

    local: int
    plan: HitPlan
    slots: tuple[Mapping[int, SlotId], ...]
    lease: Lease
    sources: Mapping[TierId, int]
    jobs: set[JobId] = field(default_factory=set)


@dataclass(slots=True)
class Known:
    """One request.

    ``answers``: what asked tiers said about its keys; ``denied``: tiers that it asks no more; ``failures``: loads that
    did not arrive in host memory.  ``saved``: by group, the first unit that was not considered for saving.
    ``refused``: nothing is loaded for it any more, since a copy to vLLM's blocks failed.  ``sources``: where its loaded
    tokens came from.
    """

    request: VllmRequest
    chain: KeyChain
    saved: list[int]
    answers: dict[TierId, dict[BlockKey, bool]] = field(default_factory=dict)
    denied: set[TierId] = field(default_factory=set)
    probing_until: float | None = None
    failures: int = 0
    refused: bool = False
    claim: Claim | None = None
    sources: Mapping[TierId, int] = field(default_factory=dict)

    def refresh(self) -> None:
        """Take in what vLLM hashed since."""
        extend_chain(self.chain, self.request.block_hashes)

    def key(self, spec: GroupSpec, ordinal: int) -> BlockKey:
        return BlockKey(spec.group, self.chain.digest(spec.hash_unit, ordinal))

    def known_units(self, spec: GroupSpec) -> int:
        """Units of the group that have keys."""
        return len(self.chain.digests) * self.chain.unit // spec.hash_unit

    def required(self, layout: CacheLayout, tokens: int) -> list[BlockKey]:
        """Keys of what a cut at ``tokens`` needs, as far as they are known."""
        return [
            self.key(spec, ordinal)
            for spec in layout.groups
            for low, high in spec.kind.required(tokens, spec.hash_unit)
            for ordinal in range(low, min(high, self.known_units(spec)))
        ]

    def drop_claim(self) -> None:
        if self.claim is not None:
            self.claim.lease.release()
            self.claim = None
