"""From logits to token ids, without ever sorting the vocabulary.

Owns: greedy choice, temperature, min-p, top-k, top-p and the random numbers behind them.  Does not own: the parameters
(``sampling_params``), masks and penalties (``penalties``), the logits, or when a request ends.

Invariants: a row's token depends on that row's logits and its :class:`SampleRow` alone, never on its neighbours or on
what was sampled before; so a preempted and recomputed request draws the same tokens.  Every tie is broken by the
lower token id.

Randomness is counter-based: the only random number of a token is a 48-bit hash of (seed, tokens sampled so far).  It
is turned into a token by inverting the cumulative distribution in token order, which needs sums, not sorted values.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from ostinato.runtime.penalties import History, adjust, adjusts
from ostinato.sampling_params import SamplingParams

Argmax = Callable[[torch.Tensor], torch.Tensor]
"""[R, V] logits -> [R] int64: the first index of each row's maximum."""

_UNIFORM_BITS: Final = 48
"""Fewer than a double's 53, so that ``uniform * total`` stays below ``total`` after rounding."""
_SUM_BLOCK: Final = 512
_DIGIT_BITS: Final = 16
_DIGITS: Final = 1 << _DIGIT_BITS
_FEW: Final = 1024
_ARGMAX_BLOCK: Final = 512


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How to sample one row: ``seed`` is the request's (see :func:`request_seed`), ``step`` its tokens so far.

    ``history``: what penalties count; left empty for requests that have none.  ``mask`` [V]: what a grammar allows.
    """

    params: SamplingParams
    seed: int
    step: int
    history: History = field(default_factory=History)
    mask: torch.Tensor | None = None


def request_seed(params: SamplingParams) -> int:
    """The request's seed: its own, or a random one.  Call once per request and keep the result."""
    return secrets.randbits(63) if params.seed is None else params.seed


