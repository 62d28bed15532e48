"""Weights that a model multiplies with by hand: routers, fused experts, per-head matrices.

Owns: :class:`BareWeight` and the search for the parameters that become one.  Does not own: the row-invariant products
(``linear``), modules of ``torch.nn`` (``linear`` replaces the linear ones), experts of transformers' interface
(``experts``).

Why: ``F.linear(hidden, self.weight)`` or ``hidden @ self.weight[expert]`` in a model's code goes straight to a matrix
library, with as many rows as the batch happens to have.  The weight itself is the one thing that every such line must
touch, so it is the weight that sees to it: views and casts of a :class:`BareWeight` are bare weights too, products with
one are row-invariant, and everything else gives plain tensors.

Runs at load (the search) and in every forward pass (the products).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from ostinato.runtime import native
from ostinato.runtime.linear import row_invariant_linear, row_invariant_matmul

_VIEWS: Final = frozenset(
    {"__getitem__", "transpose", "t", "permute", "view", "reshape", "unsqueeze", "squeeze", "expand", "chunk", "split"}
    | {"float", "bfloat16", "to", "type", "contiguous", "detach", "unbind", "select", "narrow", "flatten", "clone"}
    | {"requires_grad_", "__get__"}
)
"""Functions whose results stay bare weights (``__get__``: ``.T``, ``.mT``, ``.data``)."""


class BareWeight(Tensor):
    """A weight whose products with rows do not depend on how many rows there are."""

    row_invariant: Final = True

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _VIEWS:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **named)
            return _wrapped(result) if isinstance(args[0], BareWeight) else result
        product = _PRODUCTS.get(name)
        args = [plain(value) for value in args]
        named = {key: plain(value) for key, value in named.items()}
        if product is not None:
            result = product(*args, **named)
            if result is not None:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **named)


def plain(value: Any) -> Any:
    """``value``, as an ordinary tensor if it is a bare weight."""
    if isinstance(value, BareWeight):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(Tensor)
    if isinstance(value, list | tuple) and any(isinstance(item, BareWeight) for item in value):
        return type(value)(plain(item) for item in value)
    return value


def _wrapped(result: Any) -> Any:
    if isinstance(result, tuple | list) and any(isinstance(item, Tensor) for item in result):
        return type(result)(_wrapped(item) for item in result)
    if isinstance(result, Tensor) and not isinstance(result, BareWeight):
        return result.as_subclass(BareWeight)
    return result


def _biased_matmul(bias: Tensor, rows: Tensor, weight: Tensor) -> Tensor | None:
    product = row_invariant_matmul(rows, weight)
    return None if product is None else product + bias


_LINEAR_CALL: Final = re.compile(r"\blinear\((?:[^()]|\([^()]*\))*\)")
_CHILD_WEIGHT: Final = re.compile(r"\bself\.(\w+)\.weight\b")
_DTYPES: Final = (torch.float32, torch.bfloat16)
_PRODUCTS: Final[Mapping[str, Callable[..., Tensor | None]]] = MappingProxyType(
    dict.fromkeys(("matmul", "__matmul__", "mm", "bmm"), row_invariant_matmul)
    | {"linear": row_invariant_linear, "addmm": _biased_matmul, "baddbmm": _biased_matmul}
)
"""Functions, and methods, with rows before the weight.  Others (``einsum``) are torch's own."""


def bare_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Matrices, and stacks of them, that are multiplied with by hand: (owner, name, weight).

    They are those outside of the modules of ``torch.nn``, and ``child.weight`` in ``F.linear(.., self.child.weight)``.
    Dimensions of size 1 do not count: such a parameter scales, it does not multiply.
    """
    by_hand: dict[type[nn.Module], frozenset[str]] = {}
    for module in model.modules():
        kind = type(module)
        linears = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
        if linears and kind not in by_hand:
            by_hand[kind] = _multiplied_names(kind)
        for name in linears.keys() & by_hand.get(kind, frozenset()):
            yield linears[name], "weight", cast(nn.Parameter, linears[name].weight)
        if kind.__module__.startswith("torch.nn."):
            continue
        lookup_only = isinstance(module, nn.Embedding | nn.modules.conv._ConvNd)
        for name, parameter in module._parameters.items():
            if parameter is None or lookup_only or not parameter.is_cpu or parameter.dtype not in _DTYPES:
                continue
            if sum(size > 1 for size in parameter.shape) > 1:
                yield module, name, parameter


def _multiplied_names(kind: type[nn.Module]) -> frozenset[str]:
    """Each ``child`` for which the source of ``kind`` has ``linear(.., self.child.weight ..)``; none without source."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return frozenset()
    calls = _LINEAR_CALL.findall(source)
    return frozenset(name for call in calls for name in _CHILD_WEIGHT.findall(call))


def guard_bare_weights(model: nn.Module) -> int:
    """Make every bare parameter of ``model`` a :class:`BareWeight`; their number (0 without the C++ library)."""
    if native.load()[0] is None:
        return 0
    found = list(bare_parameters(model))
    for module, name, parameter in found:
        weight = parameter.detach().as_subclass(BareWeight)
        module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    return len(found)
