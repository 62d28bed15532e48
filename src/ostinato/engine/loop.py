"""The engine's loop: requests in, one step at a time, finished outputs out.

Owns: which requests are alive, and the order of calls in a step.  Does not own: a request's tokens and text (``live``),
what is refused (``intake``), scheduling (``scheduler``), computing (the worker), wiring (``build``).  Thread: one;
nothing here blocks, except a step in which there is nothing to do but wait for a transfer.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Final, Protocol

from ostinato.engine.intake import Limits, resolved
from ostinato.engine.live import Completion, Listener, LiveRequest, Prompt, completion_id
from ostinato.engine.outputs import CompletionDelta, RequestOutput
from ostinato.engine.text import OutputText, Vocabulary
from ostinato.errors import CapacityError, OstinatoError, RequestError
from ostinato.ids import RequestId
from ostinato.sampling_params import SamplingParams
from ostinato.scheduler.plan import StepPlan, StepResult
from ostinato.scheduler.request import Request
from ostinato.scheduler.scheduler import Scheduler
from ostinato.transfer.job import JobState

__all__ = ["Engine", "Executor", "Limits", "Prompt"]

log: Final = logging.getLogger(__name__)

IDLE_WAIT_S: Final = 0.05
"""How long a step without work waits for a mover before it looks again."""


class Executor(Protocol):
    """Whoever carries out plans: the worker in this process; several of them later."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def wait(self, timeout: float) -> bool: ...

    def close(self) -> None: ...


