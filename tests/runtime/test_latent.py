"""Absorbed latent attention: against transformers' own forward pass, and the same bits under every schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import tiny_models as tiny
from ostinato.cache.kinds import Full
from ostinato.errors import AuditError, ModelRefusedError
from ostinato.runtime import native
from ostinato.runtime.attention import AttentionBackend, AttentionParams, CpuNative, KVPages, TorchRef
from ostinato.runtime.attention_hook import install
from ostinato.runtime.geometry import LayerGeometry, ModelSpecs
from ostinato.runtime.latent import absorb_latents, attend_latents
from ostinato.runtime.linear import make_invariant
from ostinato.runtime.selfcheck import distance
from ostinato.runtime.specs import output_head
from ostinato.runtime.unaligned import align, find_unaligned
from paged_forward import PagedForward, Pool

LIBRARY, REASON = native.load()
LEVELS = [level for level in native.Isa if LIBRARY is not None and 0 <= level <= LIBRARY.best_isa]
DTYPES = (torch.float32, torch.bfloat16)
RANK, ROPE = 32, 8

needs_library = pytest.mark.skipif(LIBRARY is None, reason=REASON)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=("fp32", "bf16"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


# Models


def shape(**more: Any) -> dict[str, Any]:
    latent = {"q_lora_rank": 24, "kv_lora_rank": RANK, "qk_nope_head_dim": 16, "qk_rope_head_dim": ROPE}
    few = {"v_head_dim": 12, "num_hidden_layers": 2, "num_key_value_heads": 4}
    fields: dict[str, Any] = tiny.shape(**(latent | few | more))
    return fields


def experts(**more: Any) -> dict[str, Any]:
    counts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    return shape(moe_intermediate_size=32, **counts, **more)


def longcat() -> Any:
    """Two attentions per layer."""
    fields = shape(head_dim=ROPE, num_hidden_layers=4, num_layers=2, ffn_hidden_size=96, expert_ffn_hidden_size=32)
    del fields["intermediate_size"]
    return tf.LongcatFlashConfig(**fields, n_routed_experts=4, zero_expert_num=2, moe_topk=2)


def mistral4() -> Any:
    config: Any = tf.Mistral4Config(**experts(first_k_dense_replace=1))
    config.rope_parameters["original_max_position_embeddings"] = 64
    return config


def kimi() -> Any:
    """Its latent layers alone; they have no positions."""
    fields = shape(q_lora_rank=None, first_k_dense_replace=2, layer_types=[tiny.FULL] * 2, moe_intermediate_size=32)
    return tf.KimiLinearConfig(**fields, num_local_experts=4, num_experts_per_tok=2)


DENSE: dict[str, tuple[type[Any], Callable[[], Any]]] = {
    "deepseek_v3": (tf.DeepseekV3ForCausalLM, lambda: tf.DeepseekV3Config(**experts(first_k_dense_replace=2))),
    "deepseek_v2": (
        tf.DeepseekV2ForCausalLM,
        lambda: tf.DeepseekV2Config(**experts(first_k_dense_replace=2, q_lora_rank=None)),
    ),
    "minicpm3": (tf.MiniCPM3ForCausalLM, lambda: tf.MiniCPM3Config(**shape())),
    "glm4_moe_lite": (
        tf.Glm4MoeLiteForCausalLM,
        lambda: tf.Glm4MoeLiteConfig(**experts(mlp_layer_types=["dense"] * 2)),
    ),
    "kimi_linear": (tf.KimiLinearForCausalLM, kimi),
}
FAMILIES = DENSE | {
    "youtu": (tf.YoutuForCausalLM, lambda: tf.YoutuConfig(**shape())),
    "axk1": (tf.AXK1ForCausalLM, lambda: tf.AXK1Config(**experts(first_k_dense_replace=1))),
    "longcat": (tf.LongcatFlashForCausalLM, longcat),
    "mistral4": (tf.Mistral4ForCausalLM, mistral4),
}


def make(name: str, dtype: torch.dtype) -> Any:
    kind, config = FAMILIES[name]
    return tiny.draw(kind, config(), dtype)


def specs_of(layers: int, dtype: torch.dtype) -> ModelSpecs:
    geometry = tuple(
        LayerGeometry(layer, Full(), 1, RANK, ROPE, window=0, source=layer, latent=True) for layer in range(layers)
    )
    return ModelSpecs((), geometry, (None,) * layers, "cache", dtype)


def serve(model: Any, backend: AttentionBackend, pad: Any = None) -> Callable[[], PagedForward]:
    """Replaces the model's attention; each call gives a fresh pool under it."""
    layers = sum(hasattr(module, "expand_kv") for module in model.modules())
    specs = specs_of(layers, model.dtype)
    latents = absorb_latents(model, specs, backend)
    install(model)
    return lambda: PagedForward(model, Pool(specs.geometry, model.dtype), backend, latents, pad)


