"""Masks, biases and penalties against plain Python, and log-probabilities against a sort of everything."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.runtime.logprobs import token_logprobs
from ostinato.runtime.penalties import History, adjust, adjusts
from ostinato.runtime.sampler import Sampler, SampleRow
from ostinato.sampling_params import SamplingParams
from ostinato.scheduler.plan import Past

SIZE = 12
IDS = st.integers(0, SIZE - 1)
GRID = st.integers(-12, 12).map(lambda n: n / 4)


def f32(value: float) -> float:
    return float(np.float32(value))


def oracle(logits: list[float], params: SamplingParams, step: int, prompt: list[int], output: list[int]) -> list[float]:
    """By definition, one token at a time, rounding to fp32 after each operation."""
    values = list(logits)
    for token in range(SIZE):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            values[token] = -math.inf
        if step < params.min_tokens and token in params.stop_ids:
            values[token] = -math.inf
    masked = list(values)
    for words in params.bad_words_ids or ():
        if [*output, words[-1]][-len(words) :] == list(words):
            masked[words[-1]] = -math.inf
    if max(masked) > -math.inf:
        values = masked
    for token, bias in params.biases:
        values[token] = f32(values[token] + f32(bias))
    for token in range(SIZE):
        if token in prompt or token in output:
            penalty = f32(params.repetition_penalty)
            if math.isfinite(values[token]) and penalty != 1:
                values[token] = f32(values[token] / penalty if values[token] > 0 else values[token] * penalty)
        if token in output:
            values[token] = f32(values[token] - f32(output.count(token) * f32(params.frequency_penalty)))
            values[token] = f32(values[token] - f32(params.presence_penalty))
    return values


@st.composite
def cases(draw: Any) -> tuple[list[float], SamplingParams, list[int], list[int]]:
    logits = draw(st.lists(GRID, min_size=SIZE, max_size=SIZE))
    output = draw(st.lists(IDS, max_size=8))
    maybe = draw(st.sets(st.sampled_from(["allowed", "bad", "least", "bias", "repeat", "often", "present"])))
    stops = draw(st.lists(IDS, max_size=2, unique=True))
    allowed = (
        draw(st.lists(IDS.filter(lambda i: i not in stops), min_size=1, max_size=6)) if "allowed" in maybe else None
    )
    params = SamplingParams(
        temperature=0,
        max_tokens=99,
        stop_token_ids=stops,
        allowed_token_ids=allowed,
        bad_words_ids=draw(st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=4)) if "bad" in maybe else None,
        min_tokens=draw(st.integers(0, 9)) if "least" in maybe else 0,
        logit_bias=draw(st.dictionaries(IDS, st.integers(-400, 400).map(lambda n: n / 4))) if "bias" in maybe else None,
        repetition_penalty=draw(st.sampled_from([0.5, 1.1, 1.3, 2.0])) if "repeat" in maybe else 1.0,
        frequency_penalty=draw(st.sampled_from([-2.0, -0.3, 0.7, 2.0])) if "often" in maybe else 0.0,
        presence_penalty=draw(st.sampled_from([-2.0, -0.3, 0.7, 2.0])) if "present" in maybe else 0.0,
    )
    return logits, params, draw(st.lists(IDS, max_size=8)), output


@given(cases())
@settings(max_examples=400, deadline=None)
def test_each_step_is_the_definition(case: tuple[list[float], SamplingParams, list[int], list[int]]) -> None:
    logits, params, prompt, output = case
    history = History.of(Past(tuple(sorted(set(prompt))), tuple(output)))
    expected = oracle(logits, params, len(output), prompt, output)
    rows = torch.tensor(logits)
    found = adjust(rows, params, len(output), history).tolist()
    assert found == expected
    assert rows.tolist() == logits, "the model's own logits stay as they are"
    if not adjusts(params, len(output)):
        assert found == logits
    row = SampleRow(params, 0, len(output), history)
    (token,) = Sampler().sample(rows[None], [row])
    assert token == expected.index(max(expected))


@given(cases(), st.integers(0, 8))
@settings(max_examples=100, deadline=None)
def test_a_history_that_grew_is_one_that_was_given(
    case: tuple[list[float], SamplingParams, list[int], list[int]], cut: int
) -> None:
    """A request that goes on, and one that was preempted at any token."""
    logits, params, prompt, output = case
    seen = tuple(sorted(set(prompt)))
    grown = History.of(Past(seen, tuple(output[:cut])))
    for token in output[cut:]:
        grown.push(token)
    rows = torch.tensor(logits)
    whole = adjust(rows, params, len(output), History.of(Past(seen, tuple(output))))
    assert torch.equal(whole, adjust(rows, params, len(output), grown))


def test_an_absurd_penalty_leaves_numbers() -> None:
    for penalty in (1e-38, 1e38):
        params = SamplingParams(repetition_penalty=penalty, seed=1)
        history = History.of(Past((0, 1, 2), ()))
        logits = torch.tensor([3.0, -2.0, 0.0])
        assert adjust(logits, params, 0, history).isfinite().all()
        assert Sampler().sample(logits[None], [SampleRow(params, 1, 0, history)])[0] in (0, 1, 2)


def test_rows_that_are_adjusted_leave_others_alone() -> None:
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    plain = SamplingParams(temperature=0)
    biased = SamplingParams(temperature=0, logit_bias={7: 100})
    rows = [SampleRow(params, 0, 0) for params in (plain, biased, plain, biased)]
    best = Sampler().sample(logits, [SampleRow(plain, 0, 0)] * 4)
    assert Sampler().sample(logits, rows) == [best[0], 7, best[2], 7]


# ------------------------------------------------------------------------------------------------- log-probabilities


@given(st.lists(GRID, min_size=1, max_size=40), st.integers(-1, 45), st.randoms())
@settings(max_examples=200, deadline=None)
def test_logprobs_are_those_of_a_sort(values: list[float], count: int, random: Any) -> None:
    token = random.randrange(len(values))
    exact = np.array(values) - np.log(np.exp(np.array(values)).sum())
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    found = token_logprobs(torch.tensor(values), token, count)
    assert found.token == token
    assert found.logprob == pytest.approx(exact[token], abs=1e-6)
    assert found.rank == order.index(token) + 1
    wanted = order if count < 0 else order[:count]
    assert [i for i, _ in found.top] == wanted
    assert [value for _, value in found.top] == pytest.approx(exact[wanted], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_of_a_large_vocabulary_on_any_number_of_threads(dtype: torch.dtype) -> None:
    logits = (torch.randn(262_144, generator=torch.Generator().manual_seed(2)) * 4).to(dtype)
    exact = logits.double().log_softmax(0)
    threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(token_logprobs(logits, 77, 20))
    finally:
        torch.set_num_threads(threads)
    assert results[0] == results[1] == results[2]
    assert results[0].logprob == pytest.approx(float(exact[77]), abs=1e-6)
    assert [value for _, value in results[0].top] == pytest.approx(exact.topk(20).values.tolist(), abs=1e-6)


def test_logprobs_of_masked_logits() -> None:
    found = token_logprobs(torch.tensor([-math.inf, 0.0, 0.0]), 0, 3)
    assert found.logprob == -math.inf
    assert found.rank == 3
    assert found.top[:2] == ((1, -math.log(2)), (2, -math.log(2)))
