"""Linear layers whose rows do not depend on how many rows are computed together.

Owns: the choice of a kernel per weight shape, by trial on random input, and the swap of ``torch.nn.Linear`` for
:class:`PackedLinear`.  Does not own: padding a batch to the row rule (``runner``), other matrix products such as a
mixture's experts (``selfcheck`` sees whether they keep the promise).

Why: a matrix library picks its blocking by the number of rows, and with it the order of sums.  oneDNN keeps one order
for any two rows or more, and takes another for a single row over a long dot product; MKL has several below 16 rows.  A
:class:`RowRule` says which counts are alike; a batch that keeps to it gives each row the same bits whatever its
neighbours are.  Prepacked weights also are 1.5 to 2 times faster, as plain ones are repacked in every call.

Runs once per model, at load.  A replaced module holds the packed copy only; where a weight is tied to the embedding,
the embedding keeps the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

Product = Callable[[torch.Tensor], torch.Tensor]
"""[rows, in] -> [rows, out]."""

_TRIAL_ROWS: Final = (1, 2, 3, 5, 8, 15, 16, 17, 32, 48, 65, 130, 256)
_LARGE_WEIGHT: Final = 1 << 26
_LARGE_TRIAL_ROWS: Final = (1, 2, 3, 8, 16, 17, 32)
_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class RowRule:
    """Row counts that are computed alike: at least ``minimum``, and a whole number of ``multiple``."""

    minimum: int
    multiple: int

    def pad(self, rows: int) -> int:
        """The fewest rows, at least ``rows``, that keep the rule."""
        return -(-max(rows, self.minimum) // self.multiple) * self.multiple

    def __or__(self, other: RowRule) -> RowRule:
        """A rule that keeps both (multiples are powers of two)."""
        return RowRule(max(self.minimum, other.minimum), max(self.multiple, other.multiple))


ANY_ROWS: Final = RowRule(1, 1)
_RULES: Final = (ANY_ROWS, RowRule(2, 1), RowRule(16, 16))


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """What was chosen: ``body`` binds the rows of a batch, ``head`` those of the logits."""

    body: RowRule
    head: RowRule
    kernels: tuple[str, ...]
    invariant: bool

    def describe(self) -> str:
        return "+".join(self.kernels) + ("" if self.invariant else " (rows not invariant)")


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` over weights that were packed once for oneDNN.

    ``weight`` is left as an empty stand-in on the meta device: code that asks for its dtype or shape gets them, and
    code that computes with it fails instead of being wrong.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)
        # A plain attribute: packed tensors are opaque and must not be moved, cast or saved with the module.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.numel() == 0:
            return inputs.new_empty(*inputs.shape[:-1], self.out_features)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")
        return product


@dataclass(frozen=True, slots=True)
class _Choice:
    rule: RowRule | None
    packed: bool


def make_invariant(model: nn.Module, head: nn.Module | None) -> LinearPlan:
    """Replace every plain linear of ``model`` where that is shown to be better, and say which row rule then holds.

    ``head`` is the output projection; its rows are counted apart, since it sees sampled rows only.
    """
    choices: dict[tuple[int, int, torch.dtype, bool], _Choice] = {}
    body, top, kernels, invariant = ANY_ROWS, ANY_ROWS, set[str](), True
    for parent, name, linear in list(_linears(model)):
        shape = (linear.out_features, linear.in_features, linear.weight.dtype, linear.bias is not None)
        if shape not in choices:
            choices[shape] = _choose(linear)
        choice = choices[shape]
        rule = choice.rule or _RULES[-1]
        if linear is head:
            top = top | rule
        else:
            body = body | rule
        invariant = invariant and choice.rule is not None
        kernels.add("onednn packed" if choice.packed else "torch")
        if choice.packed:
            setattr(parent, name, PackedLinear(linear))
    return LinearPlan(body, top, tuple(sorted(kernels)), invariant)


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Plain linears with their parent; a module used twice comes twice.  Subclasses (quantised ones) are left alone."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child.weight.device.type == "cpu":
                yield parent, name, child


def _choose(linear: nn.Linear) -> _Choice:
    """The packed kernel when it agrees with the plain one and some row rule holds for it; else the plain one."""
    large = linear.weight.numel() > _LARGE_WEIGHT
    counts = _LARGE_TRIAL_ROWS if large else _TRIAL_ROWS
    generator = torch.Generator().manual_seed(linear.in_features)
    inputs = torch.randn(counts[-1], linear.in_features, generator=generator).to(linear.weight.dtype)
    with torch.inference_mode():
        packed = _try_pack(linear)
        if packed is not None and _agree(packed(inputs), linear(inputs)):
            rule = row_rule(packed, inputs, counts)
            if rule is not None:
                return _Choice(rule, packed=True)
        return _Choice(row_rule(linear, inputs, counts), packed=False)


def _try_pack(linear: nn.Linear) -> PackedLinear | None:
    if not torch.backends.mkldnn.is_available() or linear.weight.dtype not in _TOLERANCE:
        return None
    try:
        return PackedLinear(linear)
    except RuntimeError:  # this build or processor has no packed kernel for the dtype
        return None


def _agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    scale = float(theirs.abs().max())
    return torch.allclose(ours.float(), theirs.float(), rtol=0.0, atol=_TOLERANCE[theirs.dtype] * scale)


def row_rule(product: Product, inputs: torch.Tensor, counts: tuple[int, ...]) -> RowRule | None:
    """The weakest rule under which each row of ``inputs`` has one result, over all ``counts`` of rows; None: none."""
    alike = {count: product(inputs[:count].contiguous()) for count in counts}
    whole = alike[counts[-1]]
    good = {count for count, result in alike.items() if torch.equal(result, whole[:count])}
    # A row must not depend on where in the batch it stands, either.
    if not torch.equal(product(inputs[1:].contiguous()[:16]), whole[1:17]):
        return None
    for rule in _RULES:
        if all(count in good for count in counts if rule.pad(count) == count):
            return rule
    return None
