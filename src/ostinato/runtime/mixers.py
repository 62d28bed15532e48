"""Recurrent mixers over a packed ragged batch, with their state in pages.

Owns: which modules of a model are recurrent mixers, the functions that stand in for transformers' convolutions and
scans, and the refusal of mixers that are made of anything else.  Does not own: the scans (``scans``), the pages
(``arena``), which layer's turn it is (``paged_cache``), products inside a mixer (``weight_products``).

transformers writes each mixer as projections around a few module-level functions, one for the convolution and one for
the scan.  A mixer's ``forward`` is copied with globals of its own in which those names are ours; nothing is split by
sequence, and there is no code for any one model::

    hidden [1, T, H] -> in_proj -> causal_conv1d_fn -> torch_chunk_gated_delta_rule -> norm -> out_proj
                                   `- ours: conv state  `- ours: recurrent state

Rows behind the step's tokens are padding: nothing is computed for them, and they come back as zeros.

Rebinding runs once, at load; the stand-ins run in every forward pass, on the worker's thread.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MappingProxyType, MethodType
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ostinato.errors import ModelRefusedError
from ostinato.runtime.context import ACTIVE, ForwardContext
from ostinato.runtime.elementwise import over_aligned_line
from ostinato.runtime.geometry import StateUse
from ostinato.runtime.paged_cache import TURN, Turn
from ostinato.runtime.scans.base import Convolution, GatedDelta, SelectiveScan, StateIndex, StateSpace
from ostinato.runtime.weight_products import linearize_products

_CACHE_CALLS: Final = frozenset(
    {"update_conv_state", "update_recurrent_state", "get_conv_state", "get_recurrent_state"}
)
_FUSED: Final = (None, "silu", "swish")
"""Activations that a convolution applies itself."""


def rebind_mixers(model: nn.Module) -> tuple[str, ...]:
    """Make every recurrent mixer of ``model`` run over pages; their names.

    To be called once, after the model's own forward pass was last needed.  Raises :class:`ModelRefusedError` for a
    mixer that keeps state through functions that are not known here.
    """
    rebound = []
    for name, module in model.named_modules():
        plain = _stateful_forward(model, name, module)
        if plain is None:
            continue
        reason = _why_not(plain)
        if reason is not None:
            raise _refusal(model, name, module, reason)
        linearize_products(module, plain)
        module.forward = MethodType(_with_globals(plain, _STAND_INS), module)
        rebound.append(name)
    return tuple(rebound)


def _refusal(model: nn.Module, name: str, module: nn.Module, reason: str) -> ModelRefusedError:
    return ModelRefusedError(f"{type(model).__name__} cannot be served: {name} ({type(module).__name__}) {reason}")


def _stateful_forward(model: nn.Module, name: str, module: nn.Module) -> FunctionType | None:
    """The undecorated forward of a module that keeps recurrent state; None for a module that keeps none."""
    for attribute, function in _functions(type(module)):
        if not _CACHE_CALLS & _names(function.__code__):
            continue
        if attribute != "forward":
            raise _refusal(model, name, module, f"keeps recurrent state in `{attribute}`, which is not understood here")
        return function
    return None


def _functions(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """The functions of a module's class, torch's own left out, with decorators taken off."""
    seen = set()
    for base in kind.__mro__:
        if base is nn.Module:
            return
        for attribute, value in vars(base).items():
            plain = inspect.unwrap(value) if callable(value) and not inspect.isclass(value) else None
            if isinstance(plain, FunctionType) and attribute not in seen:
                seen.add(attribute)
                yield attribute, plain


def _names(code: CodeType) -> set[str]:
    """Every global and attribute that ``code`` names, functions inside it included."""
    inner = (item for item in code.co_consts if isinstance(item, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _why_not(plain: FunctionType) -> str | None:
    """What keeps ``plain`` from being run over pages, to be read after the module's name; None: nothing."""
    called = {
        name: value
        for name in sorted(_names(plain.__code__))
        if inspect.isroutine(value := plain.__globals__.get(name)) and not inspect.isbuiltin(value)
    }
    strange = [name for name in called if name not in _STAND_INS and name not in _HARMLESS]
    if strange:
        return f"keeps recurrent state and calls {', '.join(strange)}, which is not known here"
    if "update_conv_state" not in plain.__code__.co_names or "causal_conv1d_fn" not in called:
        return "keeps recurrent state without the causal convolution that is known here"
    for name in called.keys() & _ARGUMENTS.keys():
        # A new argument may change the result, and a renamed one would vanish in our **kwargs.
        if (arguments := _arguments(called[name])) != _ARGUMENTS[name]:
            odd = sorted(set(arguments) ^ set(_ARGUMENTS[name])) or ["their order"]
            return f"calls a {name} that differs from the known one in its arguments: {', '.join(odd)}"
    return None


