"""Mixtures of experts: what transformers computes, with bits that do not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

import tiny_models as tiny
from ostinato.runtime import native
from ostinato.runtime.bare_weights import BareWeight, guard_bare_weights
from ostinato.runtime.experts import install_experts, pack
from ostinato.runtime.linear import make_invariant, row_invariant_linear, row_invariant_matmul
from ostinato.runtime.load import build_runtime
from ostinato.runtime.native import Isa

pytestmark = pytest.mark.skipif(native.load()[0] is None, reason="no C++ library")
DTYPES = (torch.float32, torch.bfloat16)
HIDDEN, EXPERTS, CHOICES = 64, 8, 3
COUNTED = {"num_experts": EXPERTS, "num_experts_per_tok": CHOICES, "moe_intermediate_size": 48}
LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOICES}
ROUTED = {"n_routed_experts": EXPERTS, "num_experts_per_tok": CHOICES, "moe_intermediate_size": 48, "n_group": 1}
ROUTED |= {"topk_group": 1, "first_k_dense_replace": 0}

CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt_oss": lambda: tf.GptOssConfig(**tiny.shape(head_dim=16, intermediate_size=40), **LOCAL),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**tiny.shape(head_dim=16), **COUNTED),
    "qwen3_next": lambda: tf.Qwen3NextConfig(**tiny.shape(head_dim=16), **COUNTED),
    "mixtral": lambda: tf.MixtralConfig(**tiny.shape(), **LOCAL),
    "deepseek_v3": lambda: tf.DeepseekV3Config(**tiny.shape(num_key_value_heads=4), **ROUTED),
    "granitemoehybrid": lambda: tf.GraniteMoeHybridConfig(**tiny.shape(layer_types=["attention"] * 3), **LOCAL),
    "olmoe": lambda: tf.OlmoeConfig(**tiny.shape(), num_experts=EXPERTS, num_experts_per_tok=CHOICES),
    "phimoe": lambda: tf.PhimoeConfig(**tiny.shape(), num_local_experts=EXPERTS, num_experts_per_tok=2),
    "glm4_moe": lambda: tf.Glm4MoeConfig(**tiny.shape(), **ROUTED),
    "lfm2_moe": lambda: tf.Lfm2MoeConfig(
        **tiny.shape(layer_types=["full_attention"] * 3), **COUNTED, num_dense_layers=0
    ),
    "jamba": lambda: tf.JambaConfig(
        **tiny.shape(num_hidden_layers=4), num_experts=EXPERTS, num_experts_per_tok=CHOICES, mamba_d_state=8
    ),
    "minimax_m2": lambda: tf.MiniMaxM2Config(**tiny.shape(head_dim=16, rotary_dim=8), **LOCAL),
}


def experts_of(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A tiny model of a family, and its last experts module."""
    model = tiny.draw(tf.AutoModelForCausalLM.from_config, CONFIGS[name](), dtype).requires_grad_(False)
    return model, [module for module in model.modules() if hasattr(module, "is_transposed")][-1]


def routed(tokens: int, dtype: torch.dtype, experts: int = EXPERTS, choices: int = CHOICES) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    index = torch.rand(tokens, experts, generator=generator).topk(choices).indices
    return hidden, index, torch.rand(tokens, choices, generator=generator).to(dtype)


def assert_invariant(layer: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    """One token at a time, in odd parts and in another order: each token's bits are those of the whole batch."""
    whole = layer(*inputs)
    count = len(whole)
    assert not whole.isnan().any()
    for sizes in ([1] * count, [3, 5, count - 8], [count - 1, 1], [33, 1, count - 34]):
        parts = zip(*(value.split(sizes) for value in inputs), strict=True)
        assert torch.equal(torch.cat([layer(*part) for part in parts]), whole), sizes
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer(*(value[order] for value in inputs)), whole[order])


