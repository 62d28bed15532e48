"""How far beyond vLLM's own hit the tiers can take a request.

Owns: the search for one request, and bringing what it finds into host memory.  Does not own: host memory
(``host_cache``), the tiers (``below``), copying to vLLM's blocks (``scheduler``).  Thread: the scheduler's only.

vLLM's hit of n0 tokens is given.  All groups can resume there, and what a longer cut needs of the first n0 tokens is a
part of that (the law in ``cache.kinds``), so only what lies beyond must be found.  Blocks beyond n0 that vLLM's pool
still holds for some groups cannot be joined in: its table has no place for them.

A hit is claimed when all of its bytes lie in host memory, verified and held there::

    ask tiers (None)  ->  load into host memory (None)  ->  n* - n0        vLLM asks again each step; None = not yet

So vLLM never waits with blocks in hand for a tier, and a tier's fault is found before anything was promised: the
request is looked up again without what was lost, and then without that tier.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Final

from ostinato.cache.keys import BlockKey
from ostinato.cache.pool import Lease
from ostinato.cache.presence import HitPlan, Presence, tokens_by_tier
from ostinato.ids import DEVICE, JobId, SlotId, TierId
from ostinato.integrations.vllm.below import Below
from ostinato.integrations.vllm.host_cache import HOST, HostCache
from ostinato.integrations.vllm.requests import Claim, Known
from ostinato.transfer.job import JobState, Move, TransferJob

log: Final = logging.getLogger(__name__)
ANSWER_S: Final = 5.0
"""How long a tier may think before it counts as empty for a request."""
MAX_FAILURES: Final = 2


class Lookup:
    """Answers how many tokens more can be loaded."""

    def __init__(self, host: HostCache, below: Below) -> None:
        self._host = host
        self._below = below
        self._layout = host.layout

    def match(self, known: Known, local: int) -> int | None:
        """Tokens beyond ``local`` that are ready to be loaded; None = not known yet, or on the way."""
        claim = known.claim
        if claim is not None and claim.jobs:
            return None
        if claim is not None and claim.local == local and not _is_fetched(claim):
            return claim.plan.tokens - local
        known.refresh()
        presence = self._presence(known, local)
        if presence is None:
            return None
        fresh = self._claim(known, presence, local)
        if fresh is not None and claim is not None and claim.plan.tokens == fresh.plan.tokens:
            fresh.sources = claim.sources  # what was fetched for it lies in host memory now
        known.drop_claim()  # not before the new one holds the same slots
        known.claim = fresh
        if fresh is None:
            return 0
        return None if fresh.jobs else fresh.plan.tokens - local

    def landed(self, job: TransferJob, requests: Collection[Known]) -> None:
        """A load into host memory is over; whoever waited for it is looked up again when vLLM asks."""
        for known in requests:
            if known.claim is None or job.job_id not in known.claim.jobs:
                continue
            known.claim.jobs.discard(job.job_id)
            if job.failed:
                known.failures += 1
                for index in job.failed:
                    known.answers.get(job.order.tier, {})[job.order.moves[index].key] = False
                if known.failures >= MAX_FAILURES or job.state is JobState.IN_DOUBT:
                    known.denied.add(job.order.tier)

    def _presence(self, known: Known, local: int) -> Presence | None:
        """Where the request's units are; None while a tier has not answered and may still do so."""
        cap = known.request.num_tokens - 1
        while True:
            asked = {tier: probe for tier, probe in self._below.probes.items() if tier not in known.denied}
            answers = {tier: known.answers.setdefault(tier, {}) for tier in asked}
            presence = Presence(self._host.directory, self._layout, known.chain, (HOST,), answers, foreign=local)
            unknown = presence.unknown(cap) if asked else []
            silent: set[TierId] = set()
            for tier, probe in asked.items():
                keys = [key for key in unknown if key not in answers[tier]]
                reply = probe.probe(keys) if keys else ()
                if reply is None:
                    silent.add(tier)
                else:
                    answers[tier].update(zip(keys, reply, strict=True))
            if silent and self._may_wait(known):
                return None
            known.denied |= silent
            if not silent and not unknown:
                known.probing_until = None
                return presence

    def _may_wait(self, known: Known) -> bool:
        now = time.monotonic()
        if known.probing_until is None:
            known.probing_until = now + ANSWER_S
        if now < known.probing_until:
            return True
        known.probing_until = None
        return False

    def _claim(self, known: Known, presence: Presence, local: int) -> Claim | None:
        """Hold the longest hit beyond ``local`` that host memory has room for, and load what it lacks."""
        self._host.directory.next_tick()
        cap = known.request.num_tokens - 1
        while True:
            plan = presence.plan(cap)
            if plan.tokens <= local:
                self._host.touch(known.required(self._layout, local))
                return None
            claim = self._hold(known, plan, local)
            if claim is not None:
                return claim
            cap = local + (plan.tokens - local) * 3 // 4
            log.debug("host memory has no room for a hit of %d tokens; trying %d", plan.tokens, cap)

    def _hold(self, known: Known, plan: HitPlan, local: int) -> Claim | None:
        here: list[dict[int, SlotId]] = [{} for _ in plan.sources]
        missing: list[tuple[int, int, TierId]] = []
        joined: list[BlockKey] = []
        for spec, sources, slots in zip(self._layout.groups, plan.sources, here, strict=True):
            for ordinal, source in sources.items():
                place = self._host.directory.place(known.key(spec, ordinal), HOST)
                if source.tier == DEVICE:
                    continue
                if place is not None:  # ready, or on its way for another request
                    slots[ordinal] = place.slot
                    joined += [] if place.ready else [known.key(spec, ordinal)]
                else:
                    missing.append((spec.group, ordinal, source.tier))
        lease = self._host.pool.share([slot for slots in here for slot in slots.values()], f"claim {_name(known)}")
        fresh = self._host.pool.take(len(missing), f"claim {_name(known)}")
        if fresh is None:
            lease.release()
            return None
        for (group, ordinal, _), slot in zip(missing, fresh.slots, strict=True):
            here[group][ordinal] = slot
        lease.absorb(fresh)
        order = (DEVICE, HOST, *self._below.probes)
        claim = Claim(
            local, plan, tuple(here), lease, _beyond(tokens_by_tier(self._layout, plan, order), plan.tokens - local)
        )
        claim.jobs |= {job for key in joined for job in self._job_of(key)}
        self._fetch(known, claim, missing)
        self._host.touch(known.required(self._layout, plan.tokens), boundary=True)
        return claim

    def _job_of(self, key: BlockKey) -> list[JobId]:
        place = self._host.directory.place(key, HOST)
        return [place.job] if place is not None and place.job is not None else []

    def _fetch(self, known: Known, claim: Claim, missing: Collection[tuple[int, int, TierId]]) -> None:
        for tier in dict.fromkeys(tier for _, _, tier in missing):
            job_id = self._host.copies.new_id()
            moves: list[Move] = []
            for group, ordinal, source in missing:
                if source == tier:
                    key, slot = known.key(self._layout.groups[group], ordinal), claim.slots[group][ordinal]
                    self._host.write(key, ordinal, slot, job_id, boundary=True)
                    moves.append(self._host.move(key, ordinal, slot))
            held: Lease = claim.lease.fork(f"load from {tier}", [move.device_slot for move in moves])
            claim.jobs.add(job_id)
            self._below.fetch(tier, moves, held, job_id)


def _is_fetched(claim: Claim) -> bool:
    """Whether some of it was loaded for this claim: then what really arrived is looked up before it is promised."""
    return any(source.tier not in (DEVICE, HOST) for sources in claim.plan.sources for source in sources.values())


def _beyond(counts: Mapping[TierId, int], tokens: int) -> dict[TierId, int]:
    """``tokens`` beyond vLLM's hit by tier; host memory speaks for those that no group needs any more."""
    below, left = {}, tokens
    for tier, count in counts.items():
        if tier not in (DEVICE, HOST):
            below[tier] = min(count, left)
            left -= below[tier]
    return {HOST: left, **below}


def _name(known: Known) -> str:
    return known.request.request_id
