"""The real model gives transformers' own results, on prompts that cross its window of 512 tokens.

The engine's logits are read through the seam that the self-check uses: :meth:`ModelRunner.logits` takes a step plan and
returns one row per sampling sequence, so a plan per chunk, each with ``sample=True``, gives the logits at each chunk's
end.  The reference is one forward pass of the untouched transformers model over the same tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from e2e.conftest import REAL_MODEL, need_real_model, real_prompt
from e2e.support import make_llm
from ostinato.ids import RequestId, SlotId, Step
from ostinato.runtime.arena import Arena
from ostinato.runtime.load import Runtime
from ostinato.runtime.models import load_model, resolve
from ostinato.runtime.runner import ModelRunner
from ostinato.runtime.sampler import Sampler
from ostinato.sampling_params import SamplingParams
from ostinato.scheduler.plan import SequencePlan, StepPlan

NEW_TOKENS = 24
ENDS = (300, 511, 512, 513, 600, *range(680, 701))
"""Chunk ends: before, at and behind the window's edge, then one token at a time."""


def reference_model(dtype: torch.dtype) -> Any:
    model: Any = load_model(resolve(REAL_MODEL), dtype)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def theirs(_one_thread: None) -> Any:
    """transformers' own model in fp32."""
    need_real_model()
    return reference_model(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("length", [700, 500])
def test_greedy_tokens_equal_transformers(real_fp32: Runtime, theirs: Any, length: int) -> None:
    """700: the prompt crosses the window.  500: the answer does."""
    prompt = real_prompt(real_fp32, 60, "")[:length]
    with torch.inference_mode():
        answer = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    pages = real_fp32.layout.peak_pages(length + NEW_TOKENS, 256)
    with make_llm(real_fp32, pages, max_num_batched_tokens=256) as llm:
        output = llm.generate(prompt, sampling)[0]
    assert list(output.outputs[0].token_ids) == answer[0, length:].tolist()


def engine_logits(runtime: Runtime, prompt: list[int]) -> torch.Tensor:
    """Logits [len(ENDS), vocabulary] of the paged runtime at the chunks' ends, in scattered pages."""
    groups = runtime.layout.groups
    counts = [group.pages(ENDS[-1]) for group in groups]
    arena = Arena(runtime.layout, runtime.prepared.specs, sum(counts), poison=True)
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).split(counts)
    tables = tuple(tuple(SlotId(page) for page in part.tolist()) for part in order)
    runner = ModelRunner(runtime.prepared, arena, Sampler())
    rows = []
    for number, (begin, end) in enumerate(zip((0, *ENDS), ENDS, strict=False), 1):
        pages = tuple(() for _ in groups) if begin else tables
        sequence = SequencePlan(RequestId("forced"), begin, tuple(prompt[begin:end]), pages, not begin, sample=True)
        logits = runner.logits(StepPlan(Step(number), (sequence,)))
        assert logits is not None
        rows.append(logits[0].float())
    return torch.stack(rows)


def transformers_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        keep = torch.tensor([end - 1 for end in ENDS])
        logits: torch.Tensor = model(torch.tensor([prompt[: ENDS[-1]]]), logits_to_keep=keep).logits[0]
    return logits.float()


def test_bf16_logits_are_as_near_as_transformers_own(real_bf16: Runtime, theirs: Any) -> None:
    """Teacher-forced: the engine in bf16 is at most twice as far from fp32 as transformers in bf16 is."""
    prompt = real_prompt(real_bf16, 60, "")[: ENDS[-1]]
    exact = transformers_logits(theirs, prompt)
    rounded = transformers_logits(reference_model(torch.bfloat16), prompt)
    ours = engine_logits(real_bf16, prompt)
    allowed = 2 * float((rounded - exact).abs().max())
    assert 0 < float((ours - exact).abs().max()) <= allowed
    assert float((ours - rounded).abs().max()) <= allowed


@pytest.mark.slow
def test_fp32_logits_equal_transformers_up_to_rounding(real_fp32: Runtime, theirs: Any) -> None:
    prompt = real_prompt(real_fp32, 60, "")[: ENDS[-1]]
    exact = transformers_logits(theirs, prompt)
    assert torch.allclose(engine_logits(real_fp32, prompt), exact, rtol=0, atol=2e-3)
