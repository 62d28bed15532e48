"""Reports of wrong text, on tiny models of the families that they are about: what is saved, restored and shared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

import tiny_models
from e2e.support import Oracle, assert_at_rest, greedy, make_llm, same, settle
from families.configs import FAMILIES, VOCABULARY, build
from field.scripted import kept, poison_on_take
from field.tiny import engine_over
from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import keeps_checkpoints
from ostinato.cache.layout import GroupSpec
from ostinato.engine.build import BuiltEngine
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.errors import ModelRefusedError
from ostinato.ids import DEVICE
from ostinato.runtime.arena import Arena
from ostinato.runtime.load import Runtime, build_runtime

QUICK: Final = ("gemma3n", "gemma4", "deepseek_v3", "qwen3_next", "bamba", "nemotron_h")
"""Windows and shared keys, a latent, a gated delta rule, and a Mamba-2, with and without experts."""
STATEFUL: Final = tuple(name for name, family in FAMILIES.items() if "state" in family.kinds)
LENGTH: Final = 113
"""A hit of this prompt leaves one token, so that all that was cached has a say in its logits."""
CACHED: Final = 112


@dataclass(frozen=True)
class Tiny:
    """A family's tiny model, ready to run, and what it answers alone and cold."""

    name: str
    runtime: Runtime
    cold: Oracle


Make = Callable[[str], Tiny]


@pytest.fixture(scope="module")
def tiny() -> Iterator[Make]:
    """Builds each family's model once."""
    before, made = torch.get_num_threads(), dict[str, Tiny]()
    torch.set_num_threads(1)

    def make(name: str) -> Tiny:
        if name not in made:
            runtime = build_runtime(build(name), name=name, weights=bytes([5]) * 32, max_model_len=512)
            made[name] = Tiny(name, runtime, Oracle(runtime))
        return made[name]

    yield make
    torch.set_num_threads(before)


def families(*names: str) -> Any:
    """A test for each family; those that are not quick run with ``-m families``."""
    marks = {name: () if name in QUICK else pytest.mark.families for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in names])


def tokens(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, VOCABULARY) for _ in range(count)]


def ask(llm: LLM, prompt: Sequence[int], count: int = 4) -> RequestOutput:
    output = llm.generate(list(prompt), greedy(count))[0]
    settle(llm)
    return output


# ------------------------------------------------------------------------------------------------- every buffer travels


def buffers(model: Runtime, arena: Arena, spec: GroupSpec, layer: int) -> dict[str, torch.Tensor]:
    """Each buffer of a layer as ``[blocks, ...]``."""
    if keeps_checkpoints(spec.kind):
        return {f"{use.value} {index}": view for (use, index), view in arena.states[layer].buffers.items()}
    pages, shape = arena.layers[layer].pages, model.prepared.specs.geometry[layer]
    assert shape is not None
    return {"latent": pages.k} if shape.latent else {"keys": pages.k, "values": pages.v}


