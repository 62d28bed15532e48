"""SamplingParams: defaults, normalisation, and one clear line for every wrong value."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from ostinato.errors import SamplingError
from ostinato.sampling_params import SamplingParams


def test_defaults_are_plain_sampling() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.seed, params.max_tokens) == (1.0, 1.0, 0, None, 16)
    assert params.stop_strings == ()
    assert params.stop_ids == ()
    assert params.skip_special_tokens
    assert not (params.ignore_eos)
    assert not (params.include_stop_str_in_output)
    assert not params.greedy
    assert not params.logits_digest


def test_stops_become_tuples_and_params_are_hashable() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2])
    assert params.stop_strings == ("a", "b")
    assert params.stop_ids == (1, 2)
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert hash(params) == hash(SamplingParams(stop=("a", "b"), stop_token_ids=(1, 2)))


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [({"temperature": 0}, True), ({"temperature": 1e-6}, True), ({"top_k": 1}, True), ({"temperature": 0.01}, False)],
)
def test_greedy(fields: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**fields).greedy is greedy


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 2},
        {"top_p": 1},
        {"top_k": -1},
        {"top_k": 10**9},
        {"seed": 0},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"stop": []},
        {"stop": ()},
        {"max_tokens": 1},
        {"stop_token_ids": []},
        {"n": 1},
        {"min_p": 0},
        {"min_p": 1},
        {"min_tokens": 16},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"repetition_penalty": 0.01},
        {"logit_bias": {0: 100, 5: -100.0}},
        {"logit_bias": [[3, 1.0]]},
        {"logprobs": 0},
        {"logprobs": -1, "prompt_logprobs": -1},
        {"detokenize": False, "stop_token_ids": [3]},
    ],
)
def test_edges_are_allowed(fields: dict[str, Any]) -> None:
    SamplingParams(**fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", bad) for bad in (-0.1, math.nan, math.inf, "1", None, True)),
        *(("top_p", bad) for bad in (0, -0.5, 1.01, math.nan, "0.5", None, True)),
        *(("top_k", bad) for bad in (-2, 1.5, "3", None, True, math.nan)),
        *(("seed", bad) for bad in (1.0, "1", True, 2**63, -(2**63) - 1)),
        *(("stop", bad) for bad in ("", [""], ["a", ""], ["a", 1], 3, b"x", {"a": 1})),
        *(("stop_token_ids", bad) for bad in (3, "3", [-1], [1.0], ["1"], [True])),
        *(("max_tokens", bad) for bad in (0, -1, 1.0, "9", None, True)),
        *(("n", bad) for bad in (0, -1, 1.0, "9", None, True)),
        *(("min_tokens", bad) for bad in (-1, 17, 1.0, None, True)),
        *(("min_p", bad) for bad in (-0.1, 1.1, math.nan, "0", None, True)),
        *(("presence_penalty", bad) for bad in (-2.1, 2.1, math.nan, math.inf, None, True)),
        *(("frequency_penalty", bad) for bad in (-2.1, 2.1, math.nan, math.inf, None, True)),
        *(("repetition_penalty", bad) for bad in (0, -1, math.nan, math.inf, None, True)),
        *(("logprobs", bad) for bad in (-2, 1.0, "1", True)),
        *(("prompt_logprobs", bad) for bad in (-2, 1.0, "1", True)),
        *(("allowed_token_ids", bad) for bad in ([], 3, [-1], [1.0], [True])),
        *(("bad_words", bad) for bad in ("", [""], 3, [1])),
        *(("bad_words_ids", bad) for bad in (3, [3], [[]], [[-1]], [["a"]])),
        *(
            ("logit_bias", bad)
            for bad in (3, [3], {"a": 1.0}, {1: "a"}, {-1: 0.0}, {1: 100.5}, {1: math.nan}, [(1, 2.0), (1, 2.0)])
        ),
        *(
            (name, bad)
            for name in (
                "ignore_eos",
                "skip_special_tokens",
                "include_stop_str_in_output",
                "logits_digest",
                "detokenize",
            )
            for bad in (None, 0, "yes")
        ),
    ],
)
def test_wrong_values_are_named(name: str, value: object) -> None:
    fields: dict[str, Any] = {name: value}
    with pytest.raises(SamplingError) as caught:
        SamplingParams(**fields)
    message = str(caught.value)
    assert message.startswith(f"{name} must be ")
    assert repr(value) in message
    assert "\n" not in message


def test_stop_strings_need_text() -> None:
    with pytest.raises(SamplingError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_what_is_kept_is_plain_and_hashable() -> None:
    params = SamplingParams(
        logit_bias={5: 1, 2: -3.5}, allowed_token_ids=[9, 3, 9], bad_words="no", bad_words_ids=[[1, 2], [3]]
    )
    assert params.biases == ((2, -3.5), (5, 1.0))
    assert params.allowed_token_ids == (3, 9)
    assert params.bad_words == ("no",)
    assert params.bad_words_ids == ((1, 2), (3,))
    assert hash(params) == hash(replace(params))
    assert params.adjusts
    assert not SamplingParams(min_p=0.1, top_k=3, logprobs=2).adjusts


@pytest.mark.parametrize("seed", [None, 0, -3, 2**63 - 1])
def test_completions_are_requests_with_seeds_in_a_row(seed: int | None) -> None:
    params = SamplingParams(n=3, seed=seed, prompt_logprobs=2)
    parts = [params.completion(index) for index in range(3)]
    assert [part.n for part in parts] == [1, 1, 1]
    assert [part.prompt_logprobs for part in parts] == [2, None, None]
    if seed is None:
        assert [part.seed for part in parts] == [None] * 3
    else:
        assert [part.seed for part in parts] == [(seed + i + 2**63) % 2**64 - 2**63 for i in range(3)]


def test_long_values_are_cut_short() -> None:
    with pytest.raises(SamplingError) as caught:
        SamplingParams(stop=["x" * 10_000, ""])
    assert len(str(caught.value)) < 200


def test_torch_is_not_imported() -> None:
    code = "import sys, ostinato.sampling_params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
