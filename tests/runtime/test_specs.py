"""Specs: what the probe finds for the families that are served, and why the others are refused."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import tiny_models as tiny
from families.configs import build
from ostinato.cache.kinds import Chunked, Full, State, Window
from ostinato.errors import ModelRefusedError
from ostinato.runtime.geometry import LayerGeometry, ModelSpecs, StateUse
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


W, C, F = Window(20), Chunked(32), Full()
CONV, RECURRENT = StateUse.CONV, StateUse.RECURRENT


def plain(kind: Any, heads: int, dim: int) -> tuple[Any, ...]:
    return (kind, heads, dim, dim, False, None)


def borrowed(kind: Any, heads: int, dim: int, source: int) -> tuple[Any, ...]:
    return (kind, heads, dim, dim, False, source)


LATENT = (F, 1, 32, 16, True, None)
MAMBA2 = [(CONV, 0, (160, 3)), (RECURRENT, 0, (8, 16, 16))]
MAMBA = [(CONV, 0, (128, 3)), (RECURRENT, 0, (128, 8))]
DELTA = [(CONV, 0, (128, 3)), (RECURRENT, 0, (4, 16, 16))]
ATTENDS = plain(F, 2, 16)
FOUND: dict[str, tuple[list[Any], list[Any]]] = {
    "llama4": ([plain(C, 2, 16)] * 3 + [ATTENDS], [None] * 4),
    "gemma3n": (
        [plain(W, 2, 16), plain(W, 2, 16), ATTENDS, plain(W, 2, 16), borrowed(W, 2, 16, 3), borrowed(F, 2, 16, 2)],
        [None] * 6,
    ),
    "gemma4": (
        [plain(W, 2, 16)] * 2 + [plain(F, 2, 32), plain(W, 2, 16), borrowed(W, 2, 16, 3), borrowed(F, 2, 32, 2)],
        [None] * 6,
    ),
    "deepseek_v3": ([LATENT] * 3, [None] * 3),
    "longcat_flash": ([LATENT] * 4, [None] * 4),
    "minicpm3": ([LATENT] * 3, [None] * 3),
    "qwen3_next": ([None] * 3 + [plain(F, 2, 32)], [DELTA] * 3 + [None]),
    "kimi_linear": ([None] * 3 + [LATENT], [[(CONV, 0, (192, 3)), (RECURRENT, 0, (4, 16, 16))]] * 3 + [None]),
    "mamba2": ([None] * 3, [MAMBA2] * 3),
    "bamba": ([None, None, ATTENDS, None], [MAMBA2, MAMBA2, None, MAMBA2]),
    "falcon_h1": ([ATTENDS] * 3, [MAMBA2] * 3),
    "nemotron_h": ([None, None, None, ATTENDS], [MAMBA2, None, MAMBA2, None]),
    "zamba2": ([None, None, plain(F, 4, 32)] * 2, [MAMBA2] * 6),
    "mamba": ([None] * 3, [MAMBA] * 3),
    "jamba": ([None, None, ATTENDS, None], [MAMBA, MAMBA, None, MAMBA]),
    "lfm2": ([None, None, ATTENDS, None], [[(CONV, 0, (64, 2))]] * 2 + [None, [(CONV, 0, (64, 2))]]),
}


def described(shape: LayerGeometry | None) -> tuple[Any, ...] | None:
    if shape is None:
        return None
    limits = {W: (20, 0), C: (0, 32), F: (0, 0)}[shape.kind]  # type: ignore[index]
    assert (shape.window, shape.chunk) == limits
    source = None if shape.source == shape.layer else shape.source
    return (shape.kind, shape.kv_heads, shape.key_dim, shape.value_dim, shape.latent, source)


@pytest.mark.parametrize("name", list(FOUND))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_each_family_keeps(name: str, dtype: torch.dtype) -> None:
    specs = probe_specs(build(name, dtype))
    geometry, states = FOUND[name]
    assert [described(shape) for shape in specs.geometry] == geometry
    found = [state and [(b.use, b.index, b.shape) for b in state.buffers] for state in specs.states]
    assert found == states
    check_layer_specs(specs, dtype)
    assert specs.row_offsets == (name == "llama4"), "only Llama 4 adds the cache's length to the numbers of rows"
    assert specs.takes_positions == (name not in ("mamba", "mamba2"))


def check_layer_specs(specs: ModelSpecs, dtype: torch.dtype) -> None:
    """One entry for each layer's keys and values and one for each state; convolutions in the model's dtype."""
    own = [shape for shape in specs.geometry if shape is not None and shape.source == shape.layer]
    attends = [layer for layer in specs.layers if layer.kind != State()]
    assert [layer.index for layer in attends] == [shape.layer for shape in own]
    assert [sum(layer.parts) for layer in attends] == [
        shape.kv_heads * (shape.key_dim + shape.value_dim) * dtype.itemsize for shape in own
    ]
    assert all(len(layer.parts) == (1 if shape.latent else 2) for layer, shape in zip(attends, own, strict=True))
    for layer in (layer for layer in specs.layers if layer.kind == State()):
        state = specs.states[layer.index]
        assert state is not None
        assert sum(layer.parts) == state.size
        for buffer, part, end in zip(state.buffers, layer.parts, np.cumsum(layer.parts), strict=True):
            assert buffer.dtype == (dtype if buffer.use is CONV else torch.float32)
            assert (buffer.offset, buffer.offset % 64) == (end - part, 0)
            assert 0 <= part - buffer.size < 64


def bert() -> Any:
    return tf.BertForMaskedLM(tf.BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))


def backbone() -> Any:
    return tf.LlamaModel(tf.LlamaConfig(**tiny.shape(num_hidden_layers=1)))


def t5() -> Any:
    return tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=64, d_model=32, d_ff=32, num_heads=2, num_layers=1))


def bloom() -> Any:
    return tf.BloomForCausalLM(tf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))


def gpt_neo() -> Any:
    kinds = [[["global"], 2]]
    return tf.GPTNeoForCausalLM(
        tf.GPTNeoConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, attention_types=kinds)
    )


def indexed() -> Any:
    config = tf.DeepseekV32Config(
        **tiny.shape(num_hidden_layers=1, num_key_value_heads=4),
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=16,
    )
    return tf.DeepseekV32ForCausalLM(config)


def compressed() -> Any:
    return tf.DeepseekV4ForCausalLM(tf.DeepseekV4Config(**tiny.shape(num_hidden_layers=1)))


def own_state() -> Any:
    """RecurrentGemma keeps its states as attributes of its modules."""
    return tf.RecurrentGemmaForCausalLM(tf.RecurrentGemmaConfig(**tiny.shape(num_hidden_layers=1)))


def own_cache() -> Any:
    config = tf.MiniMaxConfig(**tiny.shape(num_hidden_layers=2, head_dim=16), num_local_experts=2)
    return tf.MiniMaxForCausalLM(config)


def biased() -> Any:
    config = tf.InklingTextConfig(**tiny.shape(num_hidden_layers=1, head_dim=16), layer_types=["hybrid"])
    return tf.InklingForCausalLM(config)


def twice() -> Any:
    return tf.DiffLlamaForCausalLM(tf.DiffLlamaConfig(**tiny.shape(num_hidden_layers=1)))


def narrow() -> Any:
    """The layer attends over another window than its config says."""
    model = tiny.mistral()
    model.config.layer_types = [tiny.FULL] + [tiny.SLIDING] * 2
    return model


def bidirectional() -> Any:
    model = tiny.gemma3()
    model.config.use_bidirectional_attention = True
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (bert, "logits_to_keep"),
        (backbone, "no language-model head"),
        (t5, "encoder-decoder"),
        (bloom, "no `position_ids` argument"),
        (gpt_neo, "does not go through transformers' attention interface"),
        (indexed, "kind 'indexed_attention': the keys of its indexer would not be saved"),
        (compressed, "compressed keys"),
        (own_state, "layer 0 .*"),
        (own_cache, "uses cache of its own"),
        (biased, "passes position_bias to attention"),
        (twice, "2 times per pass"),
        (narrow, "layer 0 attends over a window of 20, its config says 0"),
        (bidirectional, "not causal"),
    ],
)
def test_refusals_say_why_in_one_line(make: Any, reason: str) -> None:
    model = make()
    with pytest.raises(ModelRefusedError, match=reason) as caught:
        probe_specs(model)
    assert type(model).__name__ in str(caught.value)
    assert "\n" not in str(caught.value)


def save_rows(cache: Any, rows: torch.Tensor) -> None:
    cache.update_conv_state(rows, 0, conv_kernel_size=4)
    cache.update_recurrent_state(rows.new_zeros(1, 4, dtype=torch.complex64), 0)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (save_rows, "recurrent state 0 is torch.complex64"),
        (lambda cache, rows: cache.update_indexer(rows, 0), "`update_indexer`.* not be saved"),
        (lambda cache, rows: cache.layers[0], "reaches into the layers of its cache"),
        (lambda cache, rows: cache.update_conv_state(rows, 0), "convolution state 0 .* width of its kernel"),
        (lambda cache, rows: cache.update_conv_state(rows, 7, conv_kernel_size=4), "updates layer 7 of 3"),
        (lambda cache, rows: cache.update_recurrent_state(rows.new_zeros(2, 4), 0), "not one sequence's"),
        (lambda cache, rows: None, "hands no state to the cache"),
    ],
)
def test_state_that_would_not_be_saved_is_refused(monkeypatch: pytest.MonkeyPatch, call: Any, reason: str) -> None:
    def forward(_: Any, hidden_states: torch.Tensor, cache: Any = None, cache_params: Any = None, **__: Any) -> Any:
        call(cache if cache is not None else cache_params, hidden_states.transpose(1, 2))
        return hidden_states

    monkeypatch.setattr("transformers.models.mamba.modeling_mamba.MambaMixer.forward", forward)
    with pytest.raises(ModelRefusedError, match=reason):
        probe_specs(build("mamba"))


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
