"""Mixtures of experts whose rows do not depend on the batch.

Owns: the implementation ``ostinato`` of transformers' experts interface, the packed weights behind it.  Does not own:
routers and experts outside of that interface (``bare_weights``), the kernels (``csrc/experts.cpp``).

How a layer runs: the pairs (token, choice) are sorted by expert; each expert multiplies its rows, be they one or a
thousand, with one kernel that reads a weight once per step; each token then sums its choices in the router's order::

    tokens [T, H] --order--> pairs [S] --gate_up--> [S, 2 I] --activation--> [S, I] --down--> float [S, H] --> [T, H]

Invariant: the bits of a token's output depend on its row, its choices and the weights alone.

Thread: :func:`install_experts` at load; :func:`run_experts` in the forward pass.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from ostinato.runtime import native
from ostinato.runtime.bare_weights import guard_bare_weights

OSTINATO: Final = "ostinato"
DTYPES: Final = (torch.float32, torch.bfloat16)
_ARGUMENTS: Final = ("hidden_states", "top_k_index", "top_k_weights")
"""What transformers' interface passes (5.20 to 5.24), besides the module."""
_WEIGHTS: Final = "_ostinato_weights"
_PANEL: Final = 32
_VECTOR: Final = 128
"""Elements; a multiple of what torch computes in one unrolled step, on any instruction set."""
_ONE_THREAD: Final = 16384
"""Elements that every elementwise function of torch leaves to one thread."""


@dataclass(frozen=True, slots=True)
class Projection:
    """One weight per expert, in panels of 32 columns: [experts, panels, words, 32] or, in bf16, [.., 32, 2]."""

    packed: Tensor
    bias: Tensor | None
    columns: int

    def __call__(self, rows: Tensor, index: Tensor | None, offsets: Tensor, out: Tensor) -> Tensor:
        """out[p] = weight of p's expert @ rows[index[p]] + bias; rows of ``out`` behind the pairs stay as they are."""
        torch.ops.ostinato.multiply_experts(rows, index, offsets, self.packed, self.bias, out)
        return out


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Both projections of a layer's experts."""

    up: Projection
    down: Projection
    experts: int


def install_experts(model: PreTrainedModel) -> str | None:
    """Make all products of ``model`` that are no linear layers row-invariant: its experts, and weights used by hand.

    Experts of transformers' interface are replaced; their weights then exist packed only.  To be called before linear
    layers are replaced.  Returns a note for the start-up table, or None when the model has no such experts.
    """
    note = _replace_experts(model)
    guard_bare_weights(model)
    return note


def _replace_experts(model: PreTrainedModel) -> str | None:
    modules = [module for module in model.modules() if _is_experts(module)]
    if not modules:
        return None
    library, reason = native.load()
    if library is None:
        return f"transformers' ({reason})"
    if not all(_is_supported(module) for module in modules):
        return "transformers' (their layout or dtype is not supported)"
    known = ExpertsInterface().get("batched_mm")  # type: ignore[no-untyped-call]
    if known is None or tuple(inspect.signature(known).parameters)[1:] != _ARGUMENTS:
        return "transformers' (its interface is not the known one)"
    ExpertsInterface.register(OSTINATO, run_experts)
    model.set_experts_implementation(OSTINATO)
    if any(cast(Any, module).config._experts_implementation != OSTINATO for module in modules):
        return "transformers' (the model does not let them be replaced)"
    for module in modules:
        setattr(module, _WEIGHTS, _take_weights(module))
    return f"own kernel, packed ({library.best_isa.name.lower()})"


def replaced_experts(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that run :func:`run_experts`."""
    return tuple(name for name, module in model.named_modules() if hasattr(module, _WEIGHTS))


def _is_experts(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "down_proj", "config"))


def _is_supported(module: Any) -> bool:
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    weights = [getattr(module, name, None) for name in names]
    same = {weight.dtype for weight in weights if isinstance(weight, Tensor)}
    shaped = all(isinstance(weight, Tensor) and weight.ndim == 3 and weight.is_cpu for weight in weights)
    return shaped and len(same) == 1 and same <= set(DTYPES) and not module._is_expert_parallel


def _take_weights(module: Any) -> ExpertWeights:
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    experts = int(module.down_proj.shape[0])
    return ExpertWeights(_take(module, up_name), _take(module, "down_proj"), experts)


def _take(module: Any, name: str) -> Projection:
    """Pack a weight and delete the parameter: code that reaches for it fails instead of being slow or different."""
    weight = getattr(module, name).detach()
    if module.is_transposed:
        weight = weight.transpose(1, 2)
    bias = getattr(module, f"{name}_bias").detach().contiguous() if module.has_bias else None
    projection = Projection(pack(weight), bias, weight.shape[1])
    delattr(module, name)
    return projection


def pack(weight: Tensor) -> Tensor:
    """[experts, columns, depth] of any strides in panels."""
    experts, columns, depth = weight.shape
    panels = -(-columns // _PANEL)
    words = (depth, _PANEL) if weight.dtype == torch.float32 else (-(-depth // 2), _PANEL, 2)
    packed = torch.empty(experts, panels, *words, dtype=weight.dtype)
    torch.ops.ostinato.pack_weights(weight, packed)
    return packed


def run_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """``hidden_states`` [T, H], ``top_k_index`` and ``top_k_weights`` [T, choices]; returns [T, H].

    A choice that is no expert (the number of experts, where a router masks) adds nothing.
    """
    weights: ExpertWeights = getattr(module, _WEIGHTS)
    inputs = hidden_states.to(weights.up.packed.dtype)
    pairs = top_k_index.numel()
    offsets = torch.empty(weights.experts + 1, dtype=torch.int32)
    tokens = torch.empty(pairs, dtype=torch.int32)
    slots = torch.empty(pairs, dtype=torch.int32)
    torch.ops.ostinato.order_experts(top_k_index.long().contiguous(), offsets, tokens, slots)
    block = _block_rows(weights.up.columns)
    raised = inputs.new_empty(-(-pairs // block) * block, weights.up.columns)
    raised[int(offsets[-1]) :] = 0
    weights.up(inputs, tokens, offsets, raised)
    activated = _activate(module, raised, block).to(inputs.dtype)
    lowered = torch.empty(pairs, weights.down.columns, dtype=torch.float32)
    weights.down(activated, None, offsets, lowered)
    if module.has_post_expert_norm:
        lowered = module.post_expert_norm(lowered.to(inputs.dtype)).float().contiguous()
    out = hidden_states.new_empty(len(hidden_states), weights.down.columns)
    torch.ops.ostinato.combine_experts(lowered, slots, top_k_weights.float().contiguous(), out)
    return out


def _block_rows(columns: int) -> int:
    """Rows that the activation is given at a time.

    It is the model's own code over torch, which computes what is left at the end of a range, or of a thread's share,
    by another approximation.  Blocks of one size, of whole vectors (or of one row), have no such places that move.
    """
    half = columns // 2 if columns % 2 == 0 else columns
    unit = _VECTOR // math.gcd(half, _VECTOR)
    return unit * (_ONE_THREAD // (columns * unit)) or 1


def _activate(module: Any, rows: Tensor, block: int) -> Tensor:
    """[a number of whole blocks, columns] -> the same number of rows."""
    activation = module._apply_gate if module.has_gate else module.act_fn
    if len(rows) <= block:
        return cast(Tensor, activation(rows)).contiguous()
    return torch.cat([activation(part) for part in torch.split(rows, block)])
