"""What a finished request returns.

Owns: the public result values; names are vLLM's where both have the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ostinato.engine.text import FinishReason


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds.  ``ttft_s``: from handing in the prompt (as text, if it was text) to its first token."""

    ttft_s: float
    total_s: float
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request.

    ``cached_tokens``: prompt tokens that were not computed; ``cached_by_tier`` sums to it, each token counted once, by
    its slowest group.  ``blocks_by_group``: device blocks that the reused prefix took or shared, per KV cache group.
    ``logits_sha256``: over the logits of every generated position, when ``SamplingParams.logits_digest`` was set.
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

    @property
    def num_cached_tokens(self) -> int:
        """vLLM's name of ``cached_tokens``."""
        return self.cached_tokens
