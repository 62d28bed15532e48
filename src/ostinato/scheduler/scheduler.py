"""Continuous batching with chunked prefill under a token budget.

Owns: which request computes how many tokens in a step; phases and queues.  Does not own: blocks, tiers, transfers (all
behind ``CacheHierarchy``); it does not know that connectors exist.  Thread: one; deterministic given clock and results.

A step: every request that holds blocks goes on (whoever comes last in the policy's order is preempted when blocks run
out), then waiting requests are admitted while budget and room last.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass

from ostinato.hierarchy.hierarchy import CacheHierarchy
from ostinato.hierarchy.residency import NoRoom, Parked, Ready
from ostinato.ids import RequestId, Step
from ostinato.scheduler.plan import PageCopy, SequencePlan, StepPlan, StepResult
from ostinato.scheduler.policy import Policy
from ostinato.scheduler.request import Phase, Request


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """``stall_s``: how long the first waiting request may find no room while nothing else is alive."""

    max_tokens_per_step: int = 512
    max_running: int = 64
    policy: Policy = Policy.FCFS
    stall_s: float = 60.0


class Scheduler:
    """Requests in, step plans out, results back in."""

    def __init__(
        self, cache: CacheHierarchy, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.requests: dict[RequestId, Request] = {}
        self.cache = cache
        self.config = config
        self._clock = clock
        self._waiting: list[Request] = []
        self._holding: list[Request] = []
        """READY and RUNNING, in policy order."""
        self._step = Step(0)
        self._in_flight: StepPlan | None = None
        self._computing: list[Request] = []
        """The requests of the plan in flight; one of them may have finished, and its id be in use again."""
        self._finished: list[RequestId] = []
        self._starved_since: float | None = None
        self._planned_at = 0.0

    def add(self, request: Request) -> None:
        # Of a reused prefix there are no logits, so a prompt that is to be scored is computed as a whole.
        reuse = request.sampling.prompt_logprobs is None
        self.cache.open(request.request_id, request.tokens, request.salt, reuse)
        self.requests[request.request_id] = request
        bisect.insort(self._waiting, request, key=self.config.policy.key)

    def finish(self, request_id: RequestId) -> None:
        """Done or aborted, in any phase; also between :meth:`plan` and :meth:`apply`."""
        request = self.requests.pop(request_id)
        if request in self._waiting:
            self._waiting.remove(request)
            self._starved_since = None  # whoever is first now has not waited yet
        if request in self._holding:
            self._holding.remove(request)
        request.phase = Phase.FINISHED
        self.cache.finish(request_id, self._fence())
        self._finished.append(request_id)

    def plan(self) -> StepPlan:
        """The next step.  A plan without sequences still carries transfers."""
        assert self._in_flight is None, "the last step has not been applied"
        self._step = Step(self._step + 1)
        budget = self.config.max_tokens_per_step
        chosen: list[tuple[Request, int]] = []
        waiting_may_enter = self._plan_holding(chosen)
        budget -= sum(count for _, count in chosen)
        if waiting_may_enter:
            self._plan_waiting(chosen, budget)
        copies: list[PageCopy] = []
        self._computing = [request for request, _ in chosen]
        sequences = tuple(self._sequence(request, count, copies) for request, count in chosen)
        transfers, cancelled = self.cache.dispatch()
        finished, self._finished = tuple(self._finished), []
        self._planned_at = self._clock()
        self._in_flight = StepPlan(self._step, sequences, tuple(copies), transfers, cancelled, finished)
        return self._in_flight

    def apply(self, result: StepResult) -> list[tuple[RequestId, int]]:
        """Take in what a step did; returns the sampled tokens of requests that are still alive."""
        plan, self._in_flight = self._in_flight, None
        assert plan is not None and plan.step == result.step, "results come in order, one per plan"
        self.cache.costs.note_step(sum(len(item.tokens) for item in plan.sequences), self._clock() - self._planned_at)
        alive = {request.request_id for request in self._computing if request.phase is Phase.RUNNING}
        for sequence in plan.sequences:
            if sequence.request_id in alive:
                request = self.requests[sequence.request_id]
                request.computed = sequence.start + len(sequence.tokens)
                self.cache.commit(request.request_id, request.computed, result.step)
        tokens = [(item.request_id, item.token) for item in result.sampled if item.request_id in alive]
        for request_id, token in tokens:
            self.requests[request_id].tokens.append(token)
        for woken in self.cache.settle(result.step, result.reports):
            self._wake(self.requests[woken.request_id], woken.ok)
        return tokens

    def starved(self) -> RequestId | None:
        """A request that has waited too long for room although nothing else is alive (lost quarantined slots)."""
        now = self._clock()
        if self._starved_since is None or now - self._starved_since < self.config.stall_s:
            return None
        return self._waiting[0].request_id if self._waiting else None

    def _plan_holding(self, chosen: list[tuple[Request, int]]) -> bool:
        """Requests that hold blocks; False when one was preempted, so that nobody new is admitted."""
        budget, calm = self.config.max_tokens_per_step, True
        index = 0
        while index < len(self._holding) and budget:
            request = self._holding[index]
            count = self._chunk(request, budget)
            if not self.cache.grow(request.request_id, request.computed + count):
                victim = self.config.policy.victim(self._holding[index:])
                self._preempt(victim)
                calm = False
                continue
            chosen.append((request, count))
            budget -= count
            index += 1
        return calm

    def _plan_waiting(self, chosen: list[tuple[Request, int]], budget: int) -> None:
        admitted_all = True
        while self._waiting and budget and len(self.requests) - len(self._waiting) < self.config.max_running:
            request = self._waiting[0]
            match self.cache.admit(request.request_id):
                case NoRoom():
                    admitted_all = False
                    break
                case Parked():
                    self._waiting.pop(0)
                    request.phase = Phase.PARKED
                case Ready(hit):
                    self._waiting.pop(0)
                    request.computed = hit.tokens
                    self._hold(request)
                    count = self._chunk(request, budget)
                    if self.cache.grow(request.request_id, request.computed + count):
                        chosen.append((request, count))
                        budget -= count
        alive = len(self.requests) > len(self._waiting)
        if admitted_all or alive:
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = self._clock()

    def _chunk(self, request: Request, budget: int) -> int:
        count = min(request.remaining, budget)
        return self.cache.chunk_without_loss(request.request_id, count) if count > 1 else count

    def _sequence(self, request: Request, count: int, copies: list[PageCopy]) -> SequencePlan:
        """One request's share of the step, with the pages that the worker does not know yet."""
        fresh = request.phase is Phase.READY
        request.phase = Phase.RUNNING
        page_copies, state = self.cache.take_orders(request.request_id, self._step)
        copies.extend(page_copies)
        table = self.cache.table(request.request_id)
        if fresh:
            request.sent = [0] * len(table.rows)
        stop = request.computed + count
        return SequencePlan(
            request.request_id,
            request.computed,
            tuple(request.tokens[request.computed : stop]),
            table.new_pages(request.sent),
            fresh,
            sample=stop == len(request.tokens),
            sampled_before=request.sampled,
            sampling=request.sampling if fresh else None,
            state=state,
            past=request.past() if fresh else None,
            targets=request.targets(stop),
        )

    def _hold(self, request: Request) -> None:
        request.phase = Phase.READY
        if request.hit is None:
            request.hit = self.cache.requests[request.request_id].hit
        bisect.insort(self._holding, request, key=self.config.policy.key)

    def _wake(self, request: Request, ok: bool) -> None:
        if ok:
            request.computed = self.cache.requests[request.request_id].computed
            self._hold(request)
        else:
            request.phase = Phase.WAITING
            bisect.insort(self._waiting, request, key=self.config.policy.key)

    def _preempt(self, victim: Request) -> None:
        self._holding.remove(victim)
        self.cache.preempt(victim.request_id, self._fence())
        victim.phase = Phase.WAITING
        victim.computed = 0
        victim.preemptions += 1
        bisect.insort(self._waiting, victim, key=self.config.policy.key)

    def _fence(self) -> Step | None:
        return self._in_flight.step if self._in_flight is not None else None
