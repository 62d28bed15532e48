"""Latent attention (MLA) in its absorbed form: attention over cached latents, without expanding them into keys.

Owns: :func:`absorb_latents`, which finds a model's absorption weights, :func:`hand_over_latents`, which makes its
modules pass latents on as they are, and :func:`attend_latents`.  Does not own: the products (``attention``), pages
(``arena``), when to attend (``attention_hook``).

transformers' modules cache one latent and one rotary part per token, for all heads, and expand them by a linear map::

    key   of head h = [ latent . Wk[h] | rotary ]   (or the rotary part first)         Wk [rank, nope]
    value of head h =   latent . Wv[h]                                                 Wv [rank, v]

so the query can be taken to the latents instead of the latents to the query::

    q . key     = [ q_nope . Wk[h]^T | q_rotary ] . [ latent | rotary ]
    sum w value = ( sum w latent ) . Wv[h]

The weights come from ``expand_kv`` itself, asked for the images of unit vectors, so no family is known by name.

Thread: :func:`absorb_latents` and :func:`hand_over_latents` at start-up, :func:`attend_latents` the worker's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ostinato.errors import ModelRefusedError
from ostinato.runtime.attention import AttentionBackend, AttentionParams, BatchMetadata, KVPages
from ostinato.runtime.geometry import LayerGeometry, ModelSpecs

_TRIAL_ROWS: Final = 8
_TOLERANCE: Final = MappingProxyType({torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3})


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
    """One layer's absorption weights, packed by a backend.

    Attributes:
        key: packed from ``[heads, nope, rank]``, takes a query to the latents.
        value: packed from ``[heads, rank, value_dim]``, takes a weighted latent to a value.
        rank: width of a latent.
        value_dim: width of a head's value.
        rotary_first: whether the rotary part stands before the rest in a query.
    """

    key: Tensor
    value: Tensor
    rank: int
    value_dim: int
    rotary_first: bool


class _RefusalError(Exception):
    """Why a layer cannot be absorbed; :func:`absorb_latents` adds the model's class and the layer."""


def absorb_latents(model: PreTrainedModel, specs: ModelSpecs, backend: AttentionBackend) -> Mapping[int, LatentWeights]:
    """The weights of every latent layer of ``model``, by layer, in the form that ``backend`` takes.

    The linear layers that they came from are gone then: ``model`` can run through :func:`hand_over_latents` only.
    Raises :class:`ModelRefusedError` when a layer's expansion is something else than described above.
    """
    weights = {}
    for shape in specs.geometry:
        if shape is None or not shape.latent:
            continue
        try:
            expander = _expander(model, shape.layer)
            weights[shape.layer] = _absorb(expander, shape, specs.dtype, backend)
            _free_expansion(expander, shape, specs.dtype)
        except _RefusalError as reason:
            raise ModelRefusedError(
                f"{type(model).__name__} cannot be served: layer {shape.layer} caches a latent, but {reason}"
            ) from None
    return MappingProxyType(weights)


def hand_over_latents(model: PreTrainedModel) -> None:
    """From now on latent layers call attention with (latent, rotary) in the place of expanded keys and values."""
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            expanding: Any = module
            expanding.expand_kv = _as_it_is


def attend_latents(
    backend: AttentionBackend,
    weights: LatentWeights,
    query: Tensor,
    pages: KVPages,
    params: AttentionParams,
    metadata: BatchMetadata,
) -> Tensor:
    """Attention of ``query`` [tokens, heads, nope + rotary] over pages of latents: [tokens, heads, value_dim]."""
    tokens, heads, width = query.shape
    rotary = pages.k.shape[3] - weights.rank
    begin = 0 if weights.rotary_first else width - rotary
    nope = query[..., rotary:] if weights.rotary_first else query[..., :begin]
    taken = query.new_empty(tokens, heads, weights.rank + rotary)
    backend.head_product(nope, weights.key, taken[..., : weights.rank])
    taken[..., weights.rank :] = query[..., begin : begin + rotary]
    latents = backend.attend(taken, pages, params, metadata)
    out = query.new_empty(tokens, heads, weights.value_dim)
    backend.head_product(latents, weights.value, out)
    return out