def contents(model: Runtime, built: BuiltEngine) -> dict[tuple[BlockKey, int, str], bytes]:
    """The bytes of each buffer of each layer in each cached block of the device."""
    found, arena = {}, built.worker.arena
    for entry in built.hierarchy.core.directory:
        if (place := entry.places.get(DEVICE)) is None:
            continue
        spec = model.layout.groups[entry.key.group]
        block, size = place.slot * spec.page_units + entry.ordinal % spec.page_units, 0
        for layer in spec.layers:
            for name, view in buffers(model, arena, spec, layer).items():
                content = view[block].contiguous().view(torch.uint8).numpy().tobytes()
                found[entry.key, layer, name] = content
                size += -(-len(content) // 64) * 64
        assert size == spec.unit_bytes, "a buffer of the block is not looked at"
    return found


TIERS: Final = ("host:8MiB", "host:8MiB?store=lazy", "disk:{}:64MiB")


@families(*FAMILIES)
@pytest.mark.parametrize("tier", TIERS, ids=["eager host", "lazy host", "disk"])
def test_w07_every_buffer_comes_back_byte_for_byte(name: str, tier: str, tiny: Make, tmp_path: Path) -> None:
    """W07, sglang#38031: wrong text only after device, host, device; and W05, sglang#27504: only from the far tier.

    Right: equal bytes of each buffer in each (group, layer, block), for every layout.
    """
    model = tiny(name)
    pages = 3 * model.runtime.layout.peak_pages(LENGTH + 4, 43)
    with make_llm(model.runtime, pages, kv=[tier.format(tmp_path)], max_num_batched_tokens=43) as llm:
        poison_on_take(llm.built.hierarchy.core.device.pool, llm.built.worker.arena.poison_page)
        ask(llm, tokens(LENGTH))
        before = contents(model.runtime, llm.built)
        if "lazy" in tier:
            for seed in range(1, 7):
                ask(llm, tokens(LENGTH, seed))
        assert llm.reset_prefix_cache(device_only=True)
        assert not contents(model.runtime, llm.built)
        output = ask(llm, tokens(LENGTH))
        assert same(output, model.cold(tokens(LENGTH)))
        assert output.cached_tokens == CACHED
        after = contents(model.runtime, llm.built)
        both = before.keys() & after.keys()
        assert all(before[each] == after[each] for each in both)
        assert len({(key.group, layer, buffer) for key, layer, buffer in both}) == sum(
            len(buffers(model.runtime, llm.built.worker.arena, spec, layer))
            for spec in model.runtime.layout.groups
            for layer in spec.layers
        )
        assert_at_rest(llm)


@families(*FAMILIES)
def test_w05_the_answer_depends_on_every_buffer(name: str, tiny: Make) -> None:
    """W05, sglang#27504: a second buffer per token is not written to the far tier, and stale bytes are used.

    Right: whatever is not what was stored shows in the logits, so the tests above would notice any buffer left out.
    """
    model, tier = tiny(name), kept()
    rig = engine_over(model.runtime, [tier], 100)
    rig.serve(tokens(LENGTH))
    good = {key: content.clone() for key, content in tier.stored.items()}
    arena: Arena = rig.engine.executor.arena
    for spec in model.runtime.layout.groups:
        for layer in spec.layers:
            for buffer, view in buffers(model.runtime, arena, spec, layer).items():
                start = view.data_ptr() - arena.raw.data_ptr()
                stop = start + view[0].numel() * view.element_size()
                tier.stored = {key: content.clone() for key, content in good.items()}
                for key, content in tier.stored.items():
                    if key.group == spec.group:
                        content[start:stop] = 0x3D  # 0.046 in float32
                rig.evict_device()
                output = rig.serve(tokens(LENGTH))
                assert output.cached_tokens == CACHED
                cold = model.cold(tokens(LENGTH), 1)
                assert output.logits_sha256 != cold.logits_sha256, (spec.group, layer, buffer)
                tier.stored = dict(good)
                rig.cache.core.drop_idle()
    tier.stored = dict(good)
    assert same(rig.serve(tokens(LENGTH)), model.cold(tokens(LENGTH), 1))


def indexed() -> Any:
    """Sparse attention with the keys of an indexer beside those of attention."""
    sizes = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 32}
    indexer = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 16, "first_k_dense_replace": 1}
    config = transformers.DeepseekV32Config(**tiny_models.shape(num_key_value_heads=4), **sizes, **indexer)
    return transformers.DeepseekV32ForCausalLM(config)


