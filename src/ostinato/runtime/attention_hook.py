"""Where a transformers model meets the page pool: its attention function and its cache object.

Owns: :func:`paged_attention`, registered with transformers' attention interface, and :class:`PagedCache`.  Does not
own: the step's index arrays (``context``), kernels (``attention``).

How a layer runs: the model computes query, key and value, hands key and value to ``cache.update`` (which returns them
as they are and notes the layer), then calls :func:`paged_attention`, which writes the new rows into their pages and
attends over the sequence's pages.  The implementation's name is unknown to transformers' mask registry, so the model
builds no mask; causality and windows are the kernel's.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_utils import AttentionInterface

from ostinato.errors import ModelRefusedError
from ostinato.runtime.attention import AttentionParams
from ostinato.runtime.context import ACTIVE
from ostinato.runtime.specs import LAYER_KEY

PAGED: Final = "ostinato_paged"


class PagedCache(Cache):
    """The cache object of every forward pass.  Holds nothing: pages are found through the active context."""

    def __init__(self, layers: int) -> None:
        self.layers = []
        self._count = layers

    def __len__(self) -> int:
        return self._count

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Identity.  transformers passes on what is put into ``kwargs["kwargs"]`` to the attention function."""
        if (bag := kwargs.get("kwargs")) is not None:
            bag[LAYER_KEY] = layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 (transformers passes it by name)
        """No length is common to a packed batch; positions are always given, so nobody may need one."""
        return 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self._count

    @property
    def is_compileable(self) -> bool:
        return False


def install(model: PreTrainedModel) -> None:
    """Make ``model`` attend through :func:`paged_attention`, in every part of it."""
    AttentionInterface.register(PAGED, paged_attention)
    model.set_attn_implementation(PAGED)
    if model.config._attn_implementation != PAGED:
        raise ModelRefusedError(f"{type(model).__name__} cannot be served: it does not let its attention be replaced")


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention over the active step's pages.

    ``query`` [1, Hq, rows, D], ``key`` and ``value`` [1, Hkv, rows, D | Dv]; returns ([1, rows, Hq, Dv], None).
    Rows behind the step's tokens are padding: they are neither written nor attended, and come back as zeros.
    """
    step = ACTIVE.get()
    layer: Any = kwargs.get(LAYER_KEY)
    if layer is None:
        layer = module.layer_idx
    shape = step.geometry[layer]
    place = step.arena.layers[shape.source]
    index = step.groups[place.group]
    count, rows = step.tokens, query.shape[2]
    query, key, value = (part[0].transpose(0, 1)[:count] for part in (query, key, value))
    if shape.source == layer:
        step.backend.write(key, value, place.pages, index.slots)
    scale, sinks = kwargs.get("scaling"), kwargs.get("s_aux")
    params = AttentionParams(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=shape.window,
        softcap=kwargs.get("softcap") or 0.0,
        sinks=None if sinks is None else sinks.to(torch.float32),
    )
    result = step.backend.attend(query, place.pages, params, index)
    if rows != count:
        padded = result.new_zeros(rows, *result.shape[1:])
        padded[:count] = result
        result = padded
    return result[None], None