class Engine:
    """One model, one scheduler, one executor."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        vocabulary: Vocabulary,
        eos_token_ids: frozenset[int],
        limits: Limits,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.limits = limits
        self._vocabulary = vocabulary
        self._eos = eos_token_ids
        self._on_step = on_step
        self._live: dict[str, LiveRequest] = {}
        self._completions: dict[RequestId, tuple[LiveRequest, Completion]] = {}
        """By the scheduler's names: all that have not ended, those held back included."""
        self.failures: list[tuple[str, RequestError]] = []
        """Requests that the last step had to give up, and why."""
        self._news: list[tuple[LiveRequest, CompletionDelta]] = []
        self._arrivals = 0
        self._unusable = ""

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        priority: int = 0,
        salt: str = "",
        arrival: float | None = None,
    ) -> None:
        """Hand in a request; raises RequestError when it could never be served."""
        self._check_usable()
        names = [completion_id(request_id, index, sampling.n) for index in range(sampling.n)]
        if request_id in self._live or any(name in self._completions for name in names):
            raise RequestError(f"request id {request_id!r} is in use; choose another")
        layout, step_tokens = self.scheduler.cache.core.layout, self.scheduler.config.max_tokens_per_step
        room = self.limits.room(len(prompt.token_ids), sampling, layout, step_tokens)
        full = resolved(sampling, self._vocabulary, self._eos, self.limits.vocabulary)
        live = LiveRequest(
            request_id, prompt, sampling, self._vocabulary, time.perf_counter() if arrival is None else arrival
        )
        for index, name in enumerate(names):
            self._arrivals += 1
            tokens = list(prompt.token_ids)
            request = Request(name, tokens, full.completion(index), self._arrivals, priority, salt)
            text = OutputText(self._vocabulary, sampling, self._eos, prompt.token_ids, max_tokens=room)
            live.completions.append(Completion.of(index, request, text))
        self.scheduler.add(live.completions[0].request)
        live.held_back = live.completions[1:]
        self._live[request_id] = live
        self._completions.update((one.request.request_id, (live, one)) for one in live.completions)

    def watch(self, request_id: str, listener: Listener) -> None:
        """Call ``listener`` with everything that is added to a live request, on the engine's thread, as a step ends.

        To hear of all of it, watch before the next step.  It may add and abort requests; if it raises, it is not called
        again.  The finished request is returned by :meth:`step` all the same, after its last delta.
        """
        if request_id not in self._live:
            raise RequestError(f"there is no request {request_id!r} to watch")
        self._live[request_id].listener = listener

    def abort(self, request_id: str) -> bool:
        """Forget a request in whatever phase it is; False when there is none of that id.

        The scheduler's name of one of several completions stands for the whole request.
        """
        live = self._live.get(request_id)
        if live is None:
            live, _ = self._completions.get(RequestId(request_id), (None, None))
        if live is None:
            return False
        del self._live[live.request_id]
        live.listener = None
        for completion in live.completions:
            self._completions.pop(completion.request.request_id, None)
        if not self._unusable:  # else nobody knows what the scheduler was doing with it
            for completion in live.unfinished:
                self.scheduler.finish(completion.request.request_id)
        return True

    def step(self) -> list[RequestOutput]:
        """One plan, one result; those who watch hear of it; returns the requests that finished in it."""
        self._check_usable()
        self.failures.clear()
        try:
            plan = self.scheduler.plan()
            result = self.executor.execute(plan)
            finished = self._apply(result)
        except BaseException:
            # What was computed, which orders were handed on, which reports were heard is unknown: build nothing on it.
            self._unusable = "a step of it was interrupted"
            raise
        if self._on_step is not None:
            self._on_step()
        news, self._news = self._news, []
        for live, delta in news:
            live.tell(delta)
        if not plan.sequences and not result.reports and self._live:
            self._idle()
        return finished

    def drain(self, patience_s: float = math.inf) -> None:
        """Carry out transfers that are still open, without any request; those in doubt are not waited for."""
        deadline = time.monotonic() + patience_s
        while self._transfers_open() and time.monotonic() < deadline:
            self.step()
            if self._transfers_open():
                self.executor.wait(min(IDLE_WAIT_S, max(0.0, deadline - time.monotonic())))

    def hand_over(self) -> None:
        """When nothing is left to compute, give the movers what the last step left to store; does not wait for them."""
        if not self._live and self._transfers_open():
            self.step()

    def close(self, drain_s: float = 0.0) -> None:
        """Abort what runs; for up to ``drain_s`` seconds, let the tiers take what they were to have.  Never raises."""
        for request_id in list(self._live):
            self.abort(request_id)
        if drain_s and not self._unusable:
            try:
                self.drain(drain_s)
            except Exception:
                log.exception("what the tiers were to have may be lost: the engine failed while closing")
        self._unusable = self._unusable or "it was closed"
        self.executor.close()

    def _check_usable(self) -> None:
        if self._unusable:
            raise OstinatoError(f"this engine cannot go on: {self._unusable}; make a new one (weights can be shared)")

    def _transfers_open(self) -> bool:
        return any(job.state is not JobState.IN_DOUBT for job in self.scheduler.cache.core.book)

    def _apply(self, result: StepResult) -> list[RequestOutput]:
        alive = {name for name, _ in self.scheduler.apply(result)}
        now = time.perf_counter()
        for part in result.prompts:
            if part.request_id in self._completions:
                self._completions[part.request_id][0].score(part)
        outputs = []
        for sampled in result.sampled:
            if sampled.request_id in alive and sampled.request_id in self._completions:
                live, completion = self._completions[sampled.request_id]
                if sampled.error:
                    self.abort(live.request_id)
                    self.failures.append((live.request_id, RequestError(f"the output cannot go on: {sampled.error}")))
                    continue
                delta = live.push(completion, sampled, now)
                if delta is not None:
                    self._news.append((live, delta))
                outputs.append(self._advance(live, completion, now))
        return [output for output in outputs if output is not None]

    def _advance(self, live: LiveRequest, completion: Completion, now: float) -> RequestOutput | None:
        """After a token: others may start, this one may have ended; the output when it was the last."""
        for other in live.held_back:
            self.scheduler.add(other.request)
        live.held_back = []
        if completion.text.finish_reason is None:
            return None
        del self._completions[completion.request.request_id]
        self.scheduler.finish(completion.request.request_id)
        if not live.finished:
            return None
        del self._live[live.request_id]
        output = live.output(now)
        log.info(
            "%s finished (%s): %d prompt tokens, reused %s, %d generated, first token after %.0f ms, %d preemptions",
            output.request_id,
            completion.text.finish_reason,
            len(output.prompt_token_ids),
            output.cached_by_tier or "none",
            sum(len(one.tokens) for one in live.completions),
            output.metrics.ttft_s * 1e3,
            output.metrics.preemptions,
        )
        return output

    def _idle(self) -> None:
        starved = self.scheduler.starved()
        if starved is not None:
            self.abort(starved)
            raise CapacityError(
                f"request {starved}: the device pool has had no room for it for {self.scheduler.config.stall_s:.0f} s "
                "although nothing else is running; a tier holds blocks in doubt"
            )
        self.executor.wait(IDLE_WAIT_S)