def sided() -> Any:
    """A side buffer that neither config nor cache knows of: a layer adds the mean of all that it was given before."""
    model = build("llama")
    plain = model.model.layers[1].mlp.forward

    def forward(rows: torch.Tensor) -> torch.Tensor:
        count = torch.arange(1, rows.shape[1] + 1)[None, :, None]
        output: torch.Tensor = plain(rows) + rows.cumsum(1) / count
        return output

    model.model.layers[1].mlp.forward = forward
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (indexed, "the keys of its indexer would not be saved"),
        (lambda: transformers.RecurrentGemmaForCausalLM(
            transformers.RecurrentGemmaConfig(**tiny_models.shape(num_hidden_layers=1))
        ), "layer 0"),
        (sided, "logits differ"),
    ],
    ids=["indexer", "own attribute", "unknown to all"],
)  # fmt: skip
def test_w05_a_buffer_that_would_not_be_saved_is_refused_at_start(make: Callable[[], Any], reason: str) -> None:
    """W05, sglang#27504, Mooncake#2236.  Right: a spec with an unsaved buffer is refused at start."""
    with pytest.raises(ModelRefusedError, match=reason):
        build_runtime(make(), max_model_len=512)


# -------------------------------------------------------------------------------------------------- states are restored


@families(*STATEFUL)
@pytest.mark.parametrize("tier", ["device", "host"])
def test_w13_restored_five_times(name: str, tier: str, tiny: Make) -> None:
    """W13, llama.cpp#21769: checkpoint, decode 20 tokens, restore, decode the same 20, five times.

    Right: five equal runs, and equal to the run without checkpoints.
    """
    model = tiny(name)
    for length in (64, 71):
        prompt, cold = tokens(length), model.cold(tokens(length), 20)
        with make_llm(model.runtime, 100, kv=["host:8MiB"], max_num_batched_tokens=43) as llm:
            assert same(ask(llm, prompt, 20), cold)
            for _ in range(5):
                if tier == "host":
                    llm.reset_prefix_cache(device_only=True)
                output = ask(llm, prompt, 20)
                assert same(output, cold)
                assert output.cached_tokens == (length - 1) // 16 * 16
                assert output.cached_by_tier.get(tier, 0) > 0
            assert_at_rest(llm)


@families(*STATEFUL)
@pytest.mark.parametrize("step_tokens", [43, 256])
def test_w16_the_same_prompt_twice_in_one_batch(name: str, step_tokens: int, tiny: Make) -> None:
    """W16, vllm#57266: two equal prompts in one batch crash or differ.  Right: equal, and equal to a solo run."""
    model, prompt = tiny(name), tokens(LENGTH)
    cold = model.cold(prompt, 12)
    with make_llm(model.runtime, 200, kv=["host:8MiB"], max_num_batched_tokens=step_tokens) as llm:
        for state in ("cold", "on the device", "on the host"):
            if state == "on the host":
                llm.reset_prefix_cache(device_only=True)
            outputs = llm.generate([prompt, prompt], greedy(12))
            settle(llm)
            assert all(same(output, cold) for output in outputs), state
            assert state == "cold" or [output.cached_tokens for output in outputs] == [CACHED] * 2, state
        assert_at_rest(llm)


@families("nemotron_h", "bamba")
def test_h06_a_prompt_of_200_tokens_twice(name: str, tiny: Make) -> None:
    """H06, vllm#54504: 30,000 queries and no hit, a crash on the CPU.  Right: hits, equal outputs, no crash."""
    model, prompt = tiny(name), tokens(200)
    with make_llm(model.runtime, kv=["host:8MiB"]) as llm:
        outputs = [ask(llm, prompt, 8), ask(llm, prompt, 8)]
        llm.reset_prefix_cache(device_only=True)
        outputs.append(ask(llm, prompt, 8))
        assert all(same(output, model.cold(prompt, 8)) for output in outputs)
        assert [dict(output.cached_by_tier) for output in outputs] == [{}, {"device": 192}, {"host": 192}]
        assert_at_rest(llm)


