"""What one forward pass of a model, as transformers made it, shows of its code.

Owns: which linear layers' weights are used by other modules than the layer itself, keeping those usable, and whether
the model makes choices (a router's experts).  Does not own: products with such weights (``bare_weights``), linear
layers that are used as such (``linear``).

Why: ``F.linear(hidden, self.classifier.weight)`` reaches past a layer for its weight, which is gone once the layer is
packed.  And where a model chooses, a near tie falls differently with the last bit: in 16 bits, a row of logits may then
be far from another correct program's.

Runs once per model, at load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ostinato.runtime.bare_weights import BareWeight

_CHOOSING: Final = frozenset({"topk", "argmax", "sort", "argsort"})
_HARMLESS: Final = frozenset({"embedding", "__get__", "is_floating_point"})
"""An embedding may share a layer's weight, and to read a dtype or a shape does not need the numbers."""


@dataclass(frozen=True, slots=True)
class Observed:
    """``reached``: names of the linear layers whose weights other modules use.  ``chooses``: see above."""

    reached: tuple[str, ...]
    chooses: bool


class SharedLinear(nn.Linear):
    """A linear layer whose weight other modules use as well, so that it must stay."""


class _Watching(TorchFunctionMode):
    def __init__(self, weights: Mapping[int, str]) -> None:
        super().__init__()
        self.inside: list[nn.Module] = []
        self.reached: set[str] = set()
        self.chooses = False
        self._weights = weights

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        self.chooses |= name in _CHOOSING
        own = bool(self.inside) and type(self.inside[-1]) is nn.Linear
        if not own and name not in _HARMLESS:
            used = (*args, *(kwargs or {}).values())
            self.reached.update(self._weights[id(item)] for item in used if id(item) in self._weights)
        return func(*args, **(kwargs or {}))

    def enter(self, module: nn.Module, *_: Any) -> None:
        self.inside.append(module)

    def leave(self, *_: Any) -> None:
        self.inside.pop()


def observe(model: nn.Module, run: Callable[[], object]) -> Observed:
    """What ``run``, a forward pass of ``model``, shows."""
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    watching = _Watching({id(linear.weight): name for name, linear in linears.items()})
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(watching.enter))
        handles.append(module.register_forward_hook(watching.leave, always_call=True))
    try:
        with watching:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return Observed(tuple(sorted(watching.reached)), watching.chooses)


def keep_reached(model: nn.Module, observed: Observed) -> None:
    """Keep the weights that other modules use from being packed away; products with them become row-invariant.

    To be called when mixers have been rebound (they have their own way with weights), before linears are replaced.
    """
    modules = dict(model.named_modules())
    for name in observed.reached:
        linear = modules.get(name)
        if type(linear) is nn.Linear:
            weight: torch.Tensor = linear.weight.detach().as_subclass(BareWeight)
            linear.weight = nn.Parameter(weight, requires_grad=False)
            linear.__class__ = SharedLinear
