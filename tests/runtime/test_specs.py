"""Specs: what the probe finds for the families that are served, and why the others are refused."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import tiny_models as tiny
from ostinato import memory
from ostinato.cache.kinds import Full, Window
from ostinato.cache.layout import build_layout
from ostinato.errors import CapacityError, ModelRefusedError
from ostinato.runtime.arena import Arena
from ostinato.runtime.load import build_runtime, computes_in_bfloat16, spare_imported_modules
from ostinato.runtime.specs import CACHE_ARGUMENTS, probe_specs


@pytest.mark.parametrize(
    ("name", "kinds", "kv_heads", "dim"),
    [
        ("llama", [Full()] * 3, 2, 16),
        ("mistral", [Window(20)] * 3, 2, 16),
        ("gemma2", [Window(20), Full()] * 2, 2, 32),
        ("gemma3", [Window(20)] * 5 + [Full()], 2, 32),
        ("gpt_oss", [Window(20), Full()] * 2, 2, 16),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kinds_and_shapes(name: str, kinds: list[Any], kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    model = tiny.FAMILIES[name](dtype)
    before = model.config._attn_implementation
    specs = probe_specs(model)
    assert [layer.kind for layer in specs.layers] == kinds
    assert [layer.index for layer in specs.layers] == list(range(len(kinds)))
    assert {(g.kv_heads, g.key_dim, g.value_dim) for g in specs.geometry} == {(kv_heads, dim, dim)}
    assert all(layer.parts == (kv_heads * dim * dtype.itemsize,) * 2 for layer in specs.layers)
    assert specs.cache_argument in CACHE_ARGUMENTS
    assert model.config._attn_implementation == before


def mamba2() -> Any:
    return tf.Mamba2ForCausalLM(
        tf.Mamba2Config(vocab_size=64, hidden_size=64, num_hidden_layers=1, num_heads=8, head_dim=16, n_groups=1)
    )


def bert() -> Any:
    return tf.BertForMaskedLM(tf.BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))


def backbone() -> Any:
    return tf.LlamaModel(tf.LlamaConfig(**tiny.shape(num_hidden_layers=1)))


def t5() -> Any:
    return tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=64, d_model=32, d_ff=32, num_heads=2, num_layers=1))


def bloom() -> Any:
    return tf.BloomForCausalLM(tf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))


def latent() -> Any:
    config = tf.DeepseekV3Config(
        **tiny.shape(num_hidden_layers=1, num_key_value_heads=4),
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
    )
    return tf.DeepseekV3ForCausalLM(config)


def chunked() -> Any:
    config = tf.Llama4TextConfig(
        **tiny.shape(num_hidden_layers=2, head_dim=16),
        attention_chunk_size=32,
        num_local_experts=2,
        intermediate_size_mlp=64,
        layer_types=["chunked_attention", "full_attention"],
    )
    return tf.Llama4ForCausalLM(config)


def bidirectional() -> Any:
    model = tiny.gemma3()
    model.config.use_bidirectional_attention = True
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (mamba2, "layer 0 is of kind 'linear_attention'"),
        (bert, "logits_to_keep"),
        (backbone, "no language-model head"),
        (t5, "encoder-decoder"),
        (bloom, "does not go through transformers' attention interface"),
        (latent, "caches a latent"),
        (chunked, "layer 0 is of kind 'chunked_attention'"),
        (bidirectional, "not causal"),
    ],
)
def test_refusals_say_why_in_one_line(make: Any, reason: str) -> None:
    model = make()
    with pytest.raises(ModelRefusedError, match=reason) as caught:
        probe_specs(model)
    assert type(model).__name__ in str(caught.value)
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------------- the arena


def test_views_tile_each_page_without_overlap() -> None:
    specs = probe_specs(tiny.gemma3())
    layout = build_layout(specs.layers, hash_unit=16, max_page_units=4)
    arena = Arena(layout, specs, num_pages=3)
    arena.raw.zero_()
    assert arena.raw.data_ptr() % 64 == 0
    for group in layout.groups:
        arena.raw.zero_()
        for number, layer in enumerate(group.layers):
            pages = arena.layers[layer].pages
            assert pages.k.shape == (3 * group.page_units, 2, 16, 32)
            pages.k.add_(number + 1.0)
            pages.v.add_(number + 1.0)
        words = arena.raw.view(torch.float32)
        # Every number was added to once: used bytes are covered, padding is not, and no two views share a byte.
        total = sum(2.0 * 2 * 16 * 32 * (number + 1) for number in range(len(group.layers)))
        assert words.sum() == 3 * group.page_units * total
        assert words.max() == len(group.layers)


def test_poison_and_copy() -> None:
    from ostinato.ids import SlotId
    from ostinato.scheduler.plan import PageCopy

    specs = probe_specs(tiny.llama(torch.bfloat16))
    layout = build_layout(specs.layers)
    arena = Arena(layout, specs, num_pages=2, poison=True)
    assert all(bool(place.pages.k.isnan().all()) for place in arena.layers.values())
    arena.raw[0] = 7
    arena.copy(PageCopy(SlotId(0), SlotId(1), offset=64, length=128))
    assert (arena.raw[1] == 7).sum() == 128
    assert (arena.raw[1, 64:192] == 7).all()
    arena.poison_page(SlotId(0))
    assert arena.raw[0].view(torch.bfloat16).isnan().all()


def test_a_pool_larger_than_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = probe_specs(tiny.llama())
    layout = build_layout(specs.layers)
    monkeypatch.setattr(memory, "available_memory", lambda: 2**30)
    with pytest.raises(CapacityError, match=r"asks for 2\.00 GiB.*1\.00 GiB"):
        Arena(layout, specs, num_pages=2**31 // layout.page_bytes)


# -------------------------------------------------------------------------------------------------------------- rotary


def phi3(rope: dict[str, Any]) -> Any:
    config = tf.Phi3Config(
        **tiny.shape(num_hidden_layers=2),
        original_max_position_embeddings=64,
        rope_parameters={"rope_theta": 10000.0} | rope,
    )
    return tiny.draw(tf.Phi3ForCausalLM, config)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(("max_model_len", "factors"), [(64, "short"), (65, "long")])
def test_long_rope_is_frozen_for_the_whole_deployment(max_model_len: int, factors: str) -> None:
    """A long neighbour must not change the factors of a short sequence, nor a long sequence those of its start."""
    runtime = build_runtime(phi3(LONGROPE), max_model_len=max_model_len)
    rotary = runtime.prepared.model.model.rotary_emb
    frozen = rotary.inv_freq.clone()
    rows = torch.zeros(1, 4, 64)
    near, _ = rotary(rows, torch.arange(4)[None])
    rotary(rows, torch.arange(1000, 1004)[None])
    again, _ = rotary(rows, torch.arange(4)[None])
    assert torch.equal(near, again)
    assert torch.equal(rotary.inv_freq, frozen)
    plain = phi3({"rope_type": "default"}).model.rotary_emb.inv_freq
    assert torch.allclose(frozen, plain / (4.0 if factors == "long" else 1.0))
    other = build_runtime(phi3(LONGROPE), max_model_len=1000 if factors == "short" else 10)
    assert runtime.identity.config != other.identity.config, "cached keys of the two must not be shared"


def test_dynamic_rope_is_served_below_its_original_length_only() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert build_runtime(tiny.llama(rope_parameters=rope), max_model_len=4096).promise.bitwise
    with pytest.raises(ModelRefusedError, match="max_model_len"):
        build_runtime(tiny.llama(rope_parameters=rope), max_model_len=4097)


@pytest.mark.parametrize(
    ("flags", "answer"),
    [("flags : avx512f avx512_bf16 gfni", True), ("Features : fp asimd bf16 i8mm", True), ("flags : avx2 fma", False)],
)
def test_auto_dtype_asks_the_processor(tmp_path: Path, flags: str, answer: bool) -> None:
    (tmp_path / "cpuinfo").write_text(flags)
    assert computes_in_bfloat16(tmp_path / "cpuinfo") is answer
    assert not computes_in_bfloat16(tmp_path / "missing")


def test_a_collection_does_not_walk_what_was_imported() -> None:
    gc.unfreeze()
    spare_imported_modules()
    frozen = gc.get_freeze_count()
    assert frozen > 100_000
    assert len(gc.get_objects()) < frozen
    spare_imported_modules()
    assert gc.get_freeze_count() == frozen, "once is enough: what came later may have to be collected"
