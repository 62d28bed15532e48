"""What a model's layers put into the cache, found by asking the model instead of guessing from its config.

Owns: the probe (kinds from transformers' own table, shapes from one forward pass over four tokens on the meta device)
and the refusal of models whose state this release cannot serve.  Does not own: grouping and page sizes
(``cache.layout``), memory (``arena``).  Runs once per model, at load; on the loading thread.

Invariant: a model that passes has one causal attention call per layer, through transformers' attention interface,
over exactly the keys and values that it handed to the cache.  Whether the *numbers* are right is ``selfcheck``'s part.
"""

from __future__ import annotations

import copy
import inspect
import logging
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.fx.experimental import _config as fx_config
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, get_layer_types_and_kwargs
from transformers.modeling_utils import AttentionInterface

from ostinato.cache.kinds import Full, Kind, Window
from ostinato.cache.layout import LayerSpec
from ostinato.errors import ModelRefusedError

_log = logging.getLogger(__name__)

CACHE_ARGUMENTS: Final = ("cache", "past_key_values")
"""Names of the cache argument over transformers' versions, newest first."""
LAYER_KEY: Final = "ostinato_layer"
"""Keyword under which a cache tells the attention function which layer it serves.

Some models use one attention module for several layers, so the module's own index is not to be trusted.
"""
_PROBE: Final = "ostinato_probe"
_PROBE_TOKENS: Final = 4
_ATTENTION_TENSORS: Final = frozenset({"s_aux", "position_ids", "cache_position"})
"""Tensors that an attention call may carry besides query, key and value without changing what it computes for us."""


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """How one layer's keys and values lie: ``kv_heads`` rows of ``key_dim`` and ``value_dim`` numbers per token.

    ``window`` is 0 for full attention.  ``source`` is the layer whose pages are read: the layer itself, or an earlier
    one whose keys and values it borrows (then it writes nothing and has no :class:`LayerSpec`).
    """

    layer: int
    kind: Kind
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    source: int


@dataclass(frozen=True, slots=True)
class ModelSpecs:
    """The cache side of a model: ``layers`` feed ``build_layout``; ``geometry[i]`` is layer ``i``."""

    layers: tuple[LayerSpec, ...]
    geometry: tuple[LayerGeometry, ...]
    cache_argument: str
    dtype: torch.dtype


@dataclass(slots=True)
class _Recorded:
    """One layer's call: what went into the cache, and what reached the attention function."""

    key: torch.Size | None = None
    value: torch.Size | None = None
    attention_calls: int = 0
    window: int | None = None


def probe_specs(model: PreTrainedModel) -> ModelSpecs:
    """The specs of ``model``.  Raises :class:`ModelRefusedError`, which says why, when it cannot be served."""
    try:
        _check_class(model)
        kinds = _kinds(model)
        argument = _check_forward(model)
        recorded = _record(model, argument, len(kinds))
        geometry = tuple(_geometry(layer, kind, recorded[layer]) for layer, kind in enumerate(kinds))
    except _RefusalError as reason:
        raise ModelRefusedError(f"{type(model).__name__} cannot be served: {reason}") from None
    return ModelSpecs(tuple(_layer_spec(g, model.dtype.itemsize) for g in geometry), geometry, argument, model.dtype)


class _RefusalError(Exception):
    """Why a model is refused; :func:`probe_specs` adds the model's class."""


def _layer_spec(shape: LayerGeometry, item: int) -> LayerSpec:
    parts = (shape.kv_heads * shape.key_dim * item, shape.kv_heads * shape.value_dim * item)
    return LayerSpec(shape.layer, shape.kind, parts)


def _check_class(model: PreTrainedModel) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise _RefusalError("it is an encoder-decoder model; this release serves decoder-only models")
    if output_head(model) is None:
        raise _RefusalError("it has no language-model head (an encoder, or a bare backbone)")


def output_head(model: PreTrainedModel) -> nn.Module | None:
    """The projection from hidden states to logits."""
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head


def _check_forward(model: PreTrainedModel) -> str:
    """Refuse by the forward pass's signature; returns the name under which it takes a cache.

    A wrong name would vanish in the model's ``**kwargs``, and every token would be computed without its past.
    """
    if not model._supports_attention_backend:
        raise _RefusalError("its attention does not go through transformers' attention interface")
    parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    for needed in ("position_ids", "logits_to_keep"):
        if needed not in parameters:
            raise _RefusalError(f"its forward pass has no `{needed}` argument, which packed batches need")
    for name in CACHE_ARGUMENTS:
        if name in parameters:
            return name
    raise _RefusalError(
        f"its forward pass takes neither {' nor '.join(CACHE_ARGUMENTS)}: it keeps state in a way of its own"
    )


def _kinds(model: PreTrainedModel) -> list[Kind]:
    try:
        types, settings = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _RefusalError(f"its config does not tell the kinds of its layers ({error})") from error
    return [_kind(layer, *item) for layer, item in enumerate(zip(types, settings, strict=True))]


