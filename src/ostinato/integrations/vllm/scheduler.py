"""The scheduler half: vLLM's questions and events, in our terms.

Owns: the requests, the step's orders, when tiers are looked after.  Does not own: vLLM's types (``connector``), its
blocks and queues, any decision (``lookup``, ``saving``).  Thread: vLLM's scheduler's only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ostinato.cache.keys import KeyChain
from ostinato.ids import SlotId, Step, TierId
from ostinato.integrations.vllm.arena import Arena
from ostinato.integrations.vllm.below import Below
from ostinato.integrations.vllm.compat import NULL_BLOCK, StepView, VllmRequest
from ostinato.integrations.vllm.host_cache import HostCache
from ostinato.integrations.vllm.lookup import Lookup
from ostinato.integrations.vllm.messages import StepOrders
from ostinato.integrations.vllm.requests import Known
from ostinato.integrations.vllm.saving import choose, choose_states, has_news
from ostinato.transfer.job import Move, TransferOrder, TransferReport

log: Final = logging.getLogger(__name__)
Rows = Sequence[Sequence[int]]


class SchedulerHalf:
    """``hash_block``: tokens of one of vLLM's block hashes."""

    def __init__(self, arena: Arena, host: HostCache, below: Below, seed: bytes, hash_block: int) -> None:
        self.host = host
        self.below = below
        self._arena = arena
        self._lookup = Lookup(host, below)
        self._seed = seed
        self._hash_block = hash_block
        self._requests: dict[str, Known] = {}
        self._step = Step(0)
        self._loads: dict[int, Known] = {}
        self._new_loads: list[tuple[str, TransferOrder]] = []

    def match(self, request: VllmRequest, local: int) -> int | None:
        """Tokens beyond ``local`` that can be loaded now; None = ask again."""
        self._settle()
        known = self._know(request)
        return 0 if known.refused else self._lookup.match(known, local)

    def allocated(self, request: VllmRequest, rows: Rows, tokens: int) -> None:
        """vLLM gave the request its blocks; ``tokens`` of them are to be loaded (0: none, whatever was offered)."""
        known = self._know(request)
        claim = known.claim
        if tokens == 0 or claim is None:
            known.drop_claim()
            return
        known.claim, known.sources = None, claim.sources
        moves: list[Move] = []
        for spec, slots, row in zip(self.host.layout.groups, claim.slots, rows, strict=True):
            known.saved[spec.group] = max(known.saved[spec.group], claim.plan.tokens // spec.hash_unit)
            for ordinal, slot in slots.items():
                block = row[ordinal] if ordinal < len(row) else NULL_BLOCK
                moves.append(self.host.move(known.key(spec, ordinal), ordinal, SlotId(block), slot))
        order = self.host.load(moves, claim.lease, self._step)
        self._loads[order.job_id] = known
        self._new_loads.append((request.request_id, order))

    def plan(self, step: StepView) -> StepOrders:
        """The step's orders to the workers."""
        self._step = Step(self._step + 1)
        self._settle()
        self.host.directory.next_tick()
        saves = []
        for scheduled in step.scheduled:
            known = self._requests.get(scheduled.request_id)
            if known is None:
                continue
            units = choose_states(self.host.layout, known, scheduled.states)
            if has_news(self.host.layout, known, scheduled.computed):
                rows = step.rows(scheduled.request_id)
                units += choose(self.host.layout, known, rows, scheduled.computed) if rows is not None else []
            order = self.host.save(units, self._step) if units else None
            saves += [order] if order is not None else []
        loads, self._new_loads = tuple(self._new_loads), []
        return StepOrders(self._arena.place, tuple(saves), loads)

    def reported(self, reports: Iterable[TransferReport]) -> None:
        """What the workers did of a step's orders."""
        for report in reports:
            self.below.store(self.host.settle(report))
            if report.job_id in self._loads:
                self._loads[report.job_id].refused |= bool(report.failed)
                if self.host.copies.get(report.job_id) is None:
                    del self._loads[report.job_id]
        self._settle()

    def finished(self, request: VllmRequest, computed: int) -> None:
        """The request ends, with its KV computed up to ``computed``: others may go on from there."""
        known = self._requests.pop(request.request_id, None)
        if known is None:
            return
        known.drop_claim()
        known.refresh()
        self.host.directory.next_tick()
        cut = computed // self.host.layout.granularity * self.host.layout.granularity
        self.host.touch(known.required(self.host.layout, cut), boundary=True)

    def sources(self, request_id: str) -> Mapping[TierId, int]:
        """The request's loaded tokens by the tier that they came from."""
        known = self._requests.get(request_id)
        return known.sources if known is not None else {}

    def reset(self) -> None:
        """Forget what host memory holds and nobody uses; tiers below keep what they have."""
        self.host.pool.drop_idle()

    def close(self) -> None:
        self.below.close()
        self._arena.close()

    def _know(self, request: VllmRequest) -> Known:
        known = self._requests.get(request.request_id)
        if known is None or known.request is not request:
            chain = KeyChain(self._seed, self._hash_block)
            known = Known(request, chain, [0] * len(self.host.layout.groups))
            self._requests[request.request_id] = known
            if len(request.block_hashes) != request.num_tokens // self._hash_block:
                log.error("request %s has hashes of blocks of another size; nothing is loaded", request.request_id)
                known.refused = True
        return known

    def _settle(self) -> None:
        for job in self.below.settle(time.monotonic()):
            self._lookup.landed(job, self._requests.values())
