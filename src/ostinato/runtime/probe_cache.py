"""What stands in for cache and attention while a model is asked what its layers keep.

Owns: :class:`ProbeCache`, which writes down what layers hand to it, the attention function that goes with it, and the
refusal of calls that mean something this runtime does not compute or would not save.  Does not own: running the model,
what is made of the records (``specs``).

Nothing is computed: shapes, dtypes, and whose tensor is whose.  Runs at load; on the loading thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NoReturn

import torch
from torch import nn
from transformers.cache_utils import Cache

LAYER_KEY: Final = "ostinato_layer"
"""Keyword under which a cache tells the attention function which layer it serves.

Some models use one attention module for several layers, so the module's own index is not to be trusted.
"""
PROBE: Final = "ostinato_probe"
"""Name of :func:`probe_attention` in transformers' attention interface."""
_ATTENTION_TENSORS: Final = frozenset({"s_aux", "position_ids", "cache_position"})
"""Tensors that an attention call may carry besides query, key and value without changing what it computes for us."""
_ATTENTION_NUMBERS: Final = frozenset({"scaling", "sliding_window", "softcap", "dropout", "logits_to_keep"})
"""The same for numbers.  One under another name is a known one renamed, or means something new."""
_CACHE_METHODS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "update": ("self", "key_states", "value_states", "layer_idx"),
        "update_conv_state": ("self", "conv_states", "layer_idx", "state_idx"),
        "update_recurrent_state": ("self", "recurrent_states", "layer_idx", "state_idx"),
        "get_seq_length": ("self", "layer_idx"),
        "get_query_offset": ("self", "layer_idx"),
        "get_mask_sizes": ("self", "query_length", "layer_idx"),
    }
)
"""What the methods of transformers' cache take (5.20 to 5.24) that ours stand in for."""


class RefusalError(Exception):
    """Why a model is refused; ``specs`` adds the model's class."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One buffer of a layer's state, without batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class Record:
    """One layer's calls: what went into the cache, and what reached the attention function.

    ``attends``: the layer whose keys and values it attends over, None when they are nobody's as they stand.
    """

    key: torch.Size | None = None
    value: torch.Size | None = None
    attention_calls: int = 0
    window: int | None = None
    latent: bool = False
    rank: int | None = None
    attends: int | None = None
    conv: dict[int, Kept] = field(default_factory=dict)
    recurrent: dict[int, Kept] = field(default_factory=dict)


RECORDING: Final[ContextVar[ProbeCache]] = ContextVar("ostinato_recording")
"""Set around the probing forward pass: the cache that it fills."""


def check_cache() -> None:
    """Refuse every model when transformers' cache takes other arguments than ours, which would lose them unseen."""
    for name, known in _CACHE_METHODS.items():
        parameters = inspect.signature(getattr(Cache, name)).parameters.values()
        named = tuple(item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD)
        if named != known:
            odd = sorted(set(named) ^ set(known)) or ["their order"]
            raise RefusalError(f"transformers' cache differs in the arguments of `{name}`: {', '.join(odd)}")


def attending_layer(module: nn.Module, call: Mapping[str, Any], updated: int | None) -> int | None:
    """The layer that an attention call serves; None: it cannot be told.

    The cache tells it where ``cache.update`` is given the call's keywords.  Else the module knows, unless it is shared
    by several layers and has no valid index; then it is the layer that ``updated`` the cache last.
    """
    for layer in (call.get(LAYER_KEY), getattr(module, "layer_idx", None), updated):
        if isinstance(layer, int) and layer >= 0:
            return layer
    return None


class _NoLayers(list[Any]):
    """A model that looks for cache layers keeps something that we would not see."""

    def __getitem__(self, _: Any) -> NoReturn:
        raise RefusalError("it reaches into the layers of its cache, so what it keeps there would not be saved")


class _NoPast(Cache):
    """To every question for earlier state it answers that there is none, as the runtime's own cache does."""

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    def get_recurrent_state(self, *_: Any, **__: Any) -> None:
        return None

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return False

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002 (by name)
        return query_length, 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    is_linear = is_dummy = is_sliding

    @property
    def is_compileable(self) -> bool:
        return False

    is_initialized = is_compileable


