"""What a request must be to be served, and what the worker is told of its sampling.

Owns: the checks that need the model or the pool.  Does not own: the range of each parameter (``sampling_params``).
Everything is refused here, with a RequestError, or it can be computed to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ostinato.cache.layout import CacheLayout
from ostinato.engine.text import Vocabulary
from ostinato.errors import PromptTooLongError, RequestError, SamplingError
from ostinato.sampling_params import SamplingParams
from ostinato.structured_outputs import StructuredOutputs


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may be.  ``max_pages`` of ``page_bytes`` bytes are the device pool.

    ``vocabulary``: token ids are below it; None: not known, not checked.  ``check_form`` raises SamplingError for the
    form of an output that cannot be kept to.
    """

    max_model_len: int
    max_pages: int
    page_bytes: int
    vocabulary: int | None = None
    check_form: Callable[[StructuredOutputs], None] | None = None

    def room(self, length: int, sampling: SamplingParams, layout: CacheLayout, step_tokens: int) -> int:
        """Tokens that a request with a prompt of ``length`` tokens may generate."""
        if not length:
            raise RequestError("the prompt is empty: give at least one token")
        if sampling.structured_outputs is not None:
            if self.check_form is None:
                raise SamplingError("structured_outputs are not available here")
            self.check_form(sampling.structured_outputs)
        if length >= self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {length} tokens, but max_model_len is {self.max_model_len} including the answer"
            )
        room = min(sampling.max_tokens, self.max_model_len - length)
        pages = layout.peak_pages(length + room, step_tokens)
        if pages > self.max_pages:
            mebibytes = self.page_bytes / 2**20
            raise PromptTooLongError(
                f"the prompt's {length} tokens and {room} of output need {pages} device pages "
                f"({pages * mebibytes:.1f} MiB), but the pool has {self.max_pages} "
                f"({self.max_pages * mebibytes:.1f} MiB); raise kv_cache_memory or shorten the request"
            )
        return room


def resolved(
    sampling: SamplingParams, vocabulary: Vocabulary, eos_token_ids: Collection[int], size: int | None
) -> SamplingParams:
    """``sampling`` with everything that the worker needs as token ids; SamplingError for ids that do not exist.

    Bad words become ``bad_words_ids``; with ``min_tokens``, EOS is one of ``stop_token_ids`` if it ends the output.
    """
    assert isinstance(sampling.bad_words, tuple)
    if sampling.bad_words:
        words = [ids for word in sampling.bad_words for ids in vocabulary.spellings(word)]
        sampling = replace(sampling, bad_words_ids=(*(sampling.bad_words_ids or ()), *words))
    if size is not None:
        _check_ids(sampling, size)
    if sampling.min_tokens:
        eos = {} if sampling.ignore_eos else dict.fromkeys(i for i in eos_token_ids if size is None or i < size)
        sampling = replace(sampling, stop_token_ids=tuple({**dict.fromkeys(sampling.stop_ids), **eos}))
        allowed = sampling.allowed_token_ids
        if allowed is not None and not set(allowed) - set(sampling.stop_ids):
            raise SamplingError(
                "allowed_token_ids has only tokens that end the output, but min_tokens "
                f"({sampling.min_tokens}) must come before: allow another one"
            )
    return sampling


def _check_ids(sampling: SamplingParams, size: int) -> None:
    named = {
        "stop_token_ids": sampling.stop_ids,
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "logit_bias": [token for token, _ in sampling.biases],
        "bad_words_ids": [token for words in sampling.bad_words_ids or () for token in words],
    }
    for name, ids in named.items():
        wrong = next((token for token in ids if token >= size), None)
        if wrong is not None:
            raise SamplingError(f"token ids in {name} must be from 0 to {size - 1} for this model, not {wrong}")
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None and count > size:
            raise SamplingError(f"{name} must be at most the vocabulary's {size} tokens (or -1 for all), not {count}")
