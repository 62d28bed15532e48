"""Elementwise functions and row sums whose bits do not depend on where in a batch a row stands.

Owns: how such a call is made.  Does not own: which of a model's calls are made that way (``unaligned``), linear layers
(``linear``), products of weights (``weight_products``).

Why: torch computes whole vectors with one approximation of exp and its kin and what is left at the end of a range with
another, and it cuts a large tensor into one range per thread wherever that falls.  A few elements then round
differently with the number of rows.  Here the tensor is taken as one line and padded, where it has to be, so that every
thread's range is a whole number of vectors::

    40 000 elements, 2 ranges   | range 0: 20 000 ........ ragged | range 1: 20 000 ........ ragged |
    padded to 40 192            | range 0: 20 096 = 157 * 128     | range 1: 20 096                 |

Sums over a last dimension whose numbers lie apart are the other case: their order depends on the rows, so the tensor is
made contiguous first.  Sums over numbers side by side do not.

Runs in every forward pass, on the worker's thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Call = Callable[..., Any]

_VECTOR: Final = 128
"""Elements; a multiple of what any instruction set computes in one unrolled step."""
_GRAIN: Final = 32768
"""Elements per thread below which torch uses fewer threads (ATen's GRAIN_SIZE)."""
_GELU_ALL_THREADS: Final = 16384
"""Above this many elements, GELU alone uses all threads (ATen's GELU_MIN_ELEMENTS_FOR_MULTI_THREADING)."""

_NAMES: Final = (
    *("sigmoid", "rsqrt", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "tanh", "sqrt", "erf"),
    *("sin", "cos", "tan", "sinh", "cosh", "atan", "asinh", "reciprocal", "pow", "float_power", "square"),
)
_NEURAL: Final = (
    *("silu", "gelu", "softplus", "mish", "elu", "selu", "celu", "logsigmoid", "hardswish", "hardsigmoid"),
    *("relu6", "leaky_relu", "softsign", "tanhshrink", "sigmoid", "tanh"),
)
_ROW_NAMES: Final = ("mean", "sum", "norm", "prod", "var", "std", "logsumexp", "softmax", "log_softmax", "cumsum")


def _elementwise() -> frozenset[Call]:
    functions: set[Call] = {torch.special.expit, Tensor.__pow__, Tensor.__rpow__}
    for name in _NAMES:
        for place, suffix in ((torch, ""), (torch, "_"), (Tensor, ""), (Tensor, "_")):
            if (function := getattr(place, name + suffix, None)) is not None:
                functions.add(function)
    functions.update(getattr(functional, name) for name in _NEURAL)
    return frozenset(functions)


def _over_rows() -> frozenset[Call]:
    functions: set[Call] = {functional.rms_norm, functional.layer_norm, functional.normalize, torch.linalg.vector_norm}
    functions.update(getattr(torch, name) for name in _ROW_NAMES if hasattr(torch, name))
    functions.update(getattr(Tensor, name) for name in _ROW_NAMES)
    return frozenset(functions | {functional.softmax, functional.log_softmax})


ELEMENTWISE: Final = _elementwise()
OVER_ROWS: Final = _over_rows()


@dataclass(frozen=True, slots=True)
class Way:
    """One way of calling an elementwise function: what decides, besides the numbers, how torch computes it."""

    function: Call
    dtype: torch.dtype
    rest: tuple[Any, ...]


def aligned(count: int, threads: int) -> int:
    """The fewest elements, at least ``count``, whose splits over ``threads`` fall on vector boundaries."""
    while True:
        parts = max(1, min(threads, -(-count // _GRAIN)))
        step = _VECTOR * (math.lcm(parts, threads) if count > _GELU_ALL_THREADS else parts)
        whole = -(-count // step) * step
        if whole == count:
            return count
        count = whole


def over_aligned_line(call: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """The elementwise function ``call`` over ``values`` as a line that is padded where it has to be."""
    count = values.numel()
    whole = aligned(count, torch.get_num_threads())
    if whole == count and values.is_contiguous():
        return call(values)
    line = values.new_zeros(whole)
    line[:count].view(values.shape).copy_(values)
    result = call(line)
    shaped = result[:count].view(values.shape)
    # A function that works in place (``sigmoid_``, ``silu(inplace=True)``) gives back what it was given.
    return values.copy_(shaped) if result is line else shaped


class AlignedMode(TorchFunctionMode):
    """Within it, all calls are made as :func:`aligned_call` makes them.

    A mode sees every call of torch, reads of a shape included, and costs several microseconds at each.
    """

    def __init__(self, plain: frozenset[Way]) -> None:
        super().__init__()
        self._plain = plain

    def __torch_function__(
        self, func: Call, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return aligned_call(self._plain, func, args, kwargs or {})


def aligned_call(plain: frozenset[Way], func: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``func(*args, **kwargs)``: elementwise functions over padded lines, row sums over contiguous rows.

    ``plain``: ways of calling that were tried and need no line.
    """
    if func in ELEMENTWISE:
        place = tensor_place(args, kwargs)
        if place is not None and way_of(func, args, kwargs, place) not in plain:
            return over_aligned_line(call_at(func, args, kwargs, place), args[place])
    elif func in OVER_ROWS and lies_apart(args):
        return func(args[0].contiguous(), *args[1:], **kwargs)
    return func(*args, **kwargs)


def call_at(func: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int) -> Callable[[Tensor], Tensor]:
    """``func`` as a function of the argument at ``place`` alone."""

    def call(values: Tensor) -> Tensor:
        result: Tensor = func(*args[:place], values, *args[place + 1 :], **kwargs)
        return result

    return call


def tensor_place(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Where the one tensor of an elementwise call stands; None for calls that are left as they are.

    Those are calls with several tensors (two operands, ``out=``), without numbers, or away from the CPU.
    """
    places = [index for index, item in enumerate(args) if isinstance(item, Tensor)]
    if len(places) != 1 or any(isinstance(item, Tensor) for item in kwargs.values()):
        return None
    values = args[places[0]]
    usable = values.device.type == "cpu" and values.numel() > 0 and values.layout == torch.strided
    return places[0] if usable else None


def way_of(func: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int) -> Way | None:
    """None when the other arguments cannot be compared; such a call is taken to need a line."""
    way = Way(func, args[place].dtype, (place, *args[:place], *args[place + 1 :], *kwargs.items()))
    try:
        hash(way)
    except TypeError:
        return None
    return way


def lies_apart(args: tuple[Any, ...]) -> bool:
    """Whether the numbers of a row do not lie side by side."""
    values = args[0] if args else None
    return isinstance(values, Tensor) and values.ndim > 1 and values.shape[-1] > 1 and values.stride(-1) != 1
