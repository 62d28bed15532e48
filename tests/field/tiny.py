"""A tiny random model with Gemma 3's pattern of layers, for tests in which every bit of the logits counts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import transformers as tf

from field.rig import Rig
from field.scripted import Clock, ScriptedTier, poison_on_take
from ostinato.config import EngineConfig
from ostinato.engine.build import BuiltEngine, build_engine
from ostinato.engine.outputs import RequestOutput
from ostinato.runtime.load import Runtime, build_runtime

WINDOW = 32
VOCABULARY = 512


@cache
def runtime() -> Runtime:
    """Five sliding layers (window 32) and a full one, fp32; random, but the same in every process."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    config = tf.Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=WINDOW,
        max_position_embeddings=1024,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    model: Any = tf.Gemma3ForCausalLM(config)
    return build_runtime(model.to(torch.float32), name="tiny")


def tiny_engine(tiers: Sequence[ScriptedTier] = (), pages: int = 300, step_tokens: int = 64, **options: Any) -> Rig:
    """Audited every step; recycled pages are poisoned with NaN."""
    return engine_over(runtime(), tiers, pages, step_tokens, **options)


def engine_over(
    model: Runtime, tiers: Sequence[ScriptedTier] = (), pages: int = 300, step_tokens: int = 64, **options: Any
) -> Rig:
    clock = Clock()
    config = EngineConfig(
        model="tiny",
        dtype="float32",
        num_gpu_blocks_override=pages,
        max_num_batched_tokens=step_tokens,
        check_invariants=True,
        **options,
    )
    built: BuiltEngine = build_engine(model, config, list(tiers) if tiers or not config.kv else None, clock)
    poison_on_take(built.hierarchy.core.device.pool, built.worker.arena.poison_page)
    return Rig(built.engine, built.hierarchy, clock)


class Oracle:
    """The same request alone, cold, with the cache off."""

    def __init__(self) -> None:
        self._rig = tiny_engine(enable_prefix_caching=False)
        self._known: dict[tuple[tuple[int, ...], int], RequestOutput] = {}

    def __call__(self, tokens: Sequence[int], count: int = 1) -> RequestOutput:
        key = (tuple(tokens), count)
        if key not in self._known:
            self._known[key] = self._rig.serve(tokens, count)
        return self._known[key]

    def check(self, output: RequestOutput) -> None:
        """Equal tokens, and every generated position's logits equal to the last bit."""
        cold = self(output.prompt_token_ids, len(output.outputs[0].token_ids))
        assert output.outputs[0].token_ids == cold.outputs[0].token_ids
        assert output.logits_sha256 == cold.logits_sha256, f"logits differ after a hit of {output.cached_tokens}"


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
