"""Tiny models, prompts and comparisons for the end-to-end tests.

The oracle everywhere is the same request *alone and cold*: an engine of its own with the cache off, so that nothing it
computes can have come from anywhere else.  Two results are equal when their token ids and the digest of the logits of
every generated position are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.runtime.load import Runtime, build_runtime
from ostinato.sampling_params import SamplingParams

VOCABULARY = 512
WINDOW = 32
UNIT = 16
LAYER_TYPES = ["sliding_attention"] * 5 + ["full_attention"]


def tiny_gemma3(dtype: torch.dtype, seed: int = 7) -> Runtime:
    """A random Gemma 3: five layers with a window of 32 tokens to one with full attention.

    Weights are drawn wide, so that every cached block has a say in the logits.
    """
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=len(LAYER_TYPES),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=WINDOW,
        layer_types=LAYER_TYPES,
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = Gemma3ForCausalLM(config).to(dtype)
    return build_runtime(model, name=f"tiny-{dtype}".replace("torch.", ""), weights=bytes([seed]) * 32)


def tokens(count: int, seed: int = 0) -> list[int]:
    """``count`` token ids above the special ones; a longer list of the same seed begins with a shorter one."""
    source = random.Random(seed)
    return [source.randrange(4, VOCABULARY) for _ in range(count)]


def greedy(max_tokens: int = 4, **options: Any) -> SamplingParams:
    """Greedy, of exactly ``max_tokens`` tokens, with a digest of all logits."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logits_digest=True, **options)


def make_llm(runtime: Runtime, pages: int = 300, **options: Any) -> LLM:
    """An engine that audits itself after each step and whose pool begins as NaN."""
    return LLM(runtime, num_gpu_blocks_override=pages, check_invariants=True, **options)


class Oracle:
    """Cold results, computed once each: a request alone, cache off."""

    def __init__(self, runtime: Runtime, pages: int = 200) -> None:
        self._llm = make_llm(runtime, pages, enable_prefix_caching=False)
        self._known: dict[tuple[tuple[int, ...], int], RequestOutput] = {}

    def __call__(self, prompt: Sequence[int], max_tokens: int = 4) -> RequestOutput:
        key = (tuple(prompt), max_tokens)
        if key not in self._known:
            self._known[key] = self._llm.generate(list(prompt), greedy(max_tokens))[0]
            assert self._known[key].cached_tokens == 0
        return self._known[key]


def same(output: RequestOutput, cold: RequestOutput) -> bool:
    """Equal tokens and, to the last bit, equal logits."""
    assert cold.logits_sha256, "the oracle has no digest"
    alike = output.outputs[0].token_ids == cold.outputs[0].token_ids
    return alike and output.logits_sha256 == cold.logits_sha256


def settle(llm: LLM) -> None:
    """Let stores that are still under way finish."""
    llm.built.engine.drain()


def assert_at_rest(llm: LLM) -> None:
    """Nothing runs: no lease is open, no job, every slot is free or idle, and the ledger adds up."""
    from ostinato.cache.pool import SlotState

    hierarchy = llm.built.hierarchy
    hierarchy.audit()
    assert not hierarchy.requests
    assert not len(hierarchy.core.book)
    for tier in (hierarchy.core.device, *hierarchy.core.lower.values()):
        assert not tier.pool.leases, [lease.owner for lease in tier.pool.leases]
        states = {tier.pool.state(slot) for slot in range(tier.pool.capacity)}
        assert states <= {SlotState.FREE, SlotState.IDLE}, states