class ProbeCache(_NoPast):
    """Stands in for a cache of ``layers`` layers and keeps one :class:`Record` for each."""

    def __init__(self, layers: int) -> None:
        self.layers = _NoLayers()
        self.records = [Record() for _ in range(layers)]
        self.asked_length = False
        self.updated: int | None = None
        self._produced: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def __len__(self) -> int:
        return len(self.records)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        record = self._record(layer_idx)
        if record.key is not None:
            raise RefusalError(f"layer {layer_idx} updates the cache more than once per pass")
        record.key, record.value = key_states.shape, value_states.shape
        self.updated = layer_idx
        self._produced.append((layer_idx, key_states, value_states))
        if (bag := kwargs.get("kwargs")) is not None:
            bag[LAYER_KEY] = layer_idx
        return key_states, value_states

    def producer(self, key: torch.Tensor, value: torch.Tensor) -> int | None:
        """The layer that handed over these very tensors."""
        return next((layer for layer, k, v in self._produced if k is key and v is value), None)

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        kept = self._record(layer_idx).conv
        what = f"layer {layer_idx}'s convolution state {state_idx}"
        if state_idx in kept:
            raise RefusalError(f"{what} is updated more than once per pass")
        if conv_kernel_size is None or conv_kernel_size < 2 or conv_states.ndim != 3 or conv_states.shape[0] != 1:
            raise RefusalError(f"{what} is not [batch, channels, tokens] with the width of its kernel")
        kept[state_idx] = Kept((conv_states.shape[1], conv_kernel_size - 1), conv_states.dtype)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        kept, dtype = self._record(layer_idx).recurrent, recurrent_states.dtype
        what = f"layer {layer_idx}'s recurrent state {state_idx}"
        if state_idx in kept:
            raise RefusalError(f"{what} is updated more than once per pass")
        if recurrent_states.ndim < 2 or recurrent_states.shape[0] != 1:
            raise RefusalError(f"{what} of shape {tuple(recurrent_states.shape)} is not one sequence's")
        if not dtype.is_floating_point or dtype.itemsize > torch.float32.itemsize:
            raise RefusalError(f"{what} is {dtype}, and states are saved in float32")
        kept[state_idx] = Kept(tuple(recurrent_states.shape[1:]), dtype)
        return recurrent_states

    def update_indexer(self, *_: Any, **__: Any) -> NoReturn:
        raise RefusalError("it keeps the keys of an indexer (`update_indexer`), which would not be saved")

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Positions are given, so a layer that asks means to add the length to the numbers of the rows."""
        self.asked_length |= layer_idx is not None
        return 0

    def get_query_offset(self, layer_idx: int | None = None) -> int:
        return self.get_seq_length(layer_idx)

    def _record(self, layer: int) -> Record:
        if not 0 <= layer < len(self.records):
            raise RefusalError(f"it updates layer {layer} of {len(self.records)}")
        return self.records[layer]


def probe_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Shapes only, and the refusal of calls that mean something we do not compute."""
    cache = RECORDING.get()
    layer = _layer(module, cache, kwargs)
    _refuse_odd(module, layer, args, kwargs)
    record = cache.records[layer]
    record.attention_calls += 1
    record.window = kwargs.get("sliding_window")
    record.latent = hasattr(module, "expand_kv")
    record.rank = getattr(module, "kv_lora_rank", None)
    record.attends = cache.producer(key, value)
    alike = record.key is None or record.latent or key.shape[1:] == record.key[1:]
    if not alike or (record.key is not None and record.attends not in (None, layer)):
        raise RefusalError(f"layer {layer} attends over other keys than it caches")
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1]), None


def _layer(module: nn.Module, cache: ProbeCache, kwargs: dict[str, Any]) -> int:
    layer = attending_layer(module, kwargs, cache.updated)
    if layer is None or layer >= len(cache):
        raise RefusalError("an attention call does not say which layer it belongs to")
    return layer


def _refuse_odd(module: nn.Module, layer: int, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise RefusalError(f"layer {layer} is not causal (an encoder or an embedding model)")
    odd = sorted(name for name, item in kwargs.items() if _is_odd(name, item))
    if odd:
        raise RefusalError(f"layer {layer} passes {', '.join(odd)} to attention, which is not understood here")
    if (args and args[0] is not None) or kwargs.get("attention_mask") is not None:
        raise RefusalError(f"layer {layer} comes with an attention mask of the model's own making")


def _is_odd(name: str, item: object) -> bool:
    if torch.is_tensor(item):
        return name not in _ATTENTION_TENSORS
    return isinstance(item, int | float) and not isinstance(item, bool) and name not in _ATTENTION_NUMBERS | {LAYER_KEY}
