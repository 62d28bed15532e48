"""What a model's layers put into the cache, found by asking the model instead of guessing from its config.

Owns: the probe (kinds from transformers' own table, shapes from one forward pass over four tokens on the meta device),
what is made of its records, and the refusal of models whose state would not be saved.  Does not own: the recording
(``probe_cache``), grouping and page sizes (``cache.layout``), memory (``arena``).  Runs once per model, at load; on the
loading thread.

Invariant: in a model that passes, each layer that attends does so in one causal call per pass, through transformers'
attention interface, over the keys and values (or the latent) that it, or an earlier layer, handed to the cache; and all
else that layers carry from token to token is in the states listed here.  Whether the *numbers* are right is
``selfcheck``'s part.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.fx.experimental import _config as fx_config
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.modeling_utils import AttentionInterface

from ostinato.cache.kinds import Chunked, Full, Kind, State, Window, ceil_div
from ostinato.cache.layout import ALIGNMENT, LayerSpec
from ostinato.errors import ModelRefusedError
from ostinato.runtime.geometry import LayerGeometry, ModelSpecs, StateBuffer, StateGeometry, StateUse
from ostinato.runtime.probe_cache import (
    PROBE,
    RECORDING,
    Kept,
    ProbeCache,
    Record,
    RefusalError,
    check_cache,
    probe_attention,
)
from ostinato.runtime.window_check import masks_have_window

_log = logging.getLogger(__name__)

CACHE_ARGUMENTS: Final = ("cache", "past_key_values", "cache_params")
"""Names of the cache argument over transformers' versions, newest first."""
_PROBE_TOKENS: Final = 4
_NOTHING: Final = ("dummy", "moe", "mlp")
"""Kinds of layers that cache nothing: feed-forward ones, and those that borrow an earlier layer's keys and values."""
_UNSAVED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "indexed_attention": "the keys of its indexer",
        "compressed_sparse_attention": "its compressed keys and the keys of its indexer",
        "heavily_compressed_attention": "its compressed keys",
        "minimax_m3_sparse": "the keys of its block index",
        "reference_sliding_attention": "its reference tokens",
    }
)


@dataclass(frozen=True, slots=True)
class _LayerKind:
    """What a layer's config says of it: the ``kind`` of its attention if it has any, and whether it keeps a state."""

    name: str
    kind: Kind | None
    state: bool


def probe_specs(model: PreTrainedModel) -> ModelSpecs:
    """The specs of ``model``.  Raises :class:`ModelRefusedError`, which says why, when it cannot be served."""
    try:
        check_cache()
        _check_class(model)
        kinds = _kinds(model)
        attends = any(kind.kind is not None for kind in kinds)
        argument, takes_positions = _check_forward(model, attends)
        cache = _record(model, argument, takes_positions, len(kinds))
        geometry = _geometries(kinds, cache.records)
        silent = any(_is_silent(*pair) for pair in zip(geometry, cache.records, strict=True))
        if silent and not masks_have_window(model):
            raise RefusalError("its config names a window that its attention does not keep to")
        states = tuple(_state(layer, *pair) for layer, pair in enumerate(zip(kinds, cache.records, strict=True)))
        layers = tuple(_layer_specs(geometry, states, model.dtype.itemsize))
        if not layers:
            raise RefusalError("none of its layers caches anything")
    except RefusalError as reason:
        raise ModelRefusedError(f"{type(model).__name__} cannot be served: {reason}") from None
    return ModelSpecs(layers, geometry, states, argument, model.dtype, takes_positions, cache.asked_length)


def _check_class(model: PreTrainedModel) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise RefusalError("it is an encoder-decoder model; this release serves decoder-only models")
    if output_head(model) is None:
        raise RefusalError("it has no language-model head (an encoder, or a bare backbone)")


def output_head(model: PreTrainedModel) -> nn.Module | None:
    """The projection from hidden states to logits."""
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head