def run(forward: PagedForward, tokens: Sequence[int], cuts: Sequence[int], other: Sequence[int] = ()) -> Tensor:
    """Logits of all tokens in chunks that end at ``cuts``; ``other`` advances beside them by 13 tokens a step."""
    rows = []
    for step, (begin, end) in enumerate(pairwise((0, *cuts))):
        parts = [("mine", tokens[begin:end])]
        if beside := other[13 * step : 13 * step + 13]:
            parts.insert(step % 2, ("other", beside))
        rows.append(forward.step(*parts)[[name for name, _ in parts].index("mine")])
    return torch.cat(rows)


# Against transformers


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("backend", ["cpu_native", "torch_ref"])
def test_logits_are_those_of_transformers(name: str, backend: str) -> None:
    if backend == "cpu_native" and LIBRARY is None:
        pytest.skip(REASON)
    model = make(name, torch.float32)
    tokens = tiny.prompts((70,))[0]
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    pool = serve(model, CpuNative() if backend == "cpu_native" else TorchRef())
    logits = run(pool(), tokens, (1, 20, 21, 53, 70), tiny.prompts((60,), seed=3)[0])
    assert (logits - expected).abs().max() < 1e-4
    assert expected.std() > 0.05, "logits that tell tokens apart"


@needs_library
@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_near_as_its_rounding(name: str) -> None:
    """Distances to float32 logits, of transformers' own pass and of ours: alike."""
    model = make(name, torch.bfloat16)
    tokens = tiny.prompts((70,))[0]
    with torch.inference_mode():
        exact = make(name, torch.float32)(torch.tensor([tokens])).logits[0]
        theirs = model(torch.tensor([tokens])).logits[0]
    ours = run(serve(model, CpuNative())(), tokens, (1, 20, 21, 53, 70))
    assert distance(ours, exact) < 1.5 * distance(theirs.float(), exact)


# Bits


@needs_library
@each_dtype
@pytest.mark.parametrize("name", DENSE)
def test_every_schedule_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    model = make(name, dtype)
    found = find_unaligned(model, lambda: model(input_ids=torch.arange(9)[None], use_cache=False))
    rule = make_invariant(model, output_head(model))
    assert rule.invariant
    align(model, found)
    pool = serve(model, CpuNative(), (rule.body | rule.head).pad)
    tokens, other = tiny.prompts((150, 100))
    whole = pool()
    once = run(whole, tokens, (150,))
    assert not once.isnan().any()
    schedules = {
        "chunks": ((7, 50, 51, 133, 150), []),
        "decode": ((140, *range(141, 151)), []),
        "batched": ((5, 64, 65, 66, 120, 121, 150), other),
    }
    for label, (cuts, beside) in schedules.items():
        forward = pool()
        assert torch.equal(run(forward, tokens, cuts, beside), once), label
        for ours, theirs in zip(forward.pool.cached("mine"), whole.pool.cached("mine"), strict=True):
            assert torch.equal(ours, theirs), label


@needs_library
@each_dtype
@pytest.mark.parametrize("isa", LEVELS, ids=lambda level: level.name.lower())
@pytest.mark.parametrize(("heads", "inner", "columns"), [(3, 7, 5), (2, 64, 96), (4, 33, 70), (1, 1, 32)])
def test_head_product(isa: native.Isa, dtype: torch.dtype, heads: int, inner: int, columns: int) -> None:
    backend = CpuNative(isa)
    weight = torch.randn(heads, inner, columns).to(dtype)
    rows = torch.randn(130, heads, inner + 5).to(dtype)[..., 2 : 2 + inner]
    out = torch.full((130, heads, columns + 9), float("nan"), dtype=dtype)
    packed = backend.pack_heads(weight)
    backend.head_product(rows, packed, out[..., 3 : 3 + columns])
    got, around = out[..., 3 : 3 + columns], torch.cat([out[..., :3], out[..., 3 + columns :]], -1)
    expected = torch.einsum("rha,hab->rhb", rows.float(), weight.float())
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert (got.float() - expected).abs().max() < limit * expected.abs().max()
    assert around.isnan().all()
    for count in (0, 1, 2, 3, 7, 8, 9, 64, 65):
        part = torch.empty(count, heads, columns, dtype=dtype)
        backend.head_product(rows[11 : 11 + count], packed, part)
        assert torch.equal(part, got[11 : 11 + count]), count
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        again = torch.empty(130, heads, columns, dtype=dtype)
        backend.head_product(rows, packed, again)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(again, got)


