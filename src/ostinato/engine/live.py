"""Requests that are being served: the half of them that the scheduler need not know.

Owns: each completion's tokens, text, log-probabilities and times; the public output made of them.  Does not own: when
anything is computed (``scheduler``), the order of calls (``loop``).  Thread: the engine's.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ostinato.engine.outputs import (
    CompletionDelta,
    CompletionOutput,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    position_logprobs,
)
from ostinato.engine.text import OutputText, TextStep, Vocabulary
from ostinato.ids import RequestId
from ostinato.sampling_params import SamplingParams
from ostinato.scheduler.plan import PromptLogprobs, SampledToken
from ostinato.scheduler.request import Request

log: Final = logging.getLogger(__name__)
Listener: TypeAlias = Callable[[CompletionDelta], None]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's text (None when it came as ids) and token ids."""

    text: str | None
    token_ids: Sequence[int]


def completion_id(request_id: str, index: int, count: int) -> RequestId:
    """What the scheduler calls completion ``index`` of ``count``; the request's own name when it is the only one."""
    return RequestId(request_id if count == 1 else f"{index}_{request_id}")


@dataclass(slots=True, eq=False)
class Completion:
    """One continuation of a prompt, which the scheduler sees as a request of its own."""

    index: int
    request: Request
    text: OutputText
    digest: hashlib._Hash | None = None
    logprobs: list[PositionLogprobs] | None = None
    cumulative: float = 0.0
    stop_reason: str | int | None = None
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, index: int, request: Request, text: OutputText) -> Completion:
        digest = hashlib.sha256() if request.sampling.logits_digest else None
        return cls(index, request, text, digest, [] if request.sampling.logprobs is not None else None)

    def push(self, sampled: SampledToken, vocabulary: Vocabulary | None) -> TextStep:
        """Append a token; what it added to the text."""
        self.tokens.append(sampled.token)
        if self.digest is not None:
            self.digest.update(sampled.digest)
        if self.logprobs is not None and sampled.logprobs is not None:
            self.logprobs.append(position_logprobs(sampled.logprobs, vocabulary))
            self.cumulative += sampled.logprobs.logprob
        step = self.text.push(sampled.token)
        self.stop_reason = step.stop_reason
        return step

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            self.index,
            self.text.text,
            tuple(self.tokens),
            self.text.finish_reason,
            self.stop_reason,
            self.cumulative if self.logprobs is not None else None,
            tuple(self.logprobs) if self.logprobs is not None else None,
            self.digest.hexdigest() if self.digest is not None else "",
        )


class LiveRequest:
    """A request from ``add`` to its output: one completion or several.

    ``held_back``: completions that the scheduler does not know yet.  They wait for the first one's first token: then
    the prompt's blocks are there to be shared.
    """

    def __init__(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, vocabulary: Vocabulary, arrival: float
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.arrival = arrival
        self.first_token: float | None = None
        self.completions: list[Completion] = []
        self.held_back: list[Completion] = []
        self.listener: Listener | None = None
        self._vocabulary = vocabulary if sampling.detokenize else None
        scored = sampling.prompt_logprobs is not None
        self._prompt_logprobs: list[PositionLogprobs | None] | None = [None] * len(prompt.token_ids) if scored else None

    @property
    def finished(self) -> bool:
        return all(completion.text.finish_reason is not None for completion in self.completions)

    @property
    def unfinished(self) -> list[Completion]:
        """Completions that the scheduler knows."""
        held = {id(completion) for completion in self.held_back}
        return [one for one in self.completions if one.text.finish_reason is None and id(one) not in held]

    def push(self, completion: Completion, sampled: SampledToken, now: float) -> CompletionDelta | None:
        """Append a token to one of the completions; what there is to tell whoever watches."""
        if self.first_token is None:
            self.first_token = now
        step = completion.push(sampled, self._vocabulary)
        if self.listener is None:
            return None
        logprobs = (completion.logprobs[-1],) if completion.logprobs is not None else None
        return CompletionDelta(
            self.request_id,
            completion.index,
            step.text,
            (sampled.token,),
            step.finish_reason,
            step.stop_reason,
            logprobs,
        )

    def tell(self, delta: CompletionDelta) -> None:
        """Let the listener have ``delta``; one that raises is not called again."""
        if self.listener is None:
            return
        try:
            self.listener(delta)
        except Exception:
            log.exception("whoever watches request %s failed, and hears no more of it", self.request_id)
            self.listener = None

    def score(self, part: PromptLogprobs) -> None:
        """Take in log-probabilities of a part of the prompt.  After a preemption a part may come again, the same."""
        assert self._prompt_logprobs is not None
        for position, found in enumerate(part.tokens, part.start):
            self._prompt_logprobs[position] = position_logprobs(found, self._vocabulary)

    def output(self, now: float) -> RequestOutput:
        """The output of a request whose completions have all ended."""
        hit = self.completions[0].request.hit
        assert hit is not None and self.first_token is not None, "a request that sampled has started"
        preemptions = sum(completion.request.preemptions for completion in self.completions)
        outputs = tuple(completion.output() for completion in self.completions)
        return RequestOutput(
            self.request_id,
            self.prompt.text,
            tuple(self.prompt.token_ids),
            outputs,
            RequestMetrics(self.first_token - self.arrival, now - self.arrival, preemptions),
            cached_tokens=hit.tokens,
            cached_by_tier={str(tier): count for tier, count in hit.by_tier},
            blocks_by_group=hit.pages_by_group,
            bytes_loaded=hit.bytes_loaded,
            logits_sha256=outputs[0].logits_sha256,
            prompt_logprobs=tuple(self._prompt_logprobs) if self._prompt_logprobs is not None else None,
        )
