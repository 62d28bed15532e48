"""Elementwise functions and row sums: equal bits for a row wherever it stands, and no mode where none is needed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from families.configs import build
from ostinato.runtime import load
from ostinato.runtime.elementwise import AlignedMode, aligned, over_aligned_line
from ostinato.runtime.mixers import REPLACED
from ostinato.runtime.unaligned import align, find_unaligned

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.sigmoid": torch.sigmoid,
    "Tensor.sigmoid": lambda x: x.sigmoid(),
    "softplus": lambda x: functional.softplus(x, beta=2.0),
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "mish": functional.mish,
    "elu": functional.elu,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
    "pow": lambda x: x.abs().pow(1.7),
    "operator": lambda x: x.abs() ** -0.5,
    "base": lambda x: torch.pow(10.0, x),
    "reversed operator": lambda x: 1.5**x,
    "sigmoid_": lambda x: x.clone().sigmoid_(),
    "inplace": lambda x: functional.silu(x.clone(), inplace=True),
    "exp": torch.exp,
    "tanh": torch.tanh,
}
MODE = AlignedMode(frozenset())


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch(name: str, dtype: torch.dtype) -> None:
    draw, function = random.Random(name), FUNCTIONS[name]
    for width in (7, 60, 129):
        rows = (3 * torch.randn(700, width, generator=torch.Generator().manual_seed(width))).to(dtype)
        with MODE:
            whole = function(rows)
            for _ in range(12):
                count = draw.randint(1, 40)
                first = draw.randrange(700 - count)
                part = rows[first : first + count].clone()
                expected = whole[first : first + count]
                assert torch.equal(function(part), expected)
                # The same numbers with the rows side by side in memory, and as a slice of something wider.
                assert torch.equal(function(part.T.contiguous().T), expected)
                assert torch.equal(function(torch.cat([part, part], dim=1)[:, :width]), expected)
        assert torch.allclose(whole.float(), function(rows).float(), atol=1e-2)


def test_functions_in_place_change_what_they_were_given() -> None:
    values, silu = torch.linspace(-3, 3, 33), torch.linspace(-3, 3, 33)
    expected = values.sigmoid(), functional.silu(silu)
    with MODE:
        assert values.sigmoid_() is values
        assert functional.silu(silu, inplace=True) is silu
    torch.testing.assert_close((values, silu), expected)


def test_calls_with_several_tensors_and_empty_ones_are_left_alone() -> None:
    base, out = torch.full((3,), 2.0), torch.empty(3)
    with MODE:
        assert torch.equal(torch.pow(base, torch.arange(3.0)), torch.tensor([1.0, 2.0, 4.0]))
        torch.sigmoid(torch.zeros(3), out=out)
        assert torch.sigmoid(torch.empty(0, 4)).shape == (0, 4)
        assert torch.sigmoid(torch.tensor(0.0)).item() == 0.5
    assert torch.equal(out, torch.full((3,), 0.5))


@pytest.mark.parametrize("function", [Tensor.mean, Tensor.sum, Tensor.logsumexp], ids=lambda item: item.__name__)
def test_sums_over_numbers_that_lie_apart_do_not_depend_on_the_rows(function: Any) -> None:
    rows = torch.randn(64, 99, generator=torch.Generator().manual_seed(1))
    with MODE:
        whole = function(rows, -1)
        for count in (1, 2, 3, 7, 8, 17, 33):
            assert torch.equal(function(rows[:count].T.contiguous().T, -1), whole[:count])


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_ranges_of_all_threads_are_whole_vectors(threads: int) -> None:
    for count in (1, 127, 128, 16384, 16385, 32769, 100_003):
        whole = aligned(count, threads)
        parts = max(1, min(threads, -(-whole // 32768)))
        assert whole >= count
        assert -(-whole // parts) % 128 == 0
        assert whole <= 16384 or -(-whole // threads) % 128 == 0


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("width", [96, 1000, 2048])
def test_activations_do_not_depend_on_the_number_of_rows(threads: int, width: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for inner in (nn.SiLU(), nn.GELU(approximate="tanh")):
            rows = torch.randn(101, width, generator=torch.Generator().manual_seed(0))
            whole = over_aligned_line(inner, rows)
            assert torch.allclose(whole, inner(rows), atol=1e-5)
            for count in (1, 37, 64):
                assert torch.equal(over_aligned_line(inner, rows[:count]), whole[:count])
    finally:
        torch.set_num_threads(before)


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs: Tensor, scale: float = 2.0, *, shift: float = 0.5) -> Tensor:
        assert isinstance(super(), object)
        return scale * inputs * self.linear(inputs).sigmoid() + functional.softplus(inputs) ** 1.5 - shift


class _Named(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        gated: Tensor = inputs * ACT2FN["silu"](inputs)
        return gated


class _Plain(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.pow(2).relu()


def _gate(inputs: Tensor) -> Tensor:
    return inputs.sigmoid()


class _Indirect(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + _gate(inputs)


def test_only_modules_that_need_it_are_replaced_and_their_rows_are_alike() -> None:
    model = nn.Sequential(_Gate(), _Plain(), nn.SiLU(), _Named(), _Indirect())
    model[0].linear = nn.Identity()
    rows = torch.randn(900, 7, generator=torch.Generator().manual_seed(1))
    expected = model(rows)
    found = find_unaligned(model, lambda: model(rows[:5]))
    assert align(model, found) == ("0", "2", "3", "4*")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    whole = model(rows)
    torch.testing.assert_close(whole, expected)
    assert all(torch.equal(model(rows[first : first + 3]), whole[first : first + 3]) for first in range(0, 897, 3))
    assert torch.equal(model[0](rows, 3.0, shift=1.0), model[0](rows, scale=3.0, shift=1.0))


def test_calls_inside_of_functions_that_will_be_replaced_do_not_count() -> None:
    model = _Indirect()
    assert find_unaligned(model, lambda: model(torch.ones(3)), frozenset({"_gate"})).sites == frozenset()


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "jamba", "kimi_linear"])
def test_gates_of_recurrent_models_and_activations_are_found_and_cost_no_mode(family: str) -> None:
    model = build(family)
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
        names = align(model, find_unaligned(model, lambda: model(input_ids=ids, use_cache=False), REPLACED))
        result = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert any(name.endswith(("act_fn", "act")) for name in names)
    assert not any(name.endswith(("*", "_proj", "_layernorm", "embed_tokens")) for name in names), names


def test_experts_of_our_own_cost_no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute activations in whole vectors; what transformers' code in their place would need does not count."""
    done: list[str] = []

    def noting(*args: Any) -> tuple[str, ...]:
        done.extend(names := align(*args))
        return names

    monkeypatch.setattr(load, "align", noting)
    assert load.build_runtime(build("gpt_oss"), max_model_len=512).promise.bitwise
    assert not any(name.endswith("*") for name in done), done
