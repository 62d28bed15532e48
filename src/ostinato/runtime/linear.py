"""Linear layers whose rows do not depend on how many rows are computed together.

Owns: the choice of a kernel per weight shape, by trial, and the swap of ``torch.nn.Linear`` for :class:`PackedLinear`.
Does not own: padding a batch to the row rule (``runner``), fused experts (``experts``), the search for weights that are
used without a ``Linear`` (``bare_weights``, which calls :func:`row_invariant_linear`).

Why: a matrix library picks its blocking by the number of rows, and with it the order of sums.  oneDNN keeps one order
for any two rows or more, and takes another for a single row over a long dot product; MKL has several below 16 rows.  A
:class:`RowRule` says which counts are alike; a batch that keeps to it gives each row the same bits whatever its
neighbours are.  Prepacked weights also are 1.5 to 2 times faster, as plain ones are repacked in every call.

Runs once per model, at load.  A replaced module holds the packed copy only; where a weight is tied to the embedding,
the embedding keeps the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from ostinato.runtime import native

Product = Callable[[torch.Tensor], torch.Tensor]
"""[rows, in] -> [rows, out]."""

_TRIAL_ROWS: Final = (1, 2, 3, 5, 8, 15, 16, 17, 32, 48, 65, 130, 256)
_LARGE_WEIGHT: Final = 1 << 26
_LARGE_TRIAL_ROWS: Final = (1, 2, 3, 8, 16, 17, 32)
_TOLERANCE: Final = MappingProxyType({torch.float32: 1e-4, torch.bfloat16: 2e-2})


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
PAIRS: Final = RowRule(2, 1)
"""oneDNN's own rule; a batch keeps at least this one, for the products that are not tried here."""
_RULES: Final = (ANY_ROWS, PAIRS, RowRule(16, 16))


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel for one shape of weight; ``rule`` is None when no row rule holds for it."""

    rule: RowRule | None
    packed: bool


Choices = Mapping[str, Choice]
"""By shape: ``out x in dtype bias``."""


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """What was chosen: ``body`` binds the rows of a batch, ``head`` those of the logits.

    ``choices``: of each shape, for another start to take over.
    """

    body: RowRule
    head: RowRule
    kernels: tuple[str, ...]
    invariant: bool
    choices: Choices

    def stricter(self) -> LinearPlan:
        """The same with the strictest rule for the rows of a batch."""
        return replace(self, body=self.body | _RULES[-1])

    def describe(self) -> str:
        return "+".join(self.kernels) + ("" if self.invariant else " (not all products invariant)")


class _WithoutNumbers(torch.Tensor):
    """The weight of a packed layer: it may be asked for its dtype and shape, and nothing can be computed with it."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":
            raise TypeError("the weight of a packed linear layer is gone: nothing can be computed with it")
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` over weights that were packed once for oneDNN.

    ``weight`` has a shape and a dtype but no numbers (some models ask for its dtype): code that computes with it fails
    (and the model is refused at load) instead of being wrong.
    """

    def __init__(self, linear: nn.Linear, rule: RowRule = ANY_ROWS) -> None:
        super().__init__()
        self.rule = rule
        weight = linear.weight.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias: nn.Parameter | None = linear.bias
        # A plain attribute: packed tensors are opaque and must not be moved, cast or saved with the module.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.weight = torch.empty_like(weight, device="meta").as_subclass(_WithoutNumbers)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.numel() // self.in_features
        if rows == 0:
            return inputs.new_empty(*inputs.shape[:-1], self.out_features)
        wanted = self.rule.pad(rows)
        if wanted == rows:
            return self._product(inputs)
        # A batch keeps the rule as a whole; a part of it, such as one expert's share, may not.
        padded = inputs.new_zeros(wanted, self.in_features)
        padded[:rows] = inputs.reshape(rows, self.in_features)
        return self._product(padded)[:rows].view(*inputs.shape[:-1], self.out_features)

    def _product(self, inputs: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")
        return product


def make_invariant(model: nn.Module, head: nn.Module | None, known: Choices | None = None) -> LinearPlan:
    """Replace every plain linear of ``model`` where that is shown to be better, and say which row rule then holds.

    ``head`` is the output projection; its rows are counted apart, since it sees sampled rows only.  ``known``: what
    was chosen at an earlier start; those shapes are not tried again.
    """
    choices = dict(known or {})
    body, top, kernels = PAIRS, ANY_ROWS, set[str]()
    invariant = not any(map(_is_stack, model.parameters()))
    for parent, name, linear in list(_linears(model)):
        shape = _shape(linear)
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
            setattr(parent, name, PackedLinear(linear, rule))
    return LinearPlan(body, top, tuple(sorted(kernels)), invariant, MappingProxyType(choices))


def _shape(linear: nn.Linear) -> str:
    dtype = str(linear.weight.dtype).removeprefix("torch.")
    return f"{linear.out_features} x {linear.in_features} {dtype}{' bias' * (linear.bias is not None)}"


def _is_stack(parameter: nn.Parameter) -> bool:
    """Whether this is a stack of matrices that a model multiplies with by hand, in whatever way a library likes."""
    return sum(size > 1 for size in parameter.shape) > 2 and not getattr(parameter, "row_invariant", False)


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Plain linears with their parent; a module used twice comes twice.

    Subclasses (quantised ones) are left alone, and those whose weight sees to its products itself (``bare_weights``).
    """
    for parent in model.modules():
        for name, child in parent.named_children():
            by_hand = type(child) is nn.Linear and getattr(child.weight, "row_invariant", False)
            if type(child) is nn.Linear and child.weight.device.type == "cpu" and not by_hand:
                yield parent, name, child


def _choose(linear: nn.Linear) -> Choice:
    """The packed kernel when it agrees with the plain one and some row rule holds for it; else the plain one."""
    large = linear.weight.numel() > _LARGE_WEIGHT
    counts = _LARGE_TRIAL_ROWS if large else _TRIAL_ROWS
    generator = torch.Generator().manual_seed(linear.in_features)
    inputs = torch.randn(counts[-1], linear.in_features, generator=generator).to(linear.weight.dtype)
    with torch.inference_mode():
        packed = _try_pack(linear)
        usable = packed is not None and _agree(packed(inputs[:16]), linear(inputs[:16]))
        del packed
        trial, inputs = cancelling(linear, inputs)
        if usable and (twin := _try_pack(trial)) is not None:
            rule = row_rule(twin, inputs, counts)
            if rule is not None:
                return Choice(rule, packed=True)
        return Choice(row_rule(trial, inputs, counts), packed=False)


def cancelling(linear: nn.Linear, inputs: torch.Tensor) -> tuple[nn.Linear, torch.Tensor]:
    """A layer of ``linear``'s shape, and inputs, whose exact products are zero: what comes out is rounding alone.

    Ordinary results in bf16 hide nearly all differences in the order of sums; here each one shows::

        weight  [ w | w ]     inputs  [ x | -x ]     w x - w x = 0 + (rounding, by the order of the sum)
    """
    half = linear.in_features // 2
    twin = nn.Linear(1, 1, bias=False)
    twin.in_features, twin.out_features = linear.in_features, linear.out_features
    weight = linear.weight.detach().clone()
    weight[:, half : 2 * half] = weight[:, :half]
    weight[:, 2 * half :] = 0
    twin.weight = nn.Parameter(weight, requires_grad=False)
    inputs = inputs.clone()
    inputs[:, half : 2 * half] = -inputs[:, :half]
    return twin, inputs


def _try_pack(linear: nn.Linear) -> PackedLinear | None:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or linear.weight.dtype not in _TOLERANCE:
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


def row_invariant_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``rows`` [.., depth] times ``weight`` [columns, depth], as ``torch.nn.functional.linear``, alike for any rows.

    The weight may have any strides; it is packed during the call.  Without the C++ library (or for another dtype than
    float32 and bfloat16) the rows are padded to the strictest row rule instead, which is not shown to suffice.
    """
    out = row_invariant_matmul(rows.reshape(1, -1, rows.shape[-1]), weight.mT.unsqueeze(0))
    if out is None:
        return _padded_linear(rows, weight, bias)
    out = out.view(*rows.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


def row_invariant_matmul(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """``rows`` [.., depth] @ ``weight`` [depth, columns], or both with one batch dimension; None: not supported."""
    if weight.ndim == 2:
        if rows.ndim < 2:
            return None
        out = row_invariant_matmul(rows.reshape(1, -1, rows.shape[-1]), weight.unsqueeze(0))
        return None if out is None else out.view(*rows.shape[:-1], weight.shape[1])
    same = rows.ndim == weight.ndim == 3 and len(rows) == len(weight) and rows.dtype == weight.dtype
    if not same or not rows.is_cpu or rows.dtype not in _TOLERANCE or native.load()[0] is None:
        return None
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = rows.new_empty(len(rows), rows.shape[1], weight.shape[2])
    torch.ops.ostinato.multiply_rows(rows, weight.mT, None, out)
    return out


def _padded_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    flat = rows.reshape(-1, rows.shape[-1])
    padded = flat.new_zeros(_RULES[-1].pad(len(flat)), flat.shape[-1])
    padded[: len(flat)] = flat
    out = nn.functional.linear(padded, weight, bias)[: len(flat)]
    return out.view(*rows.shape[:-1], weight.shape[0])
