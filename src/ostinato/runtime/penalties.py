"""What is done to a row of logits before a token is chosen: masks, biases, penalties.

Owns: the arithmetic, and the counts of tokens it needs.  Does not own: the parameters (``sampling_params``), the choice
of a token (``sampler``), which tokens came before (the plan says so, once per fresh request).

Invariant: a row's result depends on its logits, parameters and history alone; all sums are of two numbers, in fp32.
The order is vLLM's: grammar, allowed tokens, bad words, least length, bias, then penalties.  Thread: the worker's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ostinato.sampling_params import SamplingParams
from ostinato.scheduler.plan import Past


@dataclass(slots=True, eq=False)
class History:
    """The tokens of one request as its penalties see them.

    ``prompt``: ids in the prompt, each once (a tensor, since they may be thousands and do not change).  ``output``: all
    sampled tokens in order; ``counts``: how often each.
    """

    prompt: torch.Tensor | None = None
    output: list[int] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, past: Past | None) -> History:
        """The history that a plan carries; an empty one for a request that needs none."""
        history = cls()
        if past is not None:
            if past.prompt:
                history.prompt = torch.tensor(past.prompt, dtype=torch.long)
            for token in past.output:
                history.push(token)
        return history

    def push(self, token: int) -> None:
        self.output.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1


def adjusts(params: SamplingParams, step: int) -> bool:
    """Whether :func:`adjust` changes anything at output token number ``step``."""
    return params.adjusts and (step < params.min_tokens or not _only_min_tokens(params))


def adjust(
    logits: torch.Tensor, params: SamplingParams, step: int, history: History, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """``logits`` [V] as fp32 on the CPU with everything applied that ``params`` ask for at token number ``step``.

    ``mask`` [V]: the tokens that a grammar allows.  Where the least length or the bad words would leave nothing to
    choose, they are left out: some token has to come.
    """
    values = logits.to("cpu", torch.float32, copy=True)
    if mask is not None:
        values.masked_fill_(~mask, -math.inf)
    if params.allowed_token_ids is not None:
        values = _only(values, params.allowed_token_ids)
    if step < params.min_tokens and params.stop_ids:
        values = _without(values, params.stop_ids)
    forbidden = [words[-1] for words in _bad_words(params) if _begun(words, history.output)]
    if forbidden:
        values = _without(values, forbidden)
    if params.biases:
        ids, biases = zip(*params.biases, strict=True)
        values[list(ids)] += torch.tensor(biases, dtype=torch.float32)
    if params.penalised:
        _penalise(values, params, history)
    return values


def _only_min_tokens(params: SamplingParams) -> bool:
    return not (params.uses_past or params.biases or params.allowed_token_ids is not None)


def _only(values: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    kept = list(ids)
    only = torch.full_like(values, -math.inf)
    only[kept] = values[kept]
    return only


def _without(values: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """``values`` with ``ids`` forbidden, unless nothing would be left."""
    left = values.index_fill(0, torch.tensor(ids), -math.inf)
    return values if float(left.max()) == -math.inf else left


def _bad_words(params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    assert isinstance(params.bad_words_ids, tuple)
    return params.bad_words_ids


def _begun(words: tuple[int, ...], output: list[int]) -> bool:
    """Whether the output ends with all of ``words`` but the last."""
    return len(words) == 1 or tuple(output[1 - len(words) :]) == words[:-1]


def _penalise(values: torch.Tensor, params: SamplingParams, history: History) -> None:
    """In place: repetition scales towards less likely, frequency and presence are subtracted."""
    ids = torch.tensor(list(history.counts), dtype=torch.long)
    if params.repetition_penalty != 1:
        # All are read before any is written, so a token of prompt and output is penalised once.
        seen = ids if history.prompt is None else torch.cat((history.prompt, ids))
        old = values[seen]
        # Clamped, so that an absurd penalty leaves numbers; what is forbidden stays so.
        new = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty).nan_to_num_(0.0)
        values[seen] = torch.where(old.isfinite(), new, old)
    if history.counts and (params.frequency_penalty or params.presence_penalty):
        counts = torch.tensor(list(history.counts.values()), dtype=torch.float32)
        values[ids] -= counts * params.frequency_penalty
        values[ids] -= params.presence_penalty