@pytest.mark.parametrize("backend", [CpuNative(), TorchRef()], ids=lambda backend: backend.name)
def test_head_product_refuses_what_does_not_fit(backend: AttentionBackend) -> None:
    if backend.name == "cpu_native" and LIBRARY is None:
        pytest.skip(REASON)
    packed = backend.pack_heads(torch.randn(2, 64, 96))
    for rows, out in (((5, 2, 63), (5, 2, 96)), ((5, 3, 64), (5, 3, 96)), ((5, 2, 64), (5, 2, 200))):
        with pytest.raises(AuditError):
            backend.head_product(torch.zeros(rows), packed, torch.zeros(out))
    with pytest.raises(AuditError):
        backend.head_product(torch.zeros(5, 2, 64), packed, torch.zeros(4, 2, 96))


# Finding the weights


class Expander(nn.Module):
    """An expansion whose rotary part stands first, for 3 heads of 10 + 8 and 6 numbers."""

    layer_idx = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, RANK, 16))

    def expand_kv(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        both = latent @ self.weight
        return torch.cat([rotary.expand(-1, 3, -1, -1), both[..., :10]], -1), both[..., 10:]


class Curved(Expander):
    def expand_kv(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().expand_kv(latent, rotary)
        return key, value * value.abs()


class Biased(Expander):
    def expand_kv(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().expand_kv(latent, rotary)
        return key, value + 1


class Turned(Expander):
    def expand_kv(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        return super().expand_kv(latent, -rotary)


class Mixed(Expander):
    def expand_kv(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().expand_kv(latent, rotary)
        return key, value + rotary[..., :6]


class Twice(Expander):
    def __init__(self) -> None:
        super().__init__()
        self.other = Expander()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Curved, "not linear"),
        (Biased, "zeros do not become zeros"),
        (Turned, "does not copy the rotary part"),
        (Mixed, "mixes"),
        (Twice, "2 of its modules"),
    ],
)
def test_another_expansion_is_refused(kind: type[Expander], reason: str) -> None:
    model: Any = kind()
    with pytest.raises(ModelRefusedError, match=f"layer 0 caches a latent, but .*{reason}"):
        absorb_latents(model, specs_of(1, torch.float32), TorchRef())


@pytest.mark.parametrize("backend", [CpuNative(), TorchRef()], ids=lambda backend: backend.name)
def test_rotary_part_first(backend: AttentionBackend) -> None:
    """Attention over latents is attention over what they expand to; here with a window and sinks."""
    if backend.name == "cpu_native" and LIBRARY is None:
        pytest.skip(REASON)
    model: Any = Expander()
    weights = absorb_latents(model, specs_of(1, torch.float32), backend)[0]
    pool = Pool(specs_of(1, torch.float32).geometry, torch.float32)
    index = pool.context([pool.extend("mine", 50)], backend).groups[0]
    latent, rotary, query = torch.randn(50, 1, RANK), torch.randn(50, 1, ROPE), torch.randn(50, 3, 18)
    pages = pool.layers[0].pages
    backend.write(rotary, latent, KVPages(pages.k[..., RANK:], pages.v), index.slots)
    params = AttentionParams(0.3, window=9, sinks=torch.randn(3))
    with torch.no_grad():
        out = attend_latents(backend, weights, query, pages, params, index)
        key, value = (part[0] for part in model.expand_kv(latent.transpose(0, 1)[None], rotary.transpose(0, 1)[None]))
    plain = LayerGeometry(0, Full(), 3, 18, 6, window=9, source=0)
    expanded = Pool([plain], torch.float32)
    index = expanded.context([expanded.extend("mine", 50)], TorchRef()).groups[0]
    TorchRef().write(key.transpose(0, 1), value.transpose(0, 1), expanded.layers[0].pages, index.slots)
    expected = TorchRef().attend(query, expanded.layers[0].pages, params, index)
    assert torch.allclose(out, expected, atol=1e-4)


@each_dtype
@pytest.mark.parametrize("name", FAMILIES)
def test_weights_that_were_absorbed_are_let_go(name: str, dtype: torch.dtype) -> None:
    """Nothing expands latents any more, so the layers that did would be packed and kept for nothing."""
    model = make(name, dtype)
    expanders = sum(hasattr(module, "expand_kv") for module in model.modules())
    before = sum(parameter.numel() for parameter in model.parameters())
    weights = absorb_latents(model, specs_of(expanders, dtype), TorchRef())
    absorbed = sum(item.key.numel() + item.value.numel() for item in weights.values())
    assert absorbed > 0
    assert before - sum(parameter.numel() for parameter in model.parameters()) == absorbed
    with pytest.raises(ModelRefusedError, match="outside of `expand_kv`"):
        model(torch.tensor([[1, 2, 3]]))
