"""Load, recompute, or split: how much of what is cached a request takes.

Owns: the comparison.  Does not own: the estimates (``cost``), questions to tiers (``asking``), the search (``cache``).
Thread: the scheduler's only.

Loading a tier's part of a prompt and computing it both grow evenly with its length, so all of the part or nothing is
best.  The choices are the longest hit, and the longest ones without the slowest tiers, one after another::

    |== device ==|== host ====|== slow store =======|      load all, or
    |== device ==|== host ====|~~ compute ~~~~~~~~~~|      split, or
    |== device ==|~~ compute ~~~~~~~~~~~~~~~~~~~~~~~|
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ostinato.cache.presence import HitPlan, Presence
from ostinato.hierarchy.asking import Asker
from ostinato.hierarchy.cost import Costs
from ostinato.hierarchy.residency import Residency
from ostinato.hierarchy.tiers import Core
from ostinato.ids import DEVICE, TierId

WORTHWHILE_S: Final = 0.25
"""A hit is given up only for at least so much: estimates are rough, and a load leaves the processor to others."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request's units are taken from; ``declined``: tokens of the longest hit that are computed instead."""

    presence: Presence
    declined: int = 0


class Chooser:
    """Chooses for one request at a time."""

    def __init__(self, core: Core, clock: Callable[[], float]) -> None:
        self.costs = Costs(clock)
        self._core = core
        self._asker = Asker(core, clock)

    def choose(self, request: Residency) -> Choice | None:
        """None while a tier has not answered and may still do so."""
        core, costs = self._core, self.costs
        everything = self._asker.presence(request, core.order)
        if everything is None or not self._may_be_slow(request):
            return None if everything is None else Choice(everything)
        tokens = len(request.tokens)
        longest = everything.plan(tokens - 1)
        load_s, tail_s = costs.load_seconds(self._sizes(longest)), costs.compute_seconds(tokens - longest.tokens)
        if load_s < WORTHWHILE_S or tail_s is None:
            return Choice(everything)
        best, best_s = Choice(everything), load_s + tail_s - WORTHWHILE_S
        for count in range(len(core.order) - 1, 0, -1):
            part = self._asker.presence(request, core.order[:count])
            if part is None:
                return None
            hit = part.plan(longest.tokens)
            seconds = costs.load_seconds(self._sizes(hit)) + (costs.compute_seconds(tokens - hit.tokens) or 0.0)
            if seconds < best_s:
                best, best_s = Choice(part, longest.tokens - hit.tokens), seconds
        return best

    def _may_be_slow(self, request: Residency) -> bool:
        """Whether any tier would take long for the whole prompt: mostly not, and then there is nothing to compare."""
        core = self._core
        if not core.config.weigh_loads or len(core.order) == 1:
            return False
        size = sum(len(request.tokens) // spec.hash_unit * spec.unit_bytes for spec in core.layout.groups)
        return self.costs.load_seconds(dict.fromkeys(core.order, size)) >= WORTHWHILE_S

    def _sizes(self, hit: HitPlan) -> dict[TierId, int]:
        """Bytes that the hit loads from each tier."""
        sizes: dict[TierId, int] = {}
        for spec, sources in zip(self._core.layout.groups, hit.sources, strict=True):
            for source in sources.values():
                if source.tier != DEVICE:
                    sizes[source.tier] = sizes.get(source.tier, 0) + spec.unit_bytes
        return sizes