def _kind(layer: int, name: str, settings: dict[str, Any]) -> Kind:
    match name:
        case "full_attention":
            return Full()
        case "sliding_attention":
            window = settings.get("sliding_window")
            # transformers calls a sliding layer without a width what it is: full attention.
            return Window(int(window)) if window else Full()
        case _:
            raise _RefusalError(
                f"layer {layer} is of kind {name!r}; this release serves full and sliding-window attention"
            )


def _geometry(layer: int, kind: Kind, seen: _Recorded) -> LayerGeometry:
    if seen.key is None or seen.value is None:
        raise _RefusalError(f"layer {layer} puts no keys and values of its own into the cache")
    if seen.attention_calls != 1:
        raise _RefusalError(
            f"layer {layer} calls the attention interface {seen.attention_calls} times per pass, not once"
        )
    window = kind.window if isinstance(kind, Window) else 0
    if seen.window is not None and seen.window != window:
        raise _RefusalError(f"layer {layer} attends over a window of {seen.window}, its config says {window}")
    _, heads, _, key_dim = seen.key
    return LayerGeometry(layer, kind, heads, key_dim, seen.value[3], window, source=layer)


# ------------------------------------------------------------------------------------------------------------- probing


class _ProbeCache(Cache):
    """Stands in for a cache and writes down what layers hand to it; any other use of it is a refusal."""

    def __init__(self, layers: int) -> None:
        self.layers = []
        self.recorded = [_Recorded() for _ in range(layers)]

    def __len__(self) -> int:
        return len(self.recorded)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= layer_idx < len(self.recorded):
            raise _RefusalError(f"it updates layer {layer_idx} of {len(self.recorded)}")
        record = self.recorded[layer_idx]
        if record.key is not None:
            raise _RefusalError(f"layer {layer_idx} updates the cache more than once per pass")
        record.key, record.value = key_states.shape, value_states.shape
        if (bag := kwargs.get("kwargs")) is not None:
            bag[LAYER_KEY] = layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 (transformers passes it by name)
        return 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self.recorded)

    def _side_state(self, *_: Any, **__: Any) -> NoReturn:
        raise _RefusalError("it keeps state beside keys and values (recurrent, convolution or indexer)")

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = _side_state
    update_indexer = has_previous_state = _side_state


def _probe_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Takes part in :func:`_record`: shapes only, and the refusal of calls that mean something we do not compute."""
    cache: _ProbeCache = kwargs[_PROBE]
    layer = kwargs.get(LAYER_KEY, getattr(module, "layer_idx", None))
    if layer is None:
        raise _RefusalError("an attention call does not say which layer it belongs to")
    if hasattr(module, "expand_kv"):
        raise _RefusalError(f"layer {layer} caches a latent (MLA); this release serves plain keys and values")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise _RefusalError(f"layer {layer} is not causal (an encoder or an embedding model)")
    odd = sorted(name for name, item in kwargs.items() if torch.is_tensor(item) and name not in _ATTENTION_TENSORS)
    if odd:
        raise _RefusalError(f"layer {layer} passes {', '.join(odd)} to attention, which is not understood here")
    if args[0] is not None or kwargs.get("attention_mask") is not None:
        raise _RefusalError(f"layer {layer} comes with an attention mask of the model's own making")
    record = cache.recorded[layer]
    record.attention_calls += 1
    if record.key is not None and key.shape[1:] != record.key[1:]:
        raise _RefusalError(f"layer {layer} attends over other keys than it caches")
    record.window = kwargs.get("sliding_window")
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1]), None


def _record(model: PreTrainedModel, argument: str, layers: int) -> list[_Recorded]:
    """One forward pass over a few tokens: on the meta device, else (data-dependent shapes) with the real weights."""
    AttentionInterface.register(_PROBE, _probe_attention)
    try:
        # The settings module carries methods that its type does not show.
        with fx_config.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
            return _forward(_on_meta(model), argument, layers)
    except _RefusalError:
        raise
    except Exception as error:
        # What the meta device lacks differs from model to model; the real weights decide.
        _log.debug("probing %s on the meta device failed: %s", type(model).__name__, error)
    before = model.config._attn_implementation
    try:
        return _forward(model, argument, layers)
    except _RefusalError:
        raise
    except Exception as error:
        raise _RefusalError(f"a probing forward pass failed: {error}") from error
    finally:
        model.set_attn_implementation(before)


def _on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """The same class and config without weights.  The config is copied: the probe changes its attention."""
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config))
    nn.Module.to(twin, model.dtype)
    twin.train(False)
    if hasattr(twin, "set_experts_implementation"):
        # The one way to run experts whose shapes do not depend on the router's choice; a model without any ignores it.
        twin.set_experts_implementation("batched_mm")
    return twin


def _forward(model: PreTrainedModel, argument: str, layers: int) -> list[_Recorded]:
    model.set_attn_implementation(_PROBE)
    cache = _ProbeCache(layers)
    ids = torch.ones(1, _PROBE_TOKENS, dtype=torch.long, device=model.device)
    positions = torch.arange(_PROBE_TOKENS, device=model.device)[None]
    with torch.inference_mode():
        model(input_ids=ids, position_ids=positions, use_cache=True, **{argument: cache, _PROBE: cache})
    return cache.recorded
