"""What another version of transformers may call otherwise is noticed at load, not in the answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward
from transformers.models.llama.modeling_llama import LlamaModel

from families.configs import build
from ostinato.errors import ModelRefusedError
from ostinato.runtime.experts import install_experts
from ostinato.runtime.load import build_runtime
from ostinato.runtime.paged_cache import UPDATED, PagedCache
from ostinato.runtime.probe_cache import LAYER_KEY, attending_layer
from ostinato.runtime.specs import probe_specs


class Shared(nn.Module):
    """An attention module that serves several layers: it has no valid index of its own."""

    layer_idx = -1


class Own(nn.Module):
    layer_idx = 2


@pytest.mark.parametrize(
    ("module", "call", "updated", "layer"),
    [
        (Own(), {LAYER_KEY: 5}, 4, 5),
        (Own(), {}, 4, 2),
        (Shared(), {}, 4, 4),
        (nn.Module(), {}, 0, 0),
        (Shared(), {LAYER_KEY: 0}, 4, 0),
        (Shared(), {}, None, None),
    ],
)
def test_the_layer_of_an_attention_call(
    module: nn.Module, call: dict[str, Any], updated: int | None, layer: int | None
) -> None:
    assert attending_layer(module, call, updated) == layer


def test_a_cache_that_is_given_no_keywords_remembers_the_layer() -> None:
    rows = torch.zeros(1)
    PagedCache(9).update(rows, rows, 7)
    assert UPDATED.get() == 7
    UPDATED.set(None)


@pytest.mark.parametrize("name", ["zamba", "zamba2"])
def test_shared_attention_is_served_without_the_keywords(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers calls the cache before 5.24."""
    from ostinato.runtime.probe_cache import ProbeCache

    for kind in (PagedCache, ProbeCache):
        update = kind.update

        def older(self: Any, key: Any, value: Any, layer_idx: int, *_: Any, update: Any = update, **__: Any) -> Any:
            return update(self, key, value, layer_idx)

        monkeypatch.setattr(kind, "update", older)
    assert build_runtime(build(name), max_model_len=512).promise.bitwise


def renamed_update(self: Any, key_states: Any, value_states: Any, layer_index: int, *_: Any, **__: Any) -> Any:
    return key_states, value_states


def renamed_state(self: Any, conv_states: Any, layer_idx: int, state_index: int = 0, **_: Any) -> Any:
    return conv_states


@pytest.mark.parametrize(
    ("method", "other", "reason"),
    [
        ("update", renamed_update, "arguments of `update`: layer_idx, layer_index"),
        ("update_conv_state", renamed_state, "arguments of `update_conv_state`: state_idx, state_index"),
    ],
)
def test_a_renamed_argument_of_the_cache(method: str, other: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, method, other)
    with pytest.raises(ModelRefusedError, match=reason):
        probe_specs(build("llama"))


@pytest.mark.parametrize("old", ["softcap", "scaling", "sliding_window"])
def test_a_renamed_argument_of_attention(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ostinato.runtime import specs

    probe = specs.probe_attention

    def renamed(*args: Any, **kwargs: Any) -> Any:
        return probe(*args, **{("new" if name == old else name): item for name, item in kwargs.items()})

    monkeypatch.setattr(specs, "probe_attention", renamed)
    with pytest.raises(ModelRefusedError, match="passes new to attention, which is not understood"):
        probe_specs(build("gemma2"))


def test_a_renamed_argument_of_the_inner_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, input_ids: Any = None, past: Any = None, position_ids: Any = None, **_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(LlamaModel, "forward", forward)
    with pytest.raises(ModelRefusedError, match="but not that of the model inside"):
        probe_specs(build("llama"))


def test_experts_with_other_arguments_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any, hidden_states: Any, top_k_weights: Any, top_k_index: Any) -> Any:
        return batched_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)

    assert "own kernel" in str(install_experts(build("qwen3_moe")))
    monkeypatch.setitem(ExpertsInterface._global_mapping, "batched_mm", other)
    assert install_experts(build("qwen3_moe")) == "transformers' (its interface is not the known one)"
