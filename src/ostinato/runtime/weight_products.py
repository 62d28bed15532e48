"""Products that a mixer writes as ``weight @ columns``, computed as linear layers.

Owns: finding them in a mixer's source, and the modules that stand in for the weights.  Does not own: how linear layers
are made row-invariant (``linear``: it finds the ones that are made here like any others).

Why: a matrix library picks the order of sums by the shape of a product.  Here the batch is the *columns*, so that a
token's numbers change with the number of tokens beside it, and no row rule applies.  Turned around, it is a linear
layer over rows::

    self.dt_proj.weight @ time_step          [out, in] @ [1, in, rows]             one layer, its bias set aside
    self.x_proj_weight[:, None] @ states     [heads, 1, out, in] @ [heads, 1, in, rows]     one layer for each head

Runs at load (the finding) and in every forward pass (the products).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import FunctionType

import torch
from torch import Tensor, nn

from ostinato.runtime.linear import PackedLinear


class TurnedLinear(nn.Module):
    """A linear layer whose ``weight`` can only be multiplied with columns; called, it is the layer that it was."""

    def __init__(self, linear: nn.Linear | PackedLinear) -> None:
        super().__init__()
        self.bias: nn.Parameter | None = linear.bias
        linear.register_parameter("bias", None)
        self.linear = linear

    @property
    def weight(self) -> TurnedLinear:
        return self

    def __matmul__(self, columns: Tensor) -> Tensor:
        """[..., in, rows] -> [..., out, rows], without the bias."""
        product: Tensor = self.linear(columns.transpose(-1, -2).contiguous())
        return product.transpose(-1, -2)

    def forward(self, inputs: Tensor) -> Tensor:
        product: Tensor = self.linear(inputs)
        return product if self.bias is None else product + self.bias


class HeadLinears(nn.Module):
    """Stands for a weight [heads, out, in] that is used as ``weight[:, None] @ columns`` and in no other way."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.heads = nn.ModuleList(_linear(head) for head in weight.detach())

    def __getitem__(self, index: tuple[slice, None]) -> HeadLinears:
        if index != (slice(None), None):
            raise TypeError(f"a weight that was turned into linear layers is not to be indexed with {index}")
        return self

    def __matmul__(self, columns: Tensor) -> Tensor:
        """[heads, 1, in, rows] -> [heads, 1, out, rows]."""
        products = [head(part.transpose(-1, -2).contiguous()) for head, part in zip(self.heads, columns, strict=True)]
        return torch.stack(products).transpose(-1, -2)


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=False)
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return linear


def linearize_products(module: nn.Module, forward: FunctionType) -> tuple[str, ...]:
    """Replace the weights that ``forward`` multiplies columns with; their names.

    Where the source is not to be had, nothing is replaced: the products stay right, if not equal to the bit.
    """
    turned = []
    for node in ast.walk(_source(forward)):
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)):
            continue
        match node.left:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=name), attr="weight"):
                inner = getattr(module, name)
                if not isinstance(inner, TurnedLinear):
                    setattr(module, name, TurnedLinear(inner))
                turned.append(name)
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                weight = getattr(module, name)
                if isinstance(weight, nn.Parameter):
                    delattr(module, name)
                    setattr(module, name, HeadLinears(weight))
                turned.append(name)
            case _:
                continue
    return tuple(turned)


def _source(function: FunctionType) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return ast.Module(body=[], type_ignores=[])