@pytest.mark.parametrize("name", CONFIGS)
def test_families_compute_what_transformers_computes(name: str) -> None:
    model, experts = experts_of(name, torch.float32)
    inputs = routed(50, torch.float32)
    model.set_experts_implementation("eager")
    expected = experts(*inputs)
    note = install_experts(model)
    assert note is not None
    assert note.startswith("own kernel")
    assert not hasattr(experts, "down_proj")
    torch.testing.assert_close(experts(*inputs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_families_are_invariant(name: str, dtype: torch.dtype) -> None:
    model, experts = experts_of(name, dtype)
    install_experts(model)
    assert_invariant(experts, routed(150, dtype))


class Plain(nn.Module):
    """Experts of any layout, with the reference written out."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.act_fn = ACT2FN["relu2"]
        self.num_experts = EXPERTS
        for name in ("up_proj", "down_proj"):
            setattr(self, name, nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) * 0.2, requires_grad=False))
            setattr(self, f"{name}_bias", nn.Parameter(torch.randn(EXPERTS, HIDDEN), requires_grad=False))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for token, choice in torch.cartesian_prod(torch.arange(len(index)), torch.arange(index.shape[1])).tolist():
            expert = int(index[token, choice])
            if expert < EXPERTS:
                up = hidden[token] @ self.up_proj[expert] + self.up_proj_bias[expert]
                down = self.act_fn(up) @ self.down_proj[expert] + self.down_proj_bias[expert]
                out[token] += weights[token, choice] * down
        return out


def plain_experts() -> tuple[Any, Any]:
    kind = use_experts_implementation(is_transposed=True, has_bias=True, has_gate=False)(
        type("Experts", (Plain,), {"__init__": Plain.__init__, "forward": Plain.forward})
    )
    model = tiny.draw(tf.AutoModelForCausalLM.from_config, CONFIGS["qwen3_moe"]())
    model.model.layers[0].mlp.experts = experts = kind(model.config)
    return model, experts


@pytest.mark.parametrize("case", ["some", "one expert", "one choice", "masked", "none"])
def test_ungated_experts_with_bias_and_odd_choices(case: str) -> None:
    model, experts = plain_experts()
    hidden, index, weights = routed(40, torch.float32, choices=1 if case == "one choice" else CHOICES)
    if case == "one expert":
        index[:] = 5
    elif case == "masked":
        index[index == 2] = EXPERTS
        index[7] = EXPERTS
    elif case == "none":
        index[:] = EXPERTS
    model.set_experts_implementation("eager")
    expected = experts(hidden, index, weights)
    install_experts(model)
    torch.testing.assert_close(experts(hidden, index, weights), expected, rtol=1e-5, atol=1e-4)
    assert_invariant(experts, (hidden, index, weights))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("isa", [isa for isa in Isa if isa >= 0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_of_every_instruction_set(dtype: torch.dtype, isa: Isa, threads: int) -> None:
    library, _ = native.load()
    if library is None or isa > library.best_isa:
        pytest.skip("not on this processor")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows, columns, depth in ((1, 5, 7), (3, 64, 33), (230, 70, 128), (13, 32, 1100)):
            _check_kernel(torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype), isa)
    finally:
        torch.set_num_threads(before)


def _check_kernel(rows: Tensor, weight: Tensor, isa: Isa) -> None:
    """Plain, transposed and packed weights, all rows or one: the same bits, near the exact product."""
    exact = rows.double() @ weight.double().T
    out = rows.new_full((1, len(rows), len(weight)), float("nan"))
    torch.ops.ostinato.multiply_rows(rows[None], weight[None], None, out, isa)
    torch.testing.assert_close(out[0].double(), exact, rtol=0.01, atol=float(exact.abs().max()) * 1e-2)
    if rows.dtype == torch.float32:
        torch.testing.assert_close(out[0].double(), exact, rtol=1e-5, atol=float(exact.abs().max()) * 1e-6)
    other = torch.empty_like(out)
    torch.ops.ostinato.multiply_rows(rows[None], weight.T.contiguous().T[None], None, other, isa)
    assert torch.equal(other, out)
    offsets = torch.tensor([0, len(rows)], dtype=torch.int32)
    torch.ops.ostinato.multiply_experts(rows, None, offsets, pack(weight[None]), None, other[0], isa)
    assert torch.equal(other, out)
    for row in range(0, len(rows), 17):
        one = out.new_empty(1, 1, len(weight))
        torch.ops.ostinato.multiply_rows(rows[None, row : row + 1], weight[None], None, one, isa)
        assert torch.equal(one[0, 0], out[0, row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_used_by_hand(dtype: torch.dtype) -> None:
    stack = BareWeight(torch.randn(4, 96, 64).to(dtype))
    rows = torch.randn(4, 70, 96).to(dtype)
    flat = rows[0]
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda x: nn.functional.linear(x, stack[1].T),
        lambda x: nn.functional.linear(x.float(), stack[1].T.float(), torch.ones(64)),
        lambda x: x @ stack[2],
        lambda x: x.matmul(stack.transpose(1, 2)[3].T),
        lambda x: torch.bmm(x.expand(4, -1, -1), stack).transpose(0, 1),
        lambda x: torch.mm(x, stack.view(4, 96, 64)[0]),
    ]
    for way in ways:
        assert type(way(flat)) is Tensor
        torch.testing.assert_close(way(flat), _by_torch(way, flat, stack), rtol=0.02, atol=0.3)
        assert_invariant(way, (flat,))
    assert type(stack * 2) is Tensor
    assert type(torch.exp(stack.float())) is Tensor
    assert stack.shape == (4, 96, 64)
    assert row_invariant_matmul(rows.half(), torch.randn(96, 64).half()) is None
    assert row_invariant_linear(rows[:, :0], torch.randn(64, 96).to(dtype)).shape == (4, 0, 64)


def _by_torch(way: Callable[[Tensor], Tensor], rows: Tensor, stack: Tensor) -> Tensor:
    """The way, with torch's products: outside of any bare weight's reach."""
    with torch._C.DisableTorchFunctionSubclass():
        return way(rows).as_subclass(Tensor)


def test_what_is_guarded() -> None:
    model = tiny.draw(tf.AutoModelForCausalLM.from_config, CONFIGS["qwen3_moe"]())
    assert guard_bare_weights(model) == 3 * 3
    assert isinstance(model.model.layers[0].mlp.gate.weight, BareWeight)
    assert isinstance(model.model.layers[0].mlp.gate.weight, nn.Parameter)
    assert not isinstance(model.lm_head.weight, BareWeight)


class Router(nn.Module):
    """Reads its layer's weight; the layer must keep one."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(64, 8, bias=False)
        self.other = nn.Linear(64, 64)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(self.other(hidden).type(torch.float32), self.classifier.weight.type(torch.float32))


def test_linear_layers_whose_weight_is_read() -> None:
    router = Router().bfloat16().requires_grad_(False)
    hidden = torch.randn(50, 64).bfloat16()
    expected = router(hidden)
    assert guard_bare_weights(router) == 1
    assert make_invariant(router, None).invariant
    assert isinstance(router.classifier.weight, BareWeight)
    torch.testing.assert_close(router(hidden), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_whole_models_are_promised_equal_bits(name: str, dtype: str) -> None:
    model = tiny.draw(tf.AutoModelForCausalLM.from_config, CONFIGS[name](), getattr(torch, dtype))
    runtime = build_runtime(model)
    assert runtime.promise.bitwise
    assert "experts: own kernel, packed" in runtime.kernels
