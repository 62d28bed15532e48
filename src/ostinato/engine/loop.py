"""The engine's loop: requests in, one step at a time, finished outputs out.

Owns: a request's text, times and end.  Does not own: scheduling (``scheduler``), computing (the worker), wiring
(``build``).  Thread: one; nothing here blocks, except a step in which there is nothing to do but wait for a transfer.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from ostinato.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from ostinato.engine.text import OutputText, Vocabulary
from ostinato.errors import CapacityError, OstinatoError, PromptTooLongError, RequestError
from ostinato.ids import RequestId
from ostinato.sampling_params import SamplingParams
from ostinato.scheduler.plan import StepPlan, StepResult
from ostinato.scheduler.request import Request
from ostinato.scheduler.scheduler import Scheduler
from ostinato.transfer.job import JobState

log: Final = logging.getLogger(__name__)

IDLE_WAIT_S: Final = 0.05
"""How long a step without work waits for a mover before it looks again."""


class Executor(Protocol):
    """Whoever carries out plans: the worker in this process; several of them later."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def wait(self, timeout: float) -> bool: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's text (None when it came as ids) and token ids."""

    text: str | None
    token_ids: Sequence[int]


@dataclass(slots=True, eq=False)
class _Live:
    """A request's other half: what the scheduler need not know."""

    request: Request
    prompt: Prompt
    text: OutputText
    arrival: float
    first_token: float = 0.0
    digest: hashlib._Hash | None = None
    stop_reason: str | int | None = None
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may be.  ``max_pages`` of ``page_bytes`` bytes are the device pool."""

    max_model_len: int
    max_pages: int
    page_bytes: int


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
        self._live: dict[RequestId, _Live] = {}
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
        if request_id in self._live:
            raise RequestError(f"request id {request_id!r} is in use; choose another")
        room = self._check(prompt, sampling)
        self._arrivals += 1
        request = Request(RequestId(request_id), list(prompt.token_ids), sampling, self._arrivals, priority, salt)
        text = OutputText(self._vocabulary, sampling, self._eos, prompt.token_ids, max_tokens=room)
        live = _Live(request, prompt, text, time.perf_counter() if arrival is None else arrival)
        live.digest = hashlib.sha256() if sampling.logits_digest else None
        self.scheduler.add(request)
        self._live[request.request_id] = live

    def abort(self, request_id: str) -> bool:
        """Forget a request in whatever phase it is; False when there is none of that id."""
        if self._live.pop(RequestId(request_id), None) is None:
            return False
        if not self._unusable:  # else nobody knows what the scheduler was doing with it
            self.scheduler.finish(RequestId(request_id))
        return True

    def step(self) -> list[RequestOutput]:
        """One plan, one result; returns the requests that finished in it."""
        self._check_usable()
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
        if not plan.sequences and not result.reports and self._live:
            self._idle()
        return finished

    def drain(self) -> None:
        """Carry out transfers that are still open, without any request; those in doubt are not waited for."""
        while self._transfers_open():
            self.step()
            if self._transfers_open():
                self.executor.wait(IDLE_WAIT_S)

    def close(self) -> None:
        for request_id in list(self._live):
            self.abort(request_id)
        self._unusable = self._unusable or "it was closed"
        self.executor.close()

    def _check_usable(self) -> None:
        if self._unusable:
            raise OstinatoError(f"this engine cannot go on: {self._unusable}; make a new one (weights can be shared)")

    def _transfers_open(self) -> bool:
        return any(job.state is not JobState.IN_DOUBT for job in self.scheduler.cache.core.book)

    def _check(self, prompt: Prompt, sampling: SamplingParams) -> int:
        """Tokens that the request may generate."""
        length, limits = len(prompt.token_ids), self.limits
        if not length:
            raise RequestError("the prompt is empty: give at least one token")
        if length >= limits.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {length} tokens, but max_model_len is {limits.max_model_len} including the answer"
            )
        room = min(sampling.max_tokens, limits.max_model_len - length)
        layout = self.scheduler.cache.core.layout
        pages = layout.peak_pages(length + room, self.scheduler.config.max_tokens_per_step)
        if pages > limits.max_pages:
            mebibytes = limits.page_bytes / 2**20
            raise PromptTooLongError(
                f"the prompt's {length} tokens and {room} of output need {pages} device pages "
                f"({pages * mebibytes:.1f} MiB), but the pool has {limits.max_pages} "
                f"({limits.max_pages * mebibytes:.1f} MiB); raise kv_cache_memory or shorten the request"
            )
        return room

    def _apply(self, result: StepResult) -> list[RequestOutput]:
        tokens = self.scheduler.apply(result)
        digests = {sampled.request_id: sampled.digest for sampled in result.sampled}
        now = time.perf_counter()
        outputs = [self._take(self._live[name], token, digests[name], now) for name, token in tokens]
        return [output for output in outputs if output is not None]

    def _take(self, live: _Live, token: int, digest: bytes, now: float) -> RequestOutput | None:
        """Append a token; the output when it was the last."""
        if not live.tokens:
            live.first_token = now
        live.tokens.append(token)
        if live.digest is not None:
            live.digest.update(digest)
        step = live.text.push(token)
        live.stop_reason = step.stop_reason
        if step.finish_reason is None:
            return None
        del self._live[live.request.request_id]
        self.scheduler.finish(live.request.request_id)
        output = _output(live, now)
        log.info(
            "%s finished (%s): %d prompt tokens, reused %s, %d generated, first token after %.0f ms, %d preemptions",
            output.request_id,
            step.finish_reason,
            len(output.prompt_token_ids),
            output.cached_by_tier or "none",
            len(live.tokens),
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


def _output(live: _Live, now: float) -> RequestOutput:
    hit = live.request.hit
    assert hit is not None, "a request that sampled has started"
    completion = CompletionOutput(
        0, live.text.text, tuple(live.tokens), live.text.finish_reason, stop_reason=live.stop_reason
    )
    metrics = RequestMetrics(live.first_token - live.arrival, now - live.arrival, live.request.preemptions)
    return RequestOutput(
        live.request.request_id,
        live.prompt.text,
        tuple(live.prompt.token_ids),
        (completion,),
        metrics,
        cached_tokens=hit.tokens,
        cached_by_tier={str(tier): count for tier, count in hit.by_tier},
        blocks_by_group=hit.pages_by_group,
        bytes_loaded=hit.bytes_loaded,
        logits_sha256=live.digest.hexdigest() if live.digest is not None else "",
    )
