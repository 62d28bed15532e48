"""Recurrent mixers over packed batches: rebinding, the stand-ins, and what is refused."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from families.configs import FAMILIES, build
from ostinato.errors import ModelRefusedError
from ostinato.runtime.context import ACTIVE
from ostinato.runtime.geometry import StateUse
from ostinato.runtime.linear import RowRule, make_invariant
from ostinato.runtime.mixers import _STAND_INS, REPLACED, rebind_mixers
from ostinato.runtime.paged_cache import PagedCache
from ostinato.runtime.scans import ScanBackend, StateIndex, TorchScans, select_scans
from ostinato.runtime.specs import CACHE_ARGUMENTS
from ostinato.runtime.unaligned import align, find_unaligned

HYBRIDS = sorted(name for name, family in FAMILIES.items() if "state" in family.kinds)
PAGES, PADDING, TOLERANCE = 11, 3, 2e-5


class States:
    """NaN-filled state pages of one mixer, shaped as the mixer's own forward pass leaves them behind."""

    def __init__(self, model: nn.Module, mixer: nn.Module, name: str, hidden: Tensor) -> None:
        recorder = _Recorder()
        _call(model, mixer, hidden, recorder)
        self.layer = recorder.layer
        self.final = recorder.kept
        self.buffers = {
            key: torch.full((PAGES, *state.shape[1:]), float("nan"), dtype=state.dtype)
            for key, state in recorder.kept.items()
        }

    def context(self, index: StateIndex, tokens: int, scans: ScanBackend) -> Any:
        places = {self.layer: SimpleNamespace(group=1, buffers=self.buffers)}
        return SimpleNamespace(
            tokens=tokens, states=(None, index), arena=SimpleNamespace(states=places), scans=scans, groups=()
        )


class _Recorder(PagedCache):
    """Keeps the states that a mixer hands over, as it does on a prompt that starts from nothing."""

    def __init__(self) -> None:
        super().__init__(64)
        self.layer = -1
        self.kept: dict[tuple[StateUse, int], Tensor] = {}

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.layer, keep = layer_idx, kwargs["conv_kernel_size"] - 1
        self.kept[StateUse.CONV, state_idx] = nn.functional.pad(conv_states, (keep, 0))[..., -keep:].clone()
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        self.kept[StateUse.RECURRENT, 0] = recurrent_states.float()
        return recurrent_states


def _call(model: nn.Module, mixer: nn.Module, hidden: Tensor, cache: Any) -> Tensor:
    """By the name that the version of transformers has for the cache."""
    parameters = inspect.signature(inspect.unwrap(type(mixer).forward)).parameters
    (name,) = parameters.keys() & set(CACHE_ARGUMENTS)
    with torch.inference_mode():
        result: Tensor = mixer(hidden, **{name: cache})
    return result


def _first_mixer(model: nn.Module) -> tuple[str, nn.Module]:
    for name, module in model.named_modules():
        if "update_conv_state" in _names(module):
            return name, module
    raise AssertionError("no mixer")


def _names(module: nn.Module) -> Sequence[str]:
    forward = type(module).forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward.__code__.co_names if hasattr(forward, "__code__") else ()


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@contextmanager
def _active(context: Any) -> Iterator[None]:
    token = ACTIVE.set(context)
    try:
        yield
    finally:
        ACTIVE.reset(token)


