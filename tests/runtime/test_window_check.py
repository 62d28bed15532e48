"""Models that name no window when they attend: some keep to the one in their config, some do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from ostinato.cache.kinds import Window
from ostinato.errors import ModelRefusedError
from ostinato.runtime.specs import probe_specs
from ostinato.runtime.window_check import masks_have_window

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def test_a_window_that_the_model_does_not_keep_to_is_refused() -> None:
    """However wide: no trial at load would be long enough to see it."""
    torch.manual_seed(0)
    model = tf.MoshiForCausalLM(tf.MoshiConfig(**SMALL, ffn_dim=64, sliding_window=3000, max_position_embeddings=4096))
    assert not masks_have_window(model)
    with pytest.raises(ModelRefusedError, match="window that its attention does not keep to"):
        probe_specs(model)


def test_a_window_in_the_masks_alone_is_served() -> None:
    torch.manual_seed(0)
    config = tf.Qwen2MoeConfig(
        **SMALL,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        use_sliding_window=True,
        sliding_window=3000,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = tf.Qwen2MoeForCausalLM(config)
    attention = model.config._attn_implementation
    assert masks_have_window(model)
    assert model.config.sliding_window == 3000
    assert model.config._attn_implementation == attention
    shape = probe_specs(model).geometry[0]
    assert shape is not None
    assert shape.kind == Window(3000)
