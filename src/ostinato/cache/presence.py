"""Where the units of one prompt are, over all tiers, and the plan of a hit.

Owns: the merge of tiers block by block, and the accounting of a hit by tier.  Does not own: the search (``match``),
moving bytes (``transfer``).  Lives for one admission.  Thread: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ostinato.cache.directory import Directory, Place
from ostinato.cache.keys import BlockKey, KeyChain
from ostinato.cache.kinds import keeps_checkpoints
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.cache.match import longest_hit
from ostinato.ids import DEVICE, HOLE, JobId, SlotId, TierId


class Source(NamedTuple):
    """Best copy of one unit: on the device (perhaps still being loaded by ``job``), or in a lower tier."""

    tier: TierId
    slot: SlotId
    job: JobId | None


@dataclass(frozen=True, slots=True)
class HitPlan:
    """A prefix of ``tokens`` tokens that can be resumed, and per group the source of each unit that it requires."""

    tokens: int
    sources: tuple[Mapping[int, Source], ...]


class Presence:
    """Answers ``present(group, ordinal)`` for one key chain; remembers what it found.

    ``tiers``: owned lower tiers, fastest first.  ``answers``: of asked tiers, fastest first; a key that a tier has not
    been asked about is absent.  ``foreign``: of the first so many tokens a device pool that is not ours (vLLM's) holds
    what any cut from there on requires.
    """

    def __init__(
        self,
        directory: Directory,
        layout: CacheLayout,
        chain: KeyChain,
        tiers: Sequence[TierId] = (),
        answers: Mapping[TierId, Mapping[BlockKey, bool]] | None = None,
        foreign: int = 0,
    ) -> None:
        self._directory = directory
        self._layout = layout
        self._chain = chain
        self._tiers = tiers
        self._answers = answers or {}
        self._foreign = foreign
        self._found: list[dict[int, Source]] = [{} for _ in layout.groups]

    def present(self, group: int, ordinal: int) -> bool:
        found = self._found[group]
        if ordinal not in found:
            source = self._locate(group, ordinal)
            if source is None:
                return False
            found[ordinal] = source
        return True

    def plan(self, cap: int) -> HitPlan:
        """The longest hit of at most ``cap`` tokens."""
        groups = self._layout.groups
        tokens = longest_hit(groups, cap, self._layout.granularity, self.present)
        chosen = []
        for spec, found in zip(groups, self._found, strict=True):
            ranges = spec.kind.required(tokens, spec.hash_unit) if tokens else ()
            chosen.append({ordinal: found[ordinal] for low, high in ranges for ordinal in range(low, high)})
        return HitPlan(tokens, tuple(chosen))

    def unknown(self, cap: int) -> list[BlockKey]:
        """What must be asked to know the longest hit: units that it would need and that not all tiers answered for.

        Of recurrent state, all earlier checkpoints are asked about at once: if one is not there, the next lower cut
        needs another one.
        """
        hoped = longest_hit(self._layout.groups, cap, self._layout.granularity, self._may_be_present)
        found: dict[BlockKey, None] = {}
        for spec in self._layout.groups:
            for low, high in spec.kind.required(hoped, spec.hash_unit):
                for ordinal in range(high - 1, low - 1, -1):
                    if not self.present(spec.group, ordinal):
                        first = 0 if keeps_checkpoints(spec.kind) else ordinal
                        keys = [self._key(spec, m) for m in range(ordinal, first - 1, -1)]
                        found.update((key, None) for key in keys if self._is_open(key))
        return list(found)

    def _may_be_present(self, group: int, ordinal: int) -> bool:
        return self.present(group, ordinal) or self._is_open(self._key(self._layout.groups[group], ordinal))

    def _is_open(self, key: BlockKey) -> bool:
        """Whether a tier that is asked has not said anything about ``key``."""
        return any(key not in known for known in self._answers.values())

    def _key(self, spec: GroupSpec, ordinal: int) -> BlockKey:
        return BlockKey(spec.group, self._chain.digest(spec.hash_unit, ordinal))

    def reach(self, cap: int) -> int:
        """How far the longest hit would go if recurrent state were no matter; 0 for a model that has nothing else."""
        groups = self._layout.groups
        remembering = [index for index, spec in enumerate(groups) if not keeps_checkpoints(spec.kind)]
        if len(remembering) in (0, len(groups)):
            return 0
        return longest_hit(
            [groups[index] for index in remembering],
            cap,
            self._layout.granularity,
            lambda index, ordinal: self.present(remembering[index], ordinal),
        )

    def _locate(self, group: int, ordinal: int) -> Source | None:
        spec = self._layout.groups[group]
        if (ordinal + 1) * spec.hash_unit <= self._foreign:
            return Source(DEVICE, HOLE, None)
        if not self._chain.covers(spec.hash_unit, ordinal):
            return None
        key = self._key(spec, ordinal)
        entry = self._directory.get(key)
        if entry is not None:
            device = entry.places.get(DEVICE)
            if device is not None:
                return Source(DEVICE, device.slot, device.job)
            for tier in self._tiers:
                place: Place | None = entry.places.get(tier)
                if place is not None and place.ready:
                    return Source(tier, place.slot, None)
        for tier, answers in self._answers.items():
            if answers.get(key):
                return Source(tier, HOLE, None)
        return None


def tokens_by_tier(layout: CacheLayout, plan: HitPlan, order: Sequence[TierId]) -> dict[TierId, int]:
    """The hit's tokens, each counted once, under the slowest tier that any group needs for it.

    ``order`` lists the tiers from fast to slow.  A token that no group needs any more (behind every window) counts
    with the fastest tier.
    """
    unit = layout.base_unit
    slowest = [0] * (plan.tokens // unit)
    speed = {tier: rank for rank, tier in enumerate(order)}
    for spec, sources in zip(layout.groups, plan.sources, strict=True):
        ratio = spec.hash_unit // unit
        for ordinal, source in sources.items():
            rank = speed[source.tier]
            for index in range(ordinal * ratio, (ordinal + 1) * ratio):
                slowest[index] = max(slowest[index], rank)
    counts = dict.fromkeys(order, 0)
    for rank in slowest:
        counts[order[rank]] += unit
    return {tier: count for tier, count in counts.items() if count}
