"""Where a transformers model meets the page pool: its attention function.

Owns: :func:`paged_attention`, registered with transformers' attention interface.  Does not own: the cache object
(``paged_cache``), the step's index arrays (``context``), kernels (``attention``), latents (``latent``).

How a layer runs: the model computes query, key and value, hands key and value to ``cache.update`` (which returns them
as they are and notes the layer), then calls :func:`paged_attention`, which writes the new rows into their pages and
attends over the sequence's pages.  The implementation's name is unknown to transformers' mask registry, so the model
builds no mask; causality, windows and chunks are the kernel's.

What a layer is (window, chunk, latent, whose pages it reads) comes from its :class:`LayerGeometry`; what the call
brings is scale, soft cap and sinks.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from ostinato.errors import AuditError, ModelRefusedError
from ostinato.runtime.attention import AttentionBackend, AttentionParams, KVPages
from ostinato.runtime.context import ACTIVE
from ostinato.runtime.geometry import LayerGeometry
from ostinato.runtime.latent import attend_latents, hand_over_latents
from ostinato.runtime.paged_cache import UPDATED
from ostinato.runtime.probe_cache import attending_layer

PAGED: Final = "ostinato_paged"


def install(model: PreTrainedModel) -> None:
    """Make ``model`` attend through :func:`paged_attention`, in every part of it; it cannot run otherwise afterwards.

    The weights of latent layers must have been taken before (:func:`~ostinato.runtime.latent.absorb_latents`).
    """
    AttentionInterface.register(PAGED, paged_attention)
    model.set_attn_implementation(PAGED)
    if model.config._attn_implementation != PAGED:
        raise ModelRefusedError(f"{type(model).__name__} cannot be served: it does not let its attention be replaced")
    hand_over_latents(model)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention over the active step's pages.

    ``query`` [1, Hq, rows, D], ``key`` and ``value`` [1, Hkv, rows, D | Dv]; returns ([1, rows, Hq, Dv], None).  A
    latent layer brings its latent [1, 1, rows, rank] as key and its rotary part [1, 1, rows, rope] as value.
    Rows behind the step's tokens are padding: they are neither written nor attended, and come back as zeros.

    Raises:
        AuditError: the layer keeps no keys and values, or the rows do not fit its pages.
    """
    step = ACTIVE.get()
    layer = attending_layer(module, kwargs, UPDATED.get())
    UPDATED.set(None)
    shape = None if layer is None else step.geometry[layer]
    if layer is None or shape is None:
        raise AuditError(
            f"layer {layer} attends, but it was found to keep no keys and values when the model was loaded"
        )
    place = step.arena.layers[shape.source]
    index = step.groups[place.group]
    count, rows = step.tokens, query.shape[2]
    query, key, value = (part[0].transpose(0, 1)[:count] for part in (query, key, value))
    if shape.source == layer:
        _write(step.backend, shape, key, value, place.pages, index.slots)
    params = _params(shape, query.shape[-1], kwargs)
    if shape.latent:
        result = attend_latents(step.backend, step.latents[layer], query, place.pages, params, index)
    else:
        result = step.backend.attend(query, place.pages, params, index)
    if rows != count:
        padded = result.new_zeros(rows, *result.shape[1:])
        padded[:count] = result
        result = padded
    return result[None], None


def _write(
    backend: AttentionBackend,
    shape: LayerGeometry,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: KVPages,
    slots: torch.Tensor,
) -> None:
    if not shape.latent:
        backend.write(key, value, pages, slots)
        return
    # A row of the pages is [latent | rotary], and the "values" are its first columns: each part goes to its own.
    rotary = pages.k[..., shape.key_dim :]
    backend.write(value, key, KVPages(rotary, pages.v), slots)


def _params(shape: LayerGeometry, width: int, call: dict[str, Any]) -> AttentionParams:
    """``width`` of a query is what scales the logits where the call does not say."""
    scale, sinks = call.get("scaling"), call.get("s_aux")
    return AttentionParams(
        scale=width**-0.5 if scale is None else float(scale),
        window=shape.window,
        chunk=shape.chunk,
        softcap=call.get("softcap") or 0.0,
        sinks=None if sinks is None else sinks.to(torch.float32),
    )