@families(*STATEFUL, "gemma3", "gemma3n")
@pytest.mark.parametrize("length", [96, 100, 111])
def test_h12_the_last_tokens_of_a_turn_are_replaced(name: str, length: int, tiny: Make) -> None:
    """H12, llama.cpp#20225: the next turn is this one with its last 4 tokens replaced, and 50 new.

    Right: computed again are at most one interval of checkpoints (16 tokens here), and what is new.
    """
    model, turn = tiny(name), tokens(length)
    with make_llm(model.runtime, 300, max_num_batched_tokens=64) as llm:
        for number in range(1, 4):
            assert same(ask(llm, turn, 6), model.cold(turn, 6))
            turn = turn[:-4] + tokens(54, number)
            output = ask(llm, turn, 6)
            assert same(output, model.cold(turn, 6))
            assert output.cached_tokens == (len(turn) - 54) // 16 * 16
        assert_at_rest(llm)


# ------------------------------------------------------------------------------------------------------ keys are shared


@families("gemma3n", "gemma4")
def test_w22_shared_keys_are_stored_once(name: str, tiny: Make) -> None:
    """W22, mlx-lm PR#1702: the last 2 of 6 layers borrow keys and values; a borrower overwrites them, or is offloaded.

    Right: one-shot prefill, token by token and a round trip through the host give equal results; only producers are
    stored, and what they stored is the same in all runs.
    """
    model, prompt = tiny(name), tokens(LENGTH)
    cold = model.cold(prompt, 12)
    shapes = [shape for shape in model.runtime.prepared.specs.geometry if shape is not None]
    assert [shape.layer for shape in shapes if shape.source != shape.layer] == [4, 5]
    assert sorted(layer for spec in model.runtime.layout.groups for layer in spec.layers) == [0, 1, 2, 3]
    stored = []
    for step_tokens in (256, 1):
        with make_llm(model.runtime, 200, kv=["host:8MiB"], max_num_batched_tokens=step_tokens) as llm:
            assert same(ask(llm, prompt, 12), cold)
            stored.append(contents(model.runtime, llm.built))
            llm.reset_prefix_cache(device_only=True)
            output = ask(llm, prompt, 12)
            assert same(output, cold)
            assert output.cached_tokens == CACHED
            back = contents(model.runtime, llm.built)
            assert all(stored[0][each] == content for each, content in back.items())
            keys = len(llm.built.hierarchy.core.directory)
            assert llm.stats().bytes_stored <= keys * max(spec.unit_bytes for spec in model.runtime.layout.groups)
            assert_at_rest(llm)
    assert stored[0] == stored[1]
    assert {layer for _, layer, _ in stored[0]} == {0, 1, 2, 3}


# ------------------------------------------------------------------------------------------------------- short contexts


@families("bamba", "nemotron_h")
def test_h05_a_context_of_32_tokens(name: str, tiny: Make) -> None:
    """H05, vllm#48401: the cache is silently inert when max_model_len is less than the block size.

    Right here: a hit needs no whole page, so prompts of such a context hit like any others; H04 with a real model.
    """
    model = tiny(name)
    assert max(spec.page_tokens for spec in model.runtime.layout.groups) >= 32
    with make_llm(model.runtime, 60, kv=["host:8MiB"], max_model_len=32, max_num_batched_tokens=32) as llm:
        outputs = [ask(llm, tokens(30), 2) for _ in range(2)]
        llm.reset_prefix_cache(device_only=True)
        outputs.append(ask(llm, tokens(20) + tokens(7, 1), 2))
        assert [dict(output.cached_by_tier) for output in outputs] == [{}, {"device": 16}, {"host": 16}]
        assert same(outputs[1], model.cold(tokens(30), 2))
        assert same(outputs[2], model.cold(tokens(20) + tokens(7, 1), 2))


def test_h05_a_context_in_which_nothing_can_be_hit_is_told(tiny: Make) -> None:
    """H05: with 16 tokens at most, and the last one always computed, no hit is possible.  Right: start-up says so."""
    with make_llm(tiny("bamba").runtime, 60, max_model_len=16) as llm:
        assert any("prefix caching" in line and "17" in line for line in llm.built.report.off)
