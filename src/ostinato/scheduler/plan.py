"""The whole interface between scheduler and worker: one plan down, one result up, per step.

Owns: the two values, plain and serialisable (one-page spec: ``docs/step-plan.md``).  They hold no reference into either
side.  A worker keeps each sequence's table between steps; a plan carries what was appended since.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.cache.table import StatePlan
from ostinato.ids import JobId, RequestId, SlotId, Step
from ostinato.sampling_params import SamplingParams
from ostinato.transfer.job import PageCopy, TransferOrder, TransferReport

__all__ = [
    "PageCopy",
    "Past",
    "PromptLogprobs",
    "SampledToken",
    "SequencePlan",
    "StatePlan",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
]


@dataclass(frozen=True, slots=True)
class Past:
    """What a request's sampling must know of tokens that the worker may never have seen.

    ``prompt``: the prompt's ids, each once, ascending (empty unless ``repetition_penalty`` is on); ``output``: all
    tokens sampled so far, in order.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One sequence's share of a step: compute ``tokens`` at positions ``start, start + 1, ...``.

    ``new_pages[g]`` are appended to the worker's row of group ``g`` (HOLEs included); ``fresh`` first clears the rows
    (a new request, or one that was preempted).  ``sample``: the last token's logits are sampled, as output number
    ``sampled_before`` of the request (0 = first), with ``sampling`` (given when fresh).  ``state`` is given when the
    model keeps recurrent state; ``new_pages`` of those groups are empty.

    ``past`` is given when fresh, to requests whose sampling depends on earlier tokens; from then on the worker counts
    what it samples.  ``targets``: the prompt's tokens that follow the first ``len(targets)`` of ``tokens``, given when
    their log-probabilities are wanted.
    """

    request_id: RequestId
    start: int
    tokens: tuple[int, ...]
    new_pages: tuple[tuple[SlotId, ...], ...]
    fresh: bool
    sample: bool
    sampled_before: int = 0
    sampling: SamplingParams | None = None
    state: StatePlan | None = None
    past: Past | None = None
    targets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step.  Order in the worker: ``copies``, then ``transfers`` are handed to movers, then the forward pass.

    ``finished`` are sequences that the worker can forget; ``cancelled`` are jobs whose mover should give up early.
    """

    step: Step
    sequences: tuple[SequencePlan, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    transfers: tuple[TransferOrder, ...] = ()
    cancelled: tuple[JobId, ...] = ()
    finished: tuple[RequestId, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, of the model's own logits.

    ``rank``: 1 + the number of tokens before ``token``, most probable first, of equal ones the lower id first.
    ``top``: ids and log-probabilities of as many most probable tokens as were asked for, in that order.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token; ``digest`` = SHA-256 of its logits row (fp32, little-endian) when the request asks for it.

    ``logprobs``: when the request asks for them.  ``error``: why the token means nothing, and the request cannot go on.
    """

    request_id: RequestId
    token: int
    digest: bytes = b""
    logprobs: TokenLogprobs | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the prompt's tokens at positions ``start, start + 1, ...``."""

    request_id: RequestId
    start: int
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the worker did: sampled tokens and scored prompts of ``step``, and transfer reports of any step."""

    step: Step
    sampled: tuple[SampledToken, ...] = ()
    reports: tuple[TransferReport, ...] = ()
    prompts: tuple[PromptLogprobs, ...] = ()
