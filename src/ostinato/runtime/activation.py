"""Activation functions whose bits do not depend on where in a batch a row stands.

Owns: the swap of activation modules for :class:`AlignedActivation`.  Does not own: activations written out inside a
model's code (``selfcheck`` sees whether they keep the promise).

Why: torch computes whole vectors with one approximation of exp and tanh and what is left at the end of a range with
another, and it cuts a large tensor into one range per thread wherever that falls.  A few elements then round
differently with the number of rows.  Here the tensor is taken as one line and padded, where it has to be, so that every
thread's range is a whole number of vectors::

    40 000 elements, 2 ranges   | range 0: 20 000 ........ ragged | range 1: 20 000 ........ ragged |
    padded to 40 192            | range 0: 20 096 = 157 * 128     | range 1: 20 096                 |

Runs at load (the swap) and in every forward pass.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import nn

_VECTOR: Final = 128
"""Elements; a multiple of what any instruction set computes in one unrolled step."""
_GRAIN: Final = 32768
"""Elements per thread below which torch uses fewer threads (ATen's GRAIN_SIZE)."""
_GELU_ALL_THREADS: Final = 16384
"""Above this many elements, GELU alone uses all threads (ATen's GELU_MIN_ELEMENTS_FOR_MULTI_THREADING)."""
_PACKAGES: Final = ("torch.nn.modules.activation", "transformers.activations")


class AlignedActivation(nn.Module):
    """``inner`` over a padded line, for an elementwise ``inner``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        count = inputs.numel()
        whole = aligned(count, torch.get_num_threads())
        if whole == count and inputs.is_contiguous():
            result: torch.Tensor = self.inner(inputs)
            return result
        line = inputs.new_zeros(whole)
        line[:count].view(inputs.shape).copy_(inputs)
        padded: torch.Tensor = self.inner(line)
        return padded[:count].view(inputs.shape)


def aligned(count: int, threads: int) -> int:
    """The fewest elements, at least ``count``, whose splits over ``threads`` fall on vector boundaries."""
    while True:
        parts = max(1, min(threads, -(-count // _GRAIN)))
        step = _VECTOR * (math.lcm(parts, threads) if count > _GELU_ALL_THREADS else parts)
        whole = -(-count // step) * step
        if whole == count:
            return count
        count = whole


def align_activations(model: nn.Module) -> None:
    """Wrap every elementwise activation module of ``model``.  Softmax and attention modules are not elementwise."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__module__ in _PACKAGES and _is_elementwise(child):
                setattr(parent, name, AlignedActivation(child))


def _is_elementwise(module: nn.Module) -> bool:
    """By trial: a line of numbers gives, number by number, what the numbers give alone, and no parameter takes part."""
    if next(module.parameters(), None) is not None:
        return False
    line = torch.linspace(-2.0, 2.0, 8)
    try:
        with torch.inference_mode():
            whole = module(line)
            apart = torch.cat([module(line[i : i + 1]) for i in range(line.numel())])
    except (RuntimeError, TypeError, IndexError, ValueError):
        return False
    return whole.shape == line.shape and torch.allclose(whole, apart, atol=1e-5)