def _hidden(model: Any, tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, tokens, model.config.hidden_size, generator=generator).to(model.dtype)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_mixer_over_packed_sequences_in_pages_computes_what_transformers_does(family: str) -> None:
    model = build(family)
    name, mixer = _first_mixer(model)
    long, short = _hidden(model, 37, 1), _hidden(model, 9, 2)
    expected = [_call(model, mixer, hidden, None) for hidden in (long, short)]
    states = States(model, mixer, name, long)
    assert name in rebind_mixers(model)

    def step(hidden: Sequence[Tensor], index: StateIndex) -> Tensor:
        rows = torch.cat([*hidden, torch.full((1, PADDING, long.shape[2]), 7.0)], dim=1)
        with _active(states.context(index, rows.shape[1] - PADDING, TorchScans())):
            return _call(model, mixer, rows, PagedCache(64))

    # A prompt of 20 tokens with a checkpoint after 16, beside the whole of a short one.
    first = step(
        (long[:, :20], short),
        StateIndex(_int32(0, 20, 29), _int32(-1, -1), _int32(0, 2, 3), _int32(16, 20, 29), _int32(4, 9, 2)),
    )
    # Its next token in its page, beside a sequence that resumes at the checkpoint, which has to stay as it is.
    kept = {key: buffer[4].clone() for key, buffer in states.buffers.items()}
    second = step(
        (long[:, 20:21], long[:, 16:]),
        StateIndex(_int32(0, 1, 22), _int32(9, 4), _int32(0, 1, 2), _int32(1, 22), _int32(9, 7)),
    )

    scale = expected[0].abs().max()
    for ours, theirs in (
        (first[:, :20], expected[0][:, :20]),
        (first[:, 20:29], expected[1]),
        (second[:, :1], expected[0][:, 20:21]),
        (second[:, 1:22], expected[0][:, 16:]),
    ):
        assert (ours - theirs).abs().max() <= TOLERANCE * scale
    for key, buffer in states.buffers.items():
        assert torch.equal(buffer[4], kept[key])
        torch.testing.assert_close(buffer[7], states.final[key][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_mixer_gives_equal_bits_in_any_chunks_beside_any_neighbours(family: str, dtype: torch.dtype) -> None:
    model = build(family, dtype)
    name, mixer = _first_mixer(model)
    mine, other = _hidden(model, 37, 1), _hidden(model, 60, 2)
    states = States(model, mixer, name, mine)
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        found = find_unaligned(model, lambda: model(input_ids=ids, use_cache=False), REPLACED)
    rebind_mixers(model)
    rule = make_invariant(model, None).body | RowRule(16, 16)
    align(model, found)
    scans, _ = select_scans()

    def step(hidden: Sequence[Tensor], read: Sequence[int], pages: Sequence[int]) -> Tensor:
        ends = list(itertools.accumulate(part.shape[1] for part in hidden))
        padding = torch.ones(1, rule.pad(ends[-1]) - ends[-1], mine.shape[2], dtype=dtype)
        counts = _int32(*range(len(ends) + 1))
        index = StateIndex(_int32(0, *ends), _int32(*read), counts, _int32(*ends), _int32(*pages))
        with _active(states.context(index, ends[-1], scans)):
            return _call(model, mixer, torch.cat([*hidden, padding], dim=1), PagedCache(64))

    whole = step((mine,), (-1,), (0,))[:, :37]
    begin = 0
    for end, before, behind in ((5, 3, 1), (6, 1, 2), (7, 9, 1), (20, 1, 30), (21, 50, 2), (37, 2, 60)):
        chunk = (other[:, :before], mine[:, begin:end], other[:, :behind])
        result = step(chunk, (-1, 1 if begin else -1, -1), (2, 1, 3))
        assert torch.equal(result[:, before : before + end - begin], whole[:, begin:end]), end
        begin = end
    assert all(torch.equal(buffer[0], buffer[1]) for buffer in states.buffers.values())


@pytest.mark.parametrize("family", HYBRIDS)
def test_every_mixer_of_a_family_is_found(family: str) -> None:
    model = build(family)
    wanted = tuple(name for name, module in model.named_modules() if "update_conv_state" in _names(module))
    assert wanted
    assert rebind_mixers(model) == wanted


def test_a_model_without_mixers_has_none_rebound() -> None:
    assert rebind_mixers(build("llama")) == ()


def test_a_mixer_that_did_not_ask_the_cache_is_refused() -> None:
    model = build("mamba2")
    _, mixer = _first_mixer(model)
    rebind_mixers(model)
    states = SimpleNamespace(tokens=4, states=(), arena=None, scans=TorchScans(), groups=())
    with _active(states), pytest.raises(ModelRefusedError, match="without having asked the cache"):
        _call(model, mixer, _hidden(model, 4, 1), None)


def causal_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **_: Any
) -> Tensor:
    return hidden_states * weight if bias is None else hidden_states


def strange_scan(hidden_states: Tensor) -> Tensor:
    return hidden_states


class _Mixer(nn.Module):
    layer_idx = 0

    def forward(self, hidden_states: Tensor, cache: Any) -> Tensor:
        return causal_conv1d_fn(cache.update_conv_state(hidden_states, self.layer_idx), hidden_states)


class _StrangeMixer(nn.Module):
    layer_idx = 0

    def forward(self, hidden_states: Tensor, cache: Any) -> Tensor:
        hidden_states = causal_conv1d_fn(cache.update_conv_state(hidden_states, self.layer_idx), hidden_states)
        return strange_scan(hidden_states)


class _HelpedMixer(nn.Module):
    layer_idx = 0

    def forward(self, hidden_states: Tensor, cache: Any) -> Tensor:
        return self.convolve(hidden_states, cache)

    def convolve(self, hidden_states: Tensor, cache: Any) -> Tensor:
        return causal_conv1d_fn(cache.update_conv_state(hidden_states, self.layer_idx), hidden_states)


class _MixerWithoutConvolution(nn.Module):
    layer_idx = 0

    def forward(self, hidden_states: Tensor, cache: Any) -> Tensor:
        history: Tensor = cache.update_conv_state(hidden_states, self.layer_idx)
        return history


@pytest.mark.parametrize(
    ("mixer", "reason"),
    [
        (_StrangeMixer, "mixer .*calls strange_scan, which is not known"),
        (_HelpedMixer, "keeps recurrent state in `convolve`"),
        (_MixerWithoutConvolution, "without the causal convolution"),
    ],
)
def test_mixers_made_of_other_functions_are_refused(mixer: type[nn.Module], reason: str) -> None:
    with pytest.raises(ModelRefusedError, match=reason):
        rebind_mixers(nn.ModuleDict({"mixer": mixer()}))


def test_a_function_with_other_arguments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rebind_mixers(nn.ModuleDict({"mixer": _Mixer()})) == ("mixer",)

    def renamed(hidden_states: Tensor, weight: Tensor, bias: Any = None, act: Any = None, **_: Any) -> Tensor:
        return causal_conv1d_fn(hidden_states, weight, bias, act)

    monkeypatch.setitem(globals(), "causal_conv1d_fn", renamed)
    with pytest.raises(ModelRefusedError, match=r"differs .* in its arguments: act, activation"):
        rebind_mixers(nn.ModuleDict({"mixer": _Mixer()}))


def test_the_path_for_single_tokens_raises() -> None:
    with pytest.raises(ModelRefusedError, match="single tokens"):
        _STAND_INS["mamba2_selective_state_update"](torch.ones(1))


def test_a_cache_gives_row_offsets_to_a_layer_that_asks() -> None:
    rows = torch.arange(8)
    group = SimpleNamespace(query_lens=[3, 4], context_lens=[16, 40])
    cache = PagedCache(4, row_offsets=True)
    with _active(SimpleNamespace(tokens=7, groups=(group,))):
        positions = rows + cache.get_seq_length(2)
    assert positions.tolist() == [16, 17, 18, 40, 41, 42, 43, 7]
    assert cache.get_seq_length() == 0
    assert PagedCache(4).get_seq_length(2) == 0
