"""Log-probabilities of tokens, from a row of logits.

Owns: the normalisation, ranks, the most probable tokens.  Does not own: which positions are asked about (the plan), how
ids become text (``engine``).

The logits are the model's own: no temperature, penalty or mask is in them.  Invariant: a row's result depends on the
row alone, not on its neighbours or on threads; of equally probable tokens the lower id comes first.
"""

from __future__ import annotations

import math

import torch

from ostinato.runtime.sampler import block_sums, top_ids
from ostinato.scheduler.plan import TokenLogprobs


def token_logprobs(logits: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Of ``token`` and the ``count`` most probable tokens (-1: all), by ``logits`` [V] of any float dtype."""
    values = logits.to("cpu", torch.float32, copy=True)
    size = values.numel()
    highest = values.max()
    total = float(block_sums(values.sub(highest).exp_()).cumsum(0)[-1])
    normaliser = float(highest) + math.log(total)
    own = values[token]
    before = int((values > own).sum()) + int((values[:token] == own).sum())
    wanted = size if count < 0 else min(count, size)
    return TokenLogprobs(token, float(own) - normaliser, before + 1, _top(values, wanted, normaliser))


def _top(values: torch.Tensor, count: int, normaliser: float) -> tuple[tuple[int, float], ...]:
    if not count:
        return ()
    if count < values.numel():
        ids = top_ids(values, torch.ones(values.numel(), dtype=torch.float64), count)
    else:
        ids = torch.arange(values.numel())
    # ``ids`` ascend, so a stable sort leaves the lower one of two equals first.
    ids = ids[values[ids].sort(descending=True, stable=True).indices]
    pairs = zip(ids.tolist(), values[ids].tolist(), strict=True)
    return tuple((token, value - normaliser) for token, value in pairs)
