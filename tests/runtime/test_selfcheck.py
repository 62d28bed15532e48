"""The load-time check: what it drives, what it refuses, and when the promise is withdrawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from families.configs import build
from ostinato.errors import ModelRefusedError
from ostinato.ids import HOLE
from ostinato.runtime import attention_hook, load, selfcheck
from ostinato.runtime.load import build_runtime
from ostinato.runtime.runner import ModelRunner
from ostinato.runtime.scans import CpuScans, TorchScans
from ostinato.runtime.scans.base import StateIndex
from ostinato.scheduler.plan import StatePlan, StepPlan

LENGTH = 512


@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "mamba"])
def test_recurrent_state_is_driven_through_every_schedule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[tuple[int, int, StatePlan]] = []
    logits = ModelRunner.logits

    def noting(self: ModelRunner, plan: StepPlan, every: bool = False) -> Any:
        for sequence in plan.sequences:
            assert sequence.state is not None
            plans.append((sequence.start, sequence.start + len(sequence.tokens), sequence.state))
        return logits(self, plan, every)

    monkeypatch.setattr(ModelRunner, "logits", noting)
    runtime = build_runtime(build(name), max_model_len=LENGTH)
    assert runtime.promise.bitwise
    fresh = [plan for start, _, plan in plans if start == 0]
    assert all(set(plan.read) == {HOLE} for plan in fresh), "a sequence starts from zeros"
    middle = [(start, plan.stops) for start, _, plan in plans if len(plan.stops) > 1]
    assert middle
    (cut, checkpoint), _ = middle[0][1]
    assert middle[0][0] < cut
    assert cut % runtime.layout.granularity == 0
    resumed = [(start, plan) for start, _, plan in plans if plan.read == checkpoint]
    assert [start for start, _ in resumed] == [cut], "the checkpoint is read once, and never written again"
    assert all(page not in checkpoint for _, plan in resumed for page in plan.stops[-1][1] if page != HOLE)
    assert all(plan.stops[-1][0] == end for _, end, plan in plans)


Change = Callable[[StateIndex], StateIndex]


def _from_zeros(index: StateIndex) -> StateIndex:
    """A chunk starts from nothing instead of from its state."""
    return replace(index, read=torch.full_like(index.read, HOLE))


def _swapped(index: StateIndex) -> StateIndex:
    """The checkpoint and the state at the end of the chunk land in each other's pages."""
    return replace(index, pages=index.pages.flip(0)) if index.read.numel() == 1 else index


def _early(index: StateIndex) -> StateIndex:
    """A checkpoint is taken three tokens early: only the request that resumes there can tell."""
    if index.read.numel() > 1:
        return index
    return replace(index, stops=torch.cat([index.stops[:-1] - 3, index.stops[-1:]]))


@pytest.mark.parametrize("change", [_from_zeros, _swapped, _early])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_in_the_wrong_place_are_refused(
    dtype: torch.dtype, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = CpuScans.state_space

    def wrong(self: CpuScans, call: Any, states: torch.Tensor, index: StateIndex) -> torch.Tensor:
        return scan(self, call, states, change(index))

    monkeypatch.setattr(CpuScans, "state_space", wrong)
    with pytest.raises(ModelRefusedError, match="logits differ"):
        build_runtime(build("bamba", dtype), max_model_len=LENGTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_a_wrong_model_with_experts_is_refused(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row or two of a mixture may differ in 16 bits, but not half of them."""
    assert build_runtime(build(name, dtype), max_model_len=LENGTH).promise.bitwise

    def shifted(*args: Any, **kwargs: Any) -> Any:
        output, weights = right(*args, **kwargs)
        return output * 4, weights

    right = attention_hook.paged_attention
    monkeypatch.setattr(attention_hook, "paged_attention", shifted)
    with pytest.raises(ModelRefusedError, match="logits differ"):
        build_runtime(build(name, dtype), max_model_len=LENGTH)


def test_models_without_choices_are_judged_by_their_worst_row() -> None:
    model = build("qwen3_moe")
    runtime = build_runtime(model, max_model_len=LENGTH)
    plain = build_runtime(build("llama", torch.bfloat16), max_model_len=LENGTH)
    for prepared, layout in ((runtime.prepared, runtime.layout), (plain.prepared, plain.layout)):
        expected = selfcheck.Reference(tuple(range(2, 47)), tuple(range(50, 73)), torch.randn(45, 256))
        for chooses in (False, True):
            with pytest.raises(ModelRefusedError, match="logits differ"):
                selfcheck.check(prepared, layout, replace(expected, chooses=chooses))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "mamba"])
def test_scans_without_a_compiler_are_invariant_too(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "select_scans", lambda: (TorchScans(), "torch_scans"))
    assert build_runtime(build(name, dtype), max_model_len=LENGTH).promise.bitwise
    monkeypatch.setattr(TorchScans, "invariant", False)
    assert not build_runtime(build(name, dtype), max_model_len=LENGTH).promise.bitwise