def _check_forward(model: PreTrainedModel, attends: bool) -> tuple[str, bool]:
    """Refuse by the forward pass's signature; returns the name under which it takes a cache, and if it takes positions.

    A wrong name would vanish in the model's ``**kwargs``, and every token would be computed without its past.
    """
    parameters, inner = _parameters(model), _parameters(model.base_model)
    takes_positions = "position_ids" in parameters
    # Without attention nothing depends on a position but through the state.
    for needed in ("position_ids", "logits_to_keep") if attends else ("logits_to_keep",):
        if needed not in parameters:
            raise RefusalError(f"its forward pass has no `{needed}` argument, which packed batches need")
    name = next((name for name in CACHE_ARGUMENTS if name in parameters), None)
    if name is None:
        raise RefusalError(
            f"its forward pass takes neither {' nor '.join(CACHE_ARGUMENTS)}: it keeps state in a way of its own"
        )
    # Steps that need no logits run the model without its head.
    for needed in (name, "position_ids") if takes_positions else (name,):
        if needed not in inner:
            raise RefusalError(f"its forward pass takes `{needed}`, but not that of the model inside of it")
    return name, takes_positions


def _parameters(model: nn.Module) -> Collection[str]:
    return inspect.signature(inspect.unwrap(type(model).forward)).parameters.keys()


# --------------------------------------------------------------------------------------------------------------- kinds