def _arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(item.name for item in parameters if item.kind is not inspect.Parameter.VAR_KEYWORD)


def _with_globals(plain: FunctionType, replaced: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """A copy of ``plain`` that sees ``replaced`` in place of its module's functions of these names."""
    copy = FunctionType(
        plain.__code__, {**plain.__globals__, **replaced}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    return copy


# ------------------------------------------------------------------------------------------------- rows in and out


def _turn() -> Turn:
    turn = TURN.get()
    if turn is None:
        raise ModelRefusedError(
            "this model cannot be served: a mixer scans without having asked the cache for its state"
        )
    return turn


def _place(step: ForwardContext, turn: Turn, use: StateUse) -> tuple[Tensor, StateIndex]:
    """The pages of the turn's state, ``[pages, *shape]``, and which of them each sequence reads and writes."""
    layer = step.arena.states[turn.layer]
    index = step.states[layer.group]
    assert index is not None, f"layer {turn.layer} keeps a state, its group {layer.group} has none"
    return layer.buffers[use, turn.state], index


def _with_padding(result: Tensor, rows: int) -> Tensor:
    """``result`` [tokens, ...] with rows of zeros behind it, up to ``rows``."""
    if result.shape[0] == rows:
        return result
    padded = result.new_zeros(rows, *result.shape[1:])
    padded[: result.shape[0]] = result
    return padded


def _row_floats(tensor: Tensor, tokens: int) -> Tensor:
    """[1, rows, ...] -> [tokens, ...] in float32, contiguous."""
    return tensor[0, :tokens].to(torch.float32).contiguous()


def _columns(tensor: Tensor, tokens: int) -> Tensor:
    """[1, channels, rows] -> [tokens, channels]"""
    return tensor[0].transpose(0, 1)[:tokens]


def _floats(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.float32).contiguous()


# ---------------------------------------------------------------------------------------------------- the stand-ins
# Each takes what transformers' function was given, by the names of ``_ARGUMENTS``, and like it ignores others.

Given = Mapping[str, Any]


def _standing_in(name: str, function: Callable[[Given], Any]) -> Callable[..., Any]:
    """``function`` under the signature of transformers' function ``name``."""
    arguments = _ARGUMENTS[name]

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return function({**dict(zip(arguments, args, strict=False)), **kwargs})

    return stand_in


def _convolve(given: Given) -> Tensor:
    """``hidden_states`` [1, channels, rows]; the same out (a view of [rows, channels])."""
    hidden, activation = given["hidden_states"], given.get("activation")
    step, turn = ACTIVE.get(), _turn()
    assert not turn.convolved, f"layer {turn.layer} convolves twice what it told the cache once"
    turn.convolved = True
    states, index = _place(step, turn, StateUse.CONV)
    fused = activation if activation in _FUSED else None
    call = Convolution(_columns(hidden, step.tokens), given["weight"], given.get("bias"), fused)
    result = step.scans.convolve(call, states, index)
    if activation is not None and fused is None:
        result = over_aligned_line(ACT2FN[activation], result)
    return _with_padding(result, hidden.shape[2]).transpose(0, 1)[None]


def _gated_delta(given: Given) -> tuple[Tensor, Tensor]:
    """Gated delta rule and KDA: [1, rows, heads, D] in, and out."""
    step, query = ACTIVE.get(), given["query"]
    count = step.tokens
    states, index = _place(step, _turn(), StateUse.RECURRENT)
    call = GatedDelta(
        query=query[0, :count],
        key=given["key"][0, :count],
        value=given["value"][0, :count],
        decay=_row_floats(given["g"], count),
        beta=_row_floats(given["beta"], count),
        normalize=given.get("use_qk_l2norm_in_kernel", False),
    )
    result = step.scans.gated_delta(call, states, index)
    return _with_padding(result, query.shape[1])[None].to(query.dtype), _no_state(query)


def _state_space(given: Given) -> Any:
    """Mamba-2: ``hidden_states`` [1, rows, heads, P]; the same out, in float32."""
    step, hidden = ACTIVE.get(), given["hidden_states"]
    count = step.tokens
    states, index = _place(step, _turn(), StateUse.RECURRENT)
    least, most = given.get("dt_limit", (0.0, math.inf))
    call = StateSpace(
        inputs=hidden[0, :count],
        dt=_row_floats(given["dt"], count),
        a=given["A"].to(torch.float32).contiguous(),
        b=given["B"][0, :count],
        c=given["C"][0, :count],
        d=_floats(given.get("D")),
        dt_bias=_floats(given.get("dt_bias")),
        softplus=given.get("dt_softplus", False),
        dt_limit=(float(least), float(most)),
    )
    result = _with_padding(step.scans.state_space(call, states, index), hidden.shape[1])[None]
    return (result, _no_state(hidden)) if given.get("return_final_states") else result


def _selective(given: Given) -> Any:
    """Mamba-1: [1, channels, rows] in, and out (a view of [rows, channels])."""
    step, turn, hidden = ACTIVE.get(), _turn(), given["hidden_states"]
    count, gate = step.tokens, given.get("z")
    states, index = _place(step, turn, StateUse.RECURRENT)
    if states.ndim == given["A"].ndim + 2:
        # A mixer of several heads scans one after the other, in their order.
        states = states[:, turn.scanned]
        turn.scanned += 1
    call = SelectiveScan(
        inputs=_columns(hidden, count),
        dt=_columns(given["dt"], count),
        a=given["A"].to(torch.float32).contiguous(),
        b=_columns(given["B"], count),
        c=_columns(given["C"], count),
        d=_floats(given.get("D")),
        gate=None if gate is None else _columns(gate, count),
        dt_bias=_floats(given.get("delta_bias")),
        softplus=given.get("delta_softplus", False),
    )
    columns = _with_padding(step.scans.selective(call, states, index), hidden.shape[2]).transpose(0, 1)[None]
    return (columns, _no_state(hidden)) if given.get("return_last_state") else columns


def _no_state(like: Tensor) -> Tensor:
    """Stands for the final state: mixers cast it, stack it and hand it to the cache, which drops it."""
    return like.new_empty(0)


def _unreached(*_: Any, **__: Any) -> NoReturn:
    raise ModelRefusedError(
        "this model cannot be served: a mixer takes its path for single tokens or for training, "
        "though the cache has told it of no earlier state"
    )


_DELTA: Final = (
    *("query", "key", "value", "g", "beta"),
    *("chunk_size", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"),
)
_ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "causal_conv1d_fn": ("hidden_states", "weight", "bias", "activation"),
        "torch_chunk_gated_delta_rule": _DELTA,
        "chunk_kimi_delta_attention": _DELTA,
        "mamba2_chunk_scan": (
            *("hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias"),
            *("initial_states", "dt_softplus", "dt_limit", "return_final_states"),
        ),
        "mamba_selective_scan": (
            *("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus"),
            *("return_last_state", "use_mambapy", "use_associative_scan"),
        ),
    }
)
"""What transformers' functions take (5.20 to 5.24), in this order, ``**kwargs`` apart, which they ignore.

An initial state is always None, because the cache tells of none; a sequential scan needs no size of chunks.
"""
_DECODING: Final = (
    *("causal_conv1d_update", "torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention"),
    *("mamba2_selective_state_update", "mamba_selective_state_update"),
    *("mamba2_split_conv1d_scan_combined", "mamba_inner_fn"),
)
_SCANS: Final[Mapping[str, Callable[[Given], Any]]] = MappingProxyType(
    {
        "causal_conv1d_fn": _convolve,
        "torch_chunk_gated_delta_rule": _gated_delta,
        "chunk_kimi_delta_attention": _gated_delta,
        "mamba2_chunk_scan": _state_space,
        "mamba_selective_scan": _selective,
    }
)
_STAND_INS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {name: _standing_in(name, scan) for name, scan in _SCANS.items()} | dict.fromkeys(_DECODING, _unreached)
)
REPLACED: Final = frozenset(_STAND_INS)
"""Names of the functions that a rebound mixer no longer calls."""
_HARMLESS: Final = frozenset({"apply_mask_to_padding_states"})
"""Functions that a mixer may call besides: a packed batch comes without a mask."""
