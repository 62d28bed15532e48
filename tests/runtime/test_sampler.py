"""The sampler against a brute-force oracle that sorts the whole vocabulary, and its promises of independence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.runtime.penalties import History
from ostinato.runtime.sampler import (
    Sampler,
    SampleRow,
    first_argmax,
    radix_top_ids,
    request_seed,
    sample_row,
    sorted_top_ids,
    top_ids,
    uniform,
)
from ostinato.sampling_params import SamplingParams
from ostinato.scheduler.plan import Past

GRID = st.integers(-12, 12).map(lambda n: n / 4)
VALUES = st.lists(GRID, min_size=1, max_size=60)


def oracle_probabilities(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The distribution by definition: sort everything, cut at min-p, at top-k, then at top-p, in double precision."""
    values = logits.double().numpy()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if params.min_p > 0:
        odds = np.exp((values - values.max()) / params.temperature)
        order = [i for i in order if odds[i] >= params.min_p]
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = np.exp((values[order] - values[order[0]]) / params.temperature)
    weights /= weights.sum()
    if params.top_p < 1:
        # A boundary within rounding of the goal may fall on either side; tests keep clear of it.
        count = int(np.searchsorted(np.cumsum(weights), params.top_p - 1e-9)) + 1
        order, weights = order[:count], weights[:count] / weights[:count].sum()
    result = np.zeros(len(values))
    result[order] = weights
    return result


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny kernels only lose by waiting for a second thread on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows_of(params: SamplingParams, count: int, seed: int = 7) -> list[SampleRow]:
    return [SampleRow(params, seed, step) for step in range(count)]


@given(
    VALUES,
    st.integers(0, 70),
    st.sampled_from([0.1, 0.5, 0.837, 0.95, 1.0]),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([0.0, 0.03, 0.42, 1.0]),
)
@settings(max_examples=200, deadline=None)
def test_draws_are_in_the_oracles_support(
    values: list[float], top_k: int, top_p: float, temperature: float, min_p: float
) -> None:
    logits = torch.tensor(values)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    allowed = oracle_probabilities(logits, params)
    # Room for the one token that sits exactly on top-p's boundary.
    slack = replace(params, top_p=min(1.0, top_p * 1.000001))
    allowed = np.maximum(allowed, oracle_probabilities(logits, slack))
    for row in rows_of(params, 20):
        assert allowed[sample_row(logits, row)] > 0


Select = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
BOTH = pytest.mark.parametrize("select", [sorted_top_ids, radix_top_ids])


@BOTH
@given(values=VALUES, k=st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_top_k_is_the_sorted_prefix_with_ties_to_lower_ids(select: Select, values: list[float], k: int) -> None:
    k = min(k, len(values))
    ids = select(torch.tensor(values), torch.ones(len(values), dtype=torch.float64), k)
    assert ids.tolist() == sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])


@given(VALUES, st.sampled_from([0.1, 0.5, 0.9, 0.99]))
@settings(max_examples=150, deadline=None)
def test_both_selections_find_the_same_nucleus(values: list[float], top_p: float) -> None:
    logits = torch.tensor(values)
    mass = (logits - logits.max()).exp().double()
    goal = top_p * float(mass.sum())
    # A goal met exactly may round either way.
    if not any(abs(goal - held) < 1e-9 for held in mass.sort(descending=True).values.cumsum(0).tolist()):
        assert sorted_top_ids(logits, mass, goal).tolist() == radix_top_ids(logits, mass, goal).tolist()


@BOTH
def test_zeros_of_both_signs_tie(select: Select) -> None:
    ids = select(torch.tensor([-1.0, -0.0, 0.0, -0.0]), torch.ones(4, dtype=torch.float64), 2)
    assert ids.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 8.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.99])
def test_nucleus_is_minimal_on_a_large_vocabulary(dtype: torch.dtype, scale: float, top_p: float) -> None:
    values = (torch.randn(50_001, generator=torch.Generator().manual_seed(1)) * scale).to(dtype).float()
    mass = (values - values.max()).exp().double()
    goal = top_p * float(mass.sum())
    ids = top_ids(values, mass, goal)
    held, least = float(mass[ids].sum()), float(mass[ids].min())
    assert held >= goal * (1 - 1e-9)
    assert held - least < goal * (1 + 1e-9)
    outside = torch.ones(len(values), dtype=torch.bool)
    outside[ids] = False
    assert values[outside].max() <= values[ids].min()