def _kinds(model: PreTrainedModel) -> list[_LayerKind]:
    config = model.config.get_text_config(decoder=True)
    try:
        types, settings = get_layer_types_and_kwargs(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RefusalError(f"its config does not tell the kinds of its layers ({error})") from error
    # Before 5.23 the layers at the end that borrow others' keys and values were left out.
    borrowers = max(0, len(getattr(config, "layer_types", None) or ()) - len(types))
    types, settings = [*types, *("dummy",) * borrowers], [*settings, *({},) * borrowers]
    return [_kind(layer, *item) for layer, item in enumerate(zip(types, settings, strict=True))]


def _kind(layer: int, name: str, settings: dict[str, Any]) -> _LayerKind:
    width = int(settings.get("sliding_window") or 0)
    # transformers calls a sliding or chunked layer without a width what it is: full attention.
    match name:
        case "full_attention" | "hybrid":
            kind: Kind | None = Full()
        case "sliding_attention" | "hybrid_sliding":
            kind = Window(width) if width else Full()
        case "chunked_attention":
            kind = Chunked(width) if width else Full()
        case "linear_attention" | "conv":
            kind = None
        case _ if name in _NOTHING:
            kind = None
        case _:
            kept = _UNSAVED.get(name, "what such a layer keeps, which is not known here,")
            raise RefusalError(f"layer {layer} is of kind {name!r}: {kept} would not be saved")
    return _LayerKind(name, kind, name in ("hybrid", "hybrid_sliding", "linear_attention", "conv"))


def _limits(kind: Kind) -> tuple[int, int]:
    """(window, chunk), 0 where there is none."""
    match kind:
        case Window(window):
            return window, 0
        case Chunked(chunk):
            return 0, chunk
        case _:
            return 0, 0


# ------------------------------------------------------------------------------------------------------ what was found


def _geometries(kinds: Sequence[_LayerKind], records: Sequence[Record]) -> tuple[LayerGeometry | None, ...]:
    found: list[LayerGeometry | None] = []
    for layer, (kind, seen) in enumerate(zip(kinds, records, strict=True)):
        if seen.key is not None:
            found.append(_own(layer, kind, seen))
        elif seen.attention_calls:
            found.append(_borrowed(layer, kind, seen, found))
        elif kind.kind is not None:
            raise RefusalError(f"layer {layer} puts no keys and values of its own into the cache")
        else:
            found.append(None)
    return tuple(found)


def _own(layer: int, kind: _LayerKind, seen: Record) -> LayerGeometry:
    """The geometry of a layer that updates the cache."""
    assert seen.key is not None and seen.value is not None
    if kind.kind is None:
        raise RefusalError(f"layer {layer} puts keys and values into the cache, though it is of kind {kind.name!r}")
    window, chunk = _limits(kind.kind)
    _check_call(layer, seen, window)
    _, heads, _, key_dim = seen.key
    if seen.latent and not (heads == seen.value[1] == 1 and key_dim == seen.rank):
        raise RefusalError(f"layer {layer} expands keys and values from something else than a latent and a rotary part")
    return LayerGeometry(layer, kind.kind, heads, key_dim, seen.value[3], window, layer, chunk, seen.latent)


def _borrowed(layer: int, kind: _LayerKind, seen: Record, earlier: Sequence[LayerGeometry | None]) -> LayerGeometry:
    """The geometry of a layer that attends over the very tensors that an earlier layer handed to the cache."""
    source = None if seen.attends is None or seen.latent else earlier[seen.attends]
    if source is None:
        raise RefusalError(f"layer {layer} attends over keys and values that no layer puts into the cache")
    if kind.kind not in (None, source.kind):
        raise RefusalError(f"layer {layer} borrows the keys of layer {source.layer}, which is of another kind")
    _check_call(layer, seen, source.window)
    return LayerGeometry(
        layer, source.kind, source.kv_heads, source.key_dim, source.value_dim, source.window, source.layer, source.chunk
    )


def _check_call(layer: int, seen: Record, window: int) -> None:
    if not seen.attention_calls:
        raise RefusalError("its attention does not go through transformers' attention interface")
    if seen.attention_calls != 1:
        raise RefusalError(
            f"layer {layer} calls the attention interface {seen.attention_calls} times per pass, not once"
        )
    if seen.window is not None and seen.window != window:
        raise RefusalError(f"layer {layer} attends over a window of {seen.window}, its config says {window}")


def _is_silent(shape: LayerGeometry | None, seen: Record) -> bool:
    """Whether a layer has a window that its attention call does not name."""
    return shape is not None and shape.window > 0 and seen.window is None


def _state(layer: int, kind: _LayerKind, seen: Record) -> StateGeometry | None:
    if not seen.conv and not seen.recurrent:
        if kind.state:
            raise RefusalError(
                f"layer {layer} is of kind {kind.name!r} but hands no state to the cache: it would not be saved"
            )
        return None
    buffers, offset = [], 0
    for use, kept in ((StateUse.CONV, seen.conv), (StateUse.RECURRENT, seen.recurrent)):
        for index in sorted(kept):
            buffer = _buffer(use, index, kept[index], offset)
            buffers.append(buffer)
            offset += _align(buffer.size)
    return StateGeometry(layer, tuple(buffers), offset)


def _buffer(use: StateUse, index: int, kept: Kept, offset: int) -> StateBuffer:
    dtype = kept.dtype if use is StateUse.CONV else torch.float32
    return StateBuffer(use, index, kept.shape, dtype, offset)


def _layer_specs(
    geometry: Sequence[LayerGeometry | None], states: Sequence[StateGeometry | None], item: int
) -> Iterator[LayerSpec]:
    for layer, (shape, state) in enumerate(zip(geometry, states, strict=True)):
        if shape is not None and shape.source == layer:
            yield LayerSpec(layer, shape.kind, tuple(part * item for part in shape.parts))
        if state is not None:
            yield LayerSpec(layer, State(), tuple(_align(buffer.size) for buffer in state.buffers))


def _align(size: int) -> int:
    return ceil_div(size, ALIGNMENT) * ALIGNMENT


# ------------------------------------------------------------------------------------------------------------- probing


def _record(model: PreTrainedModel, argument: str, takes_positions: bool, layers: int) -> ProbeCache:
    """One forward pass over a few tokens: on the meta device, else (data-dependent shapes) with the real weights."""
    AttentionInterface.register(PROBE, probe_attention)
    inputs = _inputs(takes_positions)
    try:
        # The settings module carries methods that its type does not show.
        with fx_config.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
            return _forward(_on_meta(model), argument, inputs, layers)
    except RefusalError:
        raise
    except Exception as error:
        # What the meta device lacks differs from model to model; the real weights decide.
        _log.debug("probing %s on the meta device failed: %s", type(model).__name__, error)
    before = model.config._attn_implementation
    try:
        return _forward(model, argument, inputs, layers)
    except RefusalError:
        raise
    except Exception as error:
        raise RefusalError(f"a probing forward pass failed: {error}") from error
    finally:
        model.set_attn_implementation(before)


def _inputs(takes_positions: bool) -> dict[str, torch.Tensor]:
    ids = torch.ones(1, _PROBE_TOKENS, dtype=torch.long)
    positions = {"position_ids": torch.arange(_PROBE_TOKENS)[None]} if takes_positions else {}
    return {"input_ids": ids, **positions}


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


def _forward(model: PreTrainedModel, argument: str, inputs: Mapping[str, torch.Tensor], layers: int) -> ProbeCache:
    model.set_attn_implementation(PROBE)
    cache = ProbeCache(layers)
    here: dict[str, Any] = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    token = RECORDING.set(cache)
    try:
        with torch.inference_mode():
            model(**here, use_cache=True, **{argument: cache})
    finally:
        RECORDING.reset(token)
    return cache