def uniform(seed: int, step: int) -> float:
    """The random number in [0, 1) of a request's token number ``step``."""
    counter = seed.to_bytes(8, "little", signed=True) + step.to_bytes(8, "little")
    word = hashlib.blake2b(counter, digest_size=_UNIFORM_BITS // 8, person=b"ostinato sample").digest()
    return int.from_bytes(word, "little") / (1 << _UNIFORM_BITS)


def first_argmax(logits: torch.Tensor) -> torch.Tensor:
    """[R, V] -> [R]: the first index of each row's maximum.

    One vectorised pass for the maximum of every block, then a look into the first block that has the row's: on a CPU
    ``torch.argmax`` is some ten times slower for bf16.
    """
    rows, columns = logits.shape
    block = math.gcd(columns, _ARGMAX_BLOCK)
    blocks = logits.reshape(rows, columns // block, block)
    maxima = blocks.amax(-1)
    # NaN equals nothing, so a row that has one finds no first index; torch takes the NaN for the maximum.
    if bool(maxima.isnan().any()):
        return logits.argmax(-1)
    best = maxima.amax(-1, keepdim=True)
    which = _first_true(maxima == best)
    inside = blocks[torch.arange(rows, device=logits.device), which]
    return which * block + _first_true(inside == best)


def _first_true(flags: torch.Tensor) -> torch.Tensor:
    """[R, N] -> [R]: the first True of each row.  Stated by values, since ``argmax`` promises no order among ties."""
    places = torch.arange(flags.shape[1], device=flags.device)
    return torch.where(flags, places, flags.shape[1]).amin(-1)


class Sampler:
    """Samples one token per row.  Stateless but for the argmax kernel it was given."""

    def __init__(self, argmax: Argmax = first_argmax) -> None:
        self._argmax = argmax

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """One token id per row of ``logits`` [R, V] (bf16, fp16 or fp32)."""
        assert logits.shape[0] == len(rows), (logits.shape, len(rows))
        plain = [i for i, row in enumerate(rows) if row.params.greedy and not adjusts(row.params, row.step)]
        tokens = [-1] * len(rows)
        if plain:
            chosen = logits if len(plain) == len(rows) else logits[plain]
            for i, token in zip(plain, self._argmax(chosen).tolist(), strict=True):
                tokens[i] = int(token)
        for i, row in enumerate(rows):
            if tokens[i] < 0:
                tokens[i] = self._sample_one(logits[i], row)
        return tokens

    def _sample_one(self, logits: torch.Tensor, row: SampleRow) -> int:
        if adjusts(row.params, row.step):
            logits = adjust(logits, row.params, row.step, row.history, row.mask)
        return int(self._argmax(logits[None])[0]) if row.params.greedy else sample_row(logits, row)


def sample_row(logits: torch.Tensor, row: SampleRow) -> int:
    """One random token id from ``logits`` [V]: min-p, then top-k, then top-p of what is left, as in vLLM.

    Masks and penalties are not applied here.
    """
    params = row.params
    # A copy of its own on the CPU, so that memory layout and summation order are the same whatever the row came from.
    values = logits.to("cpu", torch.float32, copy=True)
    ids: torch.Tensor | None = None
    if params.min_p > 0:
        # The weight of the most probable token is 1, so this compares probabilities.
        weights = values.sub(values.max()).div_(params.temperature).exp_()
        ids = (weights >= params.min_p).nonzero().squeeze(1)
        values = values[ids]
    if 0 < params.top_k < values.numel():
        kept = top_ids(values, torch.ones(values.numel(), dtype=torch.float64), params.top_k)
        ids = kept if ids is None else ids[kept]
        values = values[kept]
    weights = values.sub(values.max()).div_(params.temperature).exp_()
    if params.top_p < 1:
        kept = top_ids(values, weights.double(), params.top_p * float(block_sums(weights).cumsum(0)[-1]))
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    place = _invert(weights, uniform(row.seed, row.step))
    return place if ids is None else int(ids[place])


def top_ids(values: torch.Tensor, mass: torch.Tensor, goal: float) -> torch.Tensor:
    """The fewest largest ``values`` [V] whose ``mass`` [V, fp64] adds up to ``goal``, as ascending indices.

    Of equal values, which must have equal mass, the lower indices are taken.
    """
    few = values.numel() <= _FEW
    return sorted_top_ids(values, mass, goal) if few else radix_top_ids(values, mass, goal)


def sorted_top_ids(values: torch.Tensor, mass: torch.Tensor, goal: float) -> torch.Tensor:
    """:func:`top_ids` of few values (what a top-k left over), where sorting is cheaper than a histogram."""
    order = values.sort(descending=True, stable=True).indices
    place = int(torch.searchsorted(mass[order].cumsum(0), goal))
    return order[: place + 1].sort().values


def radix_top_ids(values: torch.Tensor, mass: torch.Tensor, goal: float) -> torch.Tensor:
    """:func:`top_ids` of a vocabulary, by radix selection.

    One histogram over the upper 16 bits of the values finds the bucket in which the goal is reached, one over the lower
    16 bits the exact value.  Two passes whatever the distribution; a top-k grown until it covers the goal has no such
    bound.
    """
    # Read as an integer, a float orders like the float once negative ones are mirrored; + 0.0 makes -0.0 equal 0.0.
    bits = (values + 0.0).view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    upper = (keys >> _DIGIT_BITS) + (_DIGITS >> 1)
    digit, above = _reaching_digit(upper, mass, goal)
    inside = (upper == digit).nonzero().squeeze(1)
    low, more = _reaching_digit(keys[inside] & (_DIGITS - 1), mass[inside], goal - above)
    threshold = ((digit - (_DIGITS >> 1)) << _DIGIT_BITS) | low
    ids = (keys >= threshold).nonzero().squeeze(1)
    tied = (keys[ids] == threshold).nonzero().squeeze(1)
    each = float(mass[ids[tied[0]]])
    # At least one: the threshold is the value at which the goal is reached.
    wanted = max(1, math.ceil((goal - above - more) / each)) if each > 0 else tied.numel()
    kept = torch.ones_like(ids, dtype=torch.bool)
    kept[tied[wanted:]] = False
    return ids[kept]


def _reaching_digit(digits: torch.Tensor, mass: torch.Tensor, goal: float) -> tuple[int, float]:
    """The digit at which the mass, added from the largest digit down, reaches ``goal``, and the mass above it."""
    reached = torch.bincount(digits, mass, minlength=_DIGITS).flip(0).cumsum(0)
    if goal > float(reached[-1]):
        # Rounding can leave the goal a hair out of reach; then everything is taken.
        place = _DIGITS - 1 - int(digits.min())
    else:
        place = int(torch.searchsorted(reached, goal))
    return _DIGITS - 1 - place, float(reached[place - 1]) if place else 0.0


def block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums of 512 neighbours each, summed in fp32 and given in fp64: [ceil(V / 512)]."""
    short = -weights.numel() % _SUM_BLOCK
    padded = torch.nn.functional.pad(weights, (0, short)) if short else weights
    return padded.view(-1, _SUM_BLOCK).sum(1).double()


def _invert(weights: torch.Tensor, at: float) -> int:
    """The first index at which the running sum of ``weights`` exceeds ``at`` of the whole; its weight is positive.

    Two levels, block then token, so that the long running sum has 512 times fewer terms.
    """
    totals = block_sums(weights).cumsum(0)
    target = at * float(totals[-1])
    block = min(int(torch.searchsorted(totals, target, right=True)), totals.numel() - 1)
    if block > 0:
        target -= float(totals[block - 1])
    inside = weights[block * _SUM_BLOCK : (block + 1) * _SUM_BLOCK].cumsum(0, dtype=torch.float64)
    place = int(torch.searchsorted(inside, target, right=True))
    if place >= inside.numel():
        # The block's sum and its running sum may round differently; the last token with weight is the one meant.
        place = int(torch.searchsorted(inside, inside[-1]))
    return block * _SUM_BLOCK + place