@given(st.lists(VALUES.filter(lambda v: len(v) >= 8).map(lambda v: v[:8]), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_argmax_takes_the_first(rows: list[list[float]]) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        found = first_argmax(torch.tensor(rows, dtype=dtype)).tolist()
        assert found == [row.index(max(row)) for row in rows]


@pytest.mark.parametrize("columns", [1, 7, 512, 1000, 4096, 262_144])
def test_argmax_on_any_width(columns: int) -> None:
    logits = torch.randn(3, columns, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert first_argmax(logits).tolist() == expected


def test_argmax_of_a_row_with_nan_is_the_nan() -> None:
    logits = torch.tensor([[0.0, math.nan, 2.0, 2.0], [1.0, 3.0, 3.0, 0.0]])
    assert first_argmax(logits).tolist() == [1, 1]


def test_a_rows_token_does_not_depend_on_the_batch() -> None:
    logits = (torch.randn(9, 70_000, generator=torch.Generator().manual_seed(3)) * 3).to(torch.bfloat16)
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=40),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=100, top_p=0.8, temperature=0.7, min_p=0.01),
        SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.5),
        SamplingParams(logit_bias={5: 3.0}, presence_penalty=1.0, min_p=0.1),
    ]
    history = History.of(Past((1, 2, 3), (5, 9, 5)))
    rows = [SampleRow(kinds[i % len(kinds)], i, i * 3, history) for i in range(9)]
    sampler = Sampler()
    together = sampler.sample(logits, rows)
    assert together == [sampler.sample(logits[i : i + 1], [rows[i]])[0] for i in range(9)]
    backwards = sampler.sample(logits.flip(0), rows[::-1])
    assert together == backwards[::-1]
    assert together == sampler.sample(torch.cat((logits, logits), 1)[:, :70_000], rows)


def test_threads_do_not_change_tokens() -> None:
    logits = torch.randn(1, 262_144, generator=torch.Generator().manual_seed(4))
    rows = [SampleRow(SamplingParams(top_p=p), 5, step) for step in range(10) for p in (0.3, 0.97, 1.0)]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append([sample_row(logits[0], row) for row in rows])
    finally:
        torch.set_num_threads(threads)
    assert results[0] == results[1] == results[2]


def test_the_same_seed_and_step_give_the_same_token_and_others_differ() -> None:
    logits = torch.zeros(1000)
    params = SamplingParams()
    first = [sample_row(logits, row) for row in rows_of(params, 50)]
    assert first == [sample_row(logits, row) for row in rows_of(params, 50)]
    assert first != [sample_row(logits, row) for row in rows_of(params, 50, seed=8)]
    # Resuming after a preemption: only the number of tokens so far counts.
    assert sample_row(logits, SampleRow(params, 7, 33)) == first[33]


@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_top_k_of_one_is_greedy(top_p: float) -> None:
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    one = [SampleRow(SamplingParams(top_k=1, top_p=top_p), i, i) for i in range(20)]
    greedy = [SampleRow(SamplingParams(temperature=0), 0, 0)] * 20
    assert Sampler().sample(logits, one) == Sampler().sample(logits, greedy)
    # And the random path itself, which does not know that one is greedy.
    assert [sample_row(logits[i], one[i]) for i in range(20)] == first_argmax(logits).tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(top_k=12, top_p=0.9, temperature=1.7),
        SamplingParams(min_p=0.2),
        SamplingParams(min_p=0.1, top_k=6, top_p=0.8, temperature=1.4),
    ],
)
def test_frequencies_match_the_oracle(params: SamplingParams) -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(6))
    draws = 4000
    counts = np.bincount([sample_row(logits, row) for row in rows_of(params, draws)], minlength=20)
    expected = oracle_probabilities(logits, params) * draws
    assert (counts[expected == 0] == 0).all()
    seen = expected > 0
    freedom = int(seen.sum()) - 1
    statistic = float(((counts[seen] - expected[seen]) ** 2 / expected[seen]).sum())
    # Mean `freedom`, variance 2 * freedom; five deviations, and the seed is fixed.
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_uniform_numbers_are_spread() -> None:
    numbers = np.array([uniform(-3, step) for step in range(4000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.03
    assert abs(numbers.std() - 12**-0.5) < 0.02


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((600,), -math.inf)
    logits[[3, 599]] = 1.0
    for params in (SamplingParams(), SamplingParams(top_p=0.99), SamplingParams(top_k=50)):
        assert {sample_row(logits, row) for row in rows_of(params, 40)} == {3, 599}


def test_seeds_are_drawn_once_when_none_is_given() -> None:
    assert request_seed(SamplingParams(seed=-5)) == -5
    assert request_seed(SamplingParams()) != request_seed(SamplingParams())
    SampleRow(SamplingParams(), request_seed(SamplingParams()), 0)


def test_the_argmax_can_be_replaced() -> None:
    sampler = Sampler(argmax=lambda logits: torch.full((logits.shape[0],), 2))
    rows = [SampleRow(SamplingParams(temperature=0), 0, 0), SampleRow(SamplingParams(), 0, 0)]
    assert sampler.sample(torch.tensor([[9.0, 0.0, 0.0], [99.0, 0.0, 0.0]]), rows) == [2, 0]
