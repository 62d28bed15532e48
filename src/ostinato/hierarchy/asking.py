"""Finding where a prompt's units are, when some tiers must be asked.

Owns: which keys are asked of whom, and how long an answer is waited for.  Does not own: the search (``cache.match``),
what happens to the hit (``admission``).  Thread: the scheduler's only.

Only what a hit would load is asked about: a question may cost the store something (a lease that holds off eviction).
The search runs as if every unknown unit were there, and what it touched beyond our own tiers is the question; with the
answers it runs again, until it touches nothing unknown.  Two or three rounds, each one batch per tier::

    round 1   longest hit if all were there: 4,096   full groups, last window, last states   -> 3,000 of the full ones
    round 2   longest hit with that:         2,992   its window, its states                  -> all there: 2,992
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ostinato.cache.presence import Presence
from ostinato.hierarchy.residency import Residency
from ostinato.hierarchy.tiers import Core
from ostinato.ids import TierId


class Asker:
    """Makes the :class:`Presence` of one request at a time."""

    def __init__(self, core: Core, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock

    def presence(self, request: Residency, among: Collection[TierId]) -> Presence | None:
        """Where the units of the request's tokens are, of the tiers in ``among``.

        None while a tier has not answered and may still do so.
        """
        core, cap = self._core, len(request.tokens) - 1
        while True:
            allowed = [tier for tier in among if tier not in request.denied]
            tiers = [tier for tier in core.lower if tier in allowed]
            asked = {tier: probe for tier, probe in core.asked.items() if tier in allowed}
            answers = {tier: request.answers.setdefault(tier, {}) for tier in asked}
            presence = Presence(core.directory, core.layout, request.chain, tiers, answers)
            unknown = presence.unknown(cap) if asked and core.config.reuse and request.reuse else []
            silent = set()
            for tier, probe in asked.items():
                hidden = core.hidden.get(tier)
                if hidden:
                    answers[tier].update((key, False) for key in unknown if key in hidden)
                keys = [key for key in unknown if key not in answers[tier]]
                reply = probe.probe(keys) if keys else ()
                if reply is None:
                    silent.add(tier)
                elif keys:
                    answers[tier].update(zip(keys, reply, strict=True))
                    self._count(tier, reply, request)
            if silent:
                if self._may_wait(request):
                    return None
                # Once is enough: without room now, the next try must not wait for the same tiers again.
                request.denied |= silent
                for tier in silent:
                    core.answers[tier].silent += 1
            elif not unknown:
                request.probing_until = None
                return presence

    def _count(self, tier: TierId, reply: Sequence[bool], request: Residency) -> None:
        counts, held = self._core.answers[tier], sum(reply)
        counts.held += held
        counts.absent += len(reply) - held
        waiting_until, patience = request.probing_until, self._core.config.probe_deadline_s
        # What is answered at once is not worth a look at the clock.
        counts.seconds.add(self._clock() - (waiting_until - patience) if waiting_until is not None else 0.0)

    def _may_wait(self, request: Residency) -> bool:
        now = self._clock()
        if request.probing_until is None:
            request.probing_until = now + self._core.config.probe_deadline_s
        if now < request.probing_until:
            return True
        request.probing_until = None
        return False