def _as_it_is(latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    return latent, rotary


def _expander(model: PreTrainedModel, layer: int) -> nn.Module:
    found = [m for m in model.modules() if hasattr(m, "expand_kv") and getattr(m, "layer_idx", None) == layer]
    if len(found) != 1:
        raise _RefusalError(f"{len(found)} of its modules say how to expand it, not one")
    return found[0]


def _absorb(module: nn.Module, shape: LayerGeometry, dtype: torch.dtype, backend: AttentionBackend) -> LatentWeights:
    rank, rotary = shape.key_dim, shape.value_dim
    trial = torch.randn(_TRIAL_ROWS, rank + rotary, generator=torch.Generator().manual_seed(rank))
    # Unit vectors come out as the weights themselves: one product with 1, and sums of zeros.
    rows = torch.cat([torch.zeros(1, rank + rotary), torch.eye(rank + rotary), trial]).to(dtype)
    key, value = _expand(module, rows, rank)
    if key.shape[2] < rotary or bool(key[:, 0].any()) or bool(value[:, 0].any()):
        raise _RefusalError("its expansion is not linear: zeros do not become zeros")
    units = slice(1, 1 + rank)
    begin = _rotary_columns(key, rank, rotary)
    if bool(value[:, 1 + rank : 1 + rank + rotary].any()) or bool(key[:, units, begin : begin + rotary].any()):
        raise _RefusalError("its expansion mixes the latent and the rotary part")
    _check_trial(rows, key, value)
    nope = torch.cat([key[:, units, :begin], key[:, units, begin + rotary :]], dim=2)
    packed_key = backend.pack_heads(nope.transpose(1, 2))
    packed_value = backend.pack_heads(value[:, units])
    return LatentWeights(packed_key, packed_value, rank, value.shape[2], begin == 0 and rotary > 0)


def _expand(module: nn.Module, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """``rows`` [n, rank + rotary] expanded: keys [heads, n, key dim] and values [heads, n, value dim]."""
    expanding: Any = module
    with torch.no_grad():
        key, value = expanding.expand_kv(rows[None, None, :, :rank], rows[None, None, :, rank:])
    return key[0], value[0]


class _Absorbed(nn.Module):
    """Stands where a linear layer was whose weights live on in absorbed form."""

    def forward(self, *_: Any) -> Tensor:
        raise ModelRefusedError("this model cannot be served: it expands latents outside of `expand_kv` as well")


def _free_expansion(module: nn.Module, shape: LayerGeometry, dtype: torch.dtype) -> None:
    """Let go of the linear layers that expand a latent: nobody asks for that any more."""
    used: list[nn.Module] = []
    linears = [child for child in module.modules() if type(child) is nn.Linear]
    handles = [linear.register_forward_hook(lambda linear, *_: used.append(linear)) for linear in linears]
    try:
        _expand(module, torch.zeros(1, shape.key_dim + shape.value_dim, dtype=dtype), shape.key_dim)
    finally:
        for handle in handles:
            handle.remove()
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if any(child is linear for linear in used):
                setattr(parent, name, _Absorbed())


def _rotary_columns(key: Tensor, rank: int, rotary: int) -> int:
    """Where the rotary part begins in every head's key: at 0, or at the last column but ``rotary``."""
    copies = key[:, 1 + rank : 1 + rank + rotary]
    width = key.shape[2]
    for begin in (width - rotary, 0):
        expected = torch.zeros(rotary, width, dtype=key.dtype)
        expected[:, begin : begin + rotary] = torch.eye(rotary, dtype=key.dtype)
        if bool((copies == expected).all()):
            return begin
    raise _RefusalError("its expansion does not copy the rotary part to an end of each head's key")


def _check_trial(rows: Tensor, key: Tensor, value: Tensor) -> None:
    """Random rows must expand to what the images of unit vectors say."""
    end = rows.shape[0] - _TRIAL_ROWS
    for expanded in (key.float(), value.float()):
        units, actual = expanded[:, 1:end], expanded[:, end:]
        expected = rows[end:].float() @ units
        if not bool((actual - expected).abs().max() <= _TOLERANCE[rows.dtype] * expected.abs().max()):
            raise _RefusalError("its expansion is not linear")
