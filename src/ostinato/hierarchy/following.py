"""Requests that wait for another one to compute the prefix that both have.

Owns: who follows whom, and for how long.  Does not own: the hit that comes of it (an ordinary one), tables.
Thread: the scheduler's only.

A cold prefix that two requests share is computed once: the second is parked before it holds anything, until the first
has computed what they share; then it is admitted and hits it on the device::

    leader     |=== computed ===>              shared |  its own tail
    follower   |  hit |. . . . waits for this . . . . |  its own tail

It cannot hang: only a request that holds a table is followed, so nobody follows a follower; when the leader finishes,
is aborted or preempted, or stops advancing, its followers go on by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ostinato.cache.keys import KeyChain
from ostinato.hierarchy.residency import Following, Residency
from ostinato.hierarchy.tiers import Core
from ostinato.ids import RequestId

LEAST_GAIN: Final = 64
"""Tokens; waiting for a step to save fewer is not worth it."""
PATIENCE_S: Final = 5.0
"""A leader that has not advanced for so long is not waited for."""


@dataclass(slots=True)
class FollowingStats:
    """Totals since start: requests that waited, and the tokens that they waited for."""

    requests: int = 0
    tokens: int = 0


class Followers:
    """``requests``: the hierarchy's own map."""

    def __init__(self, core: Core, clock: Callable[[], float], requests: Mapping[RequestId, Residency]) -> None:
        self._core = core
        self._clock = clock
        self._requests = requests
        self.stats = FollowingStats()

    def must_wait(self, request: Residency) -> bool:
        """Whether the leader that the request follows is still on its way; costs next to nothing."""
        following = request.following
        if following is None:
            return False
        leader = self._requests.get(following.leader)
        if leader is not None and leader.table is not None and leader.computed < following.until:
            if leader.computed != following.seen:
                following.seen, following.since = leader.computed, self._clock()
            if self._clock() - following.since < PATIENCE_S:
                return True
            request.impatient = True
        request.following = None
        return False

    def follow(self, request: Residency, hit: int) -> bool:
        """Make the request wait when somebody is about to compute enough of its prefix beyond ``hit``."""
        core = self._core
        if not core.config.reuse or not request.reuse or request.impatient:
            return False
        last = (len(request.tokens) - 1) // core.layout.granularity * core.layout.granularity
        best, leader = hit + LEAST_GAIN - 1, None
        for other in self._requests.values():
            if other is request or other.table is None or other.is_private or last <= best or other.computed > last:
                continue
            shared = min(last, shared_tokens(request.chain, other.chain))
            shared -= shared % core.layout.granularity
            if shared > best and other.computed < shared:
                best, leader = shared, other
        if leader is None:
            return False
        # Recurrent state is there for followers only where the leader keeps it.
        leader.junctions.add(best)
        request.following = Following(leader.request_id, best, leader.computed, self._clock())
        self.stats.requests += 1
        self.stats.tokens += best - hit
        return True


def shared_tokens(one: KeyChain, other: KeyChain) -> int:
    """Length of the common prefix of two prompts, in whole units: digests are chained, so it is found by bisection."""
    low, high = 0, min(len(one.digests), len(other.digests))
    if not high or one.digests[0] != other.digests[0]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if one.digests[middle - 1] == other.digests[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low * one.unit
