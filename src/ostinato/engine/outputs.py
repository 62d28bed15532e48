"""What a request returns: as a whole when it is finished, and in parts to those who watch it.

Owns: the public result values; names are vLLM's where both have the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ostinato.engine.text import FinishReason, Vocabulary
from ostinato.scheduler.plan import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural log-probability by the model's own logits; ``rank`` 1 is the most probable token.

    ``decoded_token``: the token alone as text (``None`` with ``detokenize=False``); of a part of a character, U+FFFD.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


PositionLogprobs: TypeAlias = Mapping[int, Logprob]
"""Of one position, by token id: first the token that is there, then the most probable ones, best first."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    ``logprobs``: one entry for each of ``token_ids``, and ``cumulative_logprob`` the sum over these tokens, when
    ``SamplingParams.logprobs`` was set.  ``logits_sha256``: over the logits of every position, when asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    logits_sha256: str = ""


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What one step added to completion ``index`` of a request; all deltas together are the completion.

    ``text`` may be empty: half a character, or what may become a stop string, is held back.  The delta with a
    ``finish_reason`` is the completion's last.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds.  ``ttft_s``: from handing in the prompt (as text, if it was text) to its first token."""

    ttft_s: float
    total_s: float
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request, with ``SamplingParams.n`` outputs.

    ``cached_tokens``: prompt tokens that were not computed for the first output; ``cached_by_tier`` sums to it, each
    token counted once, by its slowest group.  ``blocks_by_group``: device blocks that the reused prefix took or shared,
    per KV cache group.  ``logits_sha256``: the first output's.  ``prompt_logprobs``: one entry for each token of the
    prompt, None for the first, when ``SamplingParams.prompt_logprobs`` was set.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics
    cached_tokens: int = 0
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    blocks_by_group: tuple[int, ...] = ()
    bytes_loaded: int = 0
    logits_sha256: str = ""
    finished: bool = True
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None

    @property
    def num_cached_tokens(self) -> int:
        """vLLM's name of ``cached_tokens``."""
        return self.cached_tokens


def position_logprobs(found: TokenLogprobs, vocabulary: Vocabulary | None) -> PositionLogprobs:
    """The public form of a position's log-probabilities; without text where there is no vocabulary."""

    def entry(token: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, vocabulary.decode([token]) if vocabulary is not None else None)

    entries = {found.token: entry(found.token, found.logprob, found.rank)}
    for rank, (token, logprob) in enumerate(found.top, 1):
        if token != found.token:
            entries[token] = entry(token, logprob, rank)
    return entries
