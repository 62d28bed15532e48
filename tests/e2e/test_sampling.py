"""Sampling through the whole engine: each request's tokens and log-probabilities are its own, and what they should be.

The oracle of exactness is the same request alone, with caching off, computed in one chunk.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from e2e.conftest import real_prompt
from e2e.support import VOCABULARY, assert_at_rest, make_llm, settle, tokens
from ostinato.engine.live import Prompt
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import CompletionDelta, CompletionOutput, RequestOutput
from ostinato.errors import RequestError, SamplingError
from ostinato.runtime.load import Runtime, build_runtime
from ostinato.sampling_params import SamplingParams

EOS = 1
PROMPTS = [tokens(length, seed=length % 3) for length in (70, 33, 101, 5, 64, 87, 48)]


def sampling(max_tokens: int = 12, **more: Any) -> SamplingParams:
    """Hot enough for many tokens to be likely, so that a wrong count or mask changes what is drawn."""
    fields: dict[str, Any] = {"temperature": 1.5, "seed": 11, "ignore_eos": True, "logprobs": 3, "logits_digest": True}
    return SamplingParams(max_tokens=max_tokens, **(fields | more))


VARIED = [
    sampling(repetition_penalty=1.8, presence_penalty=0.7),
    sampling(temperature=0, frequency_penalty=1.9, repetition_penalty=1.3),
    sampling(min_p=0.02, frequency_penalty=-1.5),
    sampling(top_k=40, top_p=0.9, min_p=0.001, logit_bias={5: 4.0, 9: -100.0, 77: 3.0}),
    sampling(temperature=0, allowed_token_ids=list(range(40, 90)), presence_penalty=2),
    sampling(temperature=0, bad_words_ids=[[40], [41, 42]], allowed_token_ids=[40, 41, 42, 43], logprobs=0),
    sampling(ignore_eos=False, min_tokens=6, logit_bias={EOS: 100.0}, prompt_logprobs=2),
]


@pytest.fixture(scope="module")
def cold(tiny_fp32: Runtime) -> Iterator[LLM]:
    with make_llm(tiny_fp32, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture
def llm(tiny_fp32: Runtime) -> Iterator[LLM]:
    with make_llm(tiny_fp32) as made:
        yield made


@pytest.fixture(scope="module")
def expected(cold: LLM) -> list[RequestOutput]:
    return [cold.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, VARIED, strict=True)]


def assert_same(found: Sequence[RequestOutput], wanted: Sequence[RequestOutput]) -> None:
    """Tokens, the logits behind them and all log-probabilities, to the last bit."""
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.outputs == theirs.outputs
        assert mine.prompt_logprobs == theirs.prompt_logprobs


# ----------------------------------------------------------------------------------------------------------- exactness


def test_a_request_does_not_depend_on_the_batch(llm: LLM, expected: list[RequestOutput]) -> None:
    assert_same(llm.generate(PROMPTS, VARIED), expected)


def test_a_request_does_not_depend_on_what_was_cached(llm: LLM, expected: list[RequestOutput]) -> None:
    """Penalties count prompt tokens that the worker never saw."""
    for _ in range(2):
        again = [llm.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, VARIED, strict=True)]
        assert_same(again, expected)
    assert [output.cached_tokens > 0 for output in again] == [
        len(prompt) > 16 and params.prompt_logprobs is None for prompt, params in zip(PROMPTS, VARIED, strict=True)
    ]
    assert_at_rest(llm)


@pytest.mark.parametrize("step_tokens", [16, 37])
def test_a_request_does_not_depend_on_chunks(
    tiny_fp32: Runtime, expected: list[RequestOutput], step_tokens: int
) -> None:
    with make_llm(tiny_fp32, max_num_batched_tokens=step_tokens) as llm:
        assert_same(llm.generate(PROMPTS, VARIED), expected)


@pytest.mark.parametrize("caching", [False, True])
def test_a_preempted_request_goes_on_as_it_would_have(tiny_fp32: Runtime, cold: LLM, caching: bool) -> None:
    """Counts of tokens, seeds and bad words survive; so do log-probabilities of the prompt."""
    varied = [sampling(48, **options) for options in OPTIONS]
    prompts = [tokens(60, seed=seed) for seed in range(len(varied))]
    wanted = [cold.generate(prompt, params)[0] for prompt, params in zip(prompts, varied, strict=True)]
    pages = tiny_fp32.layout.peak_pages(60 + 48, 64)
    with make_llm(tiny_fp32, pages, max_num_batched_tokens=64, enable_prefix_caching=caching) as llm:
        found = llm.generate(prompts, varied)
        assert_at_rest(llm)
    assert sum(output.metrics.preemptions for output in found) > 0
    assert_same(found, wanted)


OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5, "frequency_penalty": 0.6},
    {"temperature": 0, "presence_penalty": 1.5, "repetition_penalty": 1.2},
    {"prompt_logprobs": 1, "frequency_penalty": 1.0},
    {"allowed_token_ids": [50, 51, 52, 53], "bad_words_ids": [[50, 51], [52, 52], [53, 50, 50]]},
]


def test_params_that_need_nothing_send_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    execute = llm.built.worker.execute

    def note(plan: Any) -> Any:
        plans.extend(plan.sequences)
        return execute(plan)

    monkeypatch.setattr(llm.built.engine.executor, "execute", note)
    llm.generate(tokens(40), sampling(3))
    assert all(plan.past is None and not plan.targets for plan in plans)
    plans.clear()
    llm.generate(tokens(40), sampling(3, presence_penalty=1.0, prompt_logprobs=0))
    assert plans[0].past is not None
    assert plans[0].past.prompt == (), "only a repetition penalty looks at the prompt"
    assert plans[0].targets == tuple(tokens(40)[1:])
    assert all(plan.past is None and not plan.targets for plan in plans[1:])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_everything_at_once(tiny_fp32: Runtime, cold: LLM, seed: int) -> None:
    """Random parameters in a pool that is too small, with a lower tier, small steps, aborts and late arrivals."""
    source = random.Random(seed)
    arrivals = {f"r{i}": (random_prompt(source), random_params(source)) for i in range(24)}
    pages = tiny_fp32.layout.peak_pages(PROMPT_MOST + ANSWER_MOST, 48)
    done: dict[str, RequestOutput] = {}
    with make_llm(tiny_fp32, pages, max_num_batched_tokens=48, kv=["host:2MiB"]) as llm:
        engine, waiting = llm.built.engine, list(arrivals)
        while waiting or engine.has_work:
            if waiting and source.random() < 0.3:
                name = waiting.pop()
                engine.add(name, Prompt(None, arrivals[name][0]), arrivals[name][1])
            done.update((output.request_id, output) for output in engine.step())
            if source.random() < 0.01:
                engine.abort(source.choice(list(arrivals)))
        settle(llm)
        assert_at_rest(llm)
    assert len(done) > 15
    assert sum(output.metrics.preemptions for output in done.values()) > 0
    for name, output in done.items():
        prompt, params = arrivals[name]
        alone = [cold.generate(prompt, params.completion(i))[0] for i in range(params.n)]
        assert output.prompt_logprobs == alone[0].prompt_logprobs
        assert output.outputs == tuple(replace(one.outputs[0], index=i) for i, one in enumerate(alone)), name


PROMPT_MOST, ANSWER_MOST = 100, 30


def random_prompt(source: random.Random) -> list[int]:
    shared = tokens(source.randint(1, PROMPT_MOST - 10), seed=source.randrange(2))
    return shared + [source.randrange(4, VOCABULARY) for _ in range(source.randrange(10))]


def random_params(source: random.Random) -> SamplingParams:
    choices: dict[str, list[Any]] = {
        "temperature": [0, 0.7, 1.5],
        "min_p": [0.0, 0.01],
        "top_k": [0, 50],
        "top_p": [1.0, 0.9],
        "repetition_penalty": [1.0, 1.5],
        "presence_penalty": [0.0, 1.0],
        "frequency_penalty": [0.0, -0.5, 1.5],
        "logit_bias": [None, {5: 5.0, 6: 3.0, 7: -100}],
        "allowed_token_ids": [None, list(range(4, 40))],
        "bad_words_ids": [None, [[5, 5], [6]]],
        "prompt_logprobs": [None, None, 1],
        "logprobs": [None, 0, 2],
        "n": [1, 1, 3],
        "min_tokens": [0, 1],
    }
    chosen = {name: source.choice(options) for name, options in choices.items()}
    return sampling(source.randint(1, ANSWER_MOST), **chosen, seed=source.randrange(1000))


# ------------------------------------------------------------------------------------------------ several completions


def test_n_completions_are_n_requests(llm: LLM, cold: LLM) -> None:
    prompt = tokens(70)
    params = sampling(9, n=4, repetition_penalty=1.4, prompt_logprobs=1)
    (output,) = llm.generate(prompt, params)
    single = [cold.generate(prompt, sampling(9, seed=11 + i, repetition_penalty=1.4))[0] for i in range(4)]
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    for completion, alone in zip(output.outputs, single, strict=True):
        assert completion.token_ids == alone.outputs[0].token_ids
        assert completion.logprobs == alone.outputs[0].logprobs
        assert completion.logits_sha256 == alone.logits_sha256
    assert len({completion.token_ids for completion in output.outputs}) == 4
    assert output.prompt_logprobs is not None
    assert output.logits_sha256 == single[0].logits_sha256
    assert_at_rest(llm)


def test_completions_share_the_prompts_blocks(llm: LLM) -> None:
    computed = count_computed(llm)
    llm.generate(tokens(80), sampling(5, n=4))
    # The prompt once, the end of it behind the last whole block for each other one, and all answers' tokens but one.
    assert sum(computed) == 80 + 3 * 16 + 4 * 4


def count_computed(llm: LLM) -> list[int]:
    counts: list[int] = []
    executor = llm.built.engine.executor
    execute = executor.execute

    def note(plan: Any) -> Any:
        counts.append(plan.num_tokens)
        return execute(plan)

    executor.execute = note  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_completions_are_aborted_together(llm: LLM, steps: int) -> None:
    engine = llm.built.engine
    engine.add("several", Prompt(None, tokens(70)), sampling(9, n=3))
    with pytest.raises(RequestError, match="in use"):
        engine.add("several", Prompt(None, tokens(7)), sampling(9))
    for _ in range(steps):
        assert not engine.step()
    assert engine.abort("several" if steps % 2 else "0_several")
    assert not engine.abort("several")
    assert not engine.has_work
    settle(llm)
    engine.step()
    assert_at_rest(llm)
    assert llm.built.worker._runner.num_sequences == 0


def test_completions_that_end_at_different_times(llm: LLM) -> None:
    (output,) = llm.generate(tokens(30), sampling(40, n=5, ignore_eos=False, logit_bias={EOS: 5.0}, temperature=1.0))
    lengths = [len(completion.token_ids) for completion in output.outputs]
    assert len(set(lengths)) > 1
    assert [len(completion.logprobs or ()) for completion in output.outputs] == lengths
    assert_at_rest(llm)


# ------------------------------------------------------------------------------------------- against transformers


@pytest.fixture(scope="module")
def theirs() -> Any:
    """A tiny model that both sides run."""
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        initializer_range=0.1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    torch.manual_seed(3)
    return Gemma3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ours(theirs: Any) -> Runtime:
    model = Gemma3ForCausalLM(copy.deepcopy(theirs.config))
    model.load_state_dict(theirs.state_dict())
    return build_runtime(model.eval())


def log_softmax(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits.double().log_softmax(-1)


def assert_scores(found: Mapping[int, Any], exact: torch.Tensor, token: int, count: int) -> None:
    """``found`` tells of ``token`` and of the ``count`` most probable ones, as ``exact`` [V] has them."""
    best = exact.topk(count).indices.tolist()
    assert list(found) == list(dict.fromkeys([token, *best]))
    for other, entry in found.items():
        assert entry.logprob == pytest.approx(float(exact[other]), abs=2e-4)
        assert entry.rank == int((exact > exact[other]).sum()) + 1


def test_logprobs_are_transformers_own(ours: Runtime, theirs: Any) -> None:
    """Of the raw logits, whatever is then done to them."""
    prompt = tokens(50)
    with make_llm(ours) as llm:
        output = llm.generate(prompt, sampling(8, logprobs=4, repetition_penalty=1.5, logit_bias={9: 2.0}))[0]
        everything = llm.generate(prompt, sampling(1, logprobs=-1))[0]
    completion = output.outputs[0]
    exact = log_softmax(theirs, [*prompt, *completion.token_ids])
    assert completion.logprobs is not None
    for i, (token, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        assert_scores(found, exact[len(prompt) - 1 + i], token, 4)
    sampled = sum(found[token].logprob for token, found in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(sampled, abs=1e-9)
    assert everything.outputs[0].logprobs is not None
    assert len(everything.outputs[0].logprobs[0]) == VOCABULARY


@pytest.mark.parametrize("step_tokens", [512, 24])
def test_prompt_logprobs_are_transformers_own(ours: Runtime, theirs: Any, step_tokens: int) -> None:
    """Also of a prompt that is cached; and what was computed for them serves others."""
    prompt = tokens(90)
    exact = log_softmax(theirs, prompt)
    with make_llm(ours, max_num_batched_tokens=step_tokens) as llm:
        first = llm.generate(prompt, sampling(2, prompt_logprobs=3))[0]
        settle(llm)
        again = llm.generate([tokens(30, seed=5), prompt], [sampling(2), sampling(2, prompt_logprobs=3)])[1]
        reused = llm.generate(prompt, sampling(2))[0]
        assert_at_rest(llm)
    assert first.prompt_logprobs == again.prompt_logprobs
    assert first.outputs == again.outputs == reused.outputs
    assert (again.cached_tokens, reused.cached_tokens) == (0, 80)
    assert reused.prompt_logprobs is None
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == len(prompt)
    for position in range(1, len(prompt)):
        found = first.prompt_logprobs[position]
        assert found is not None
        assert_scores(found, exact[position - 1], prompt[position], 3)


def test_a_repetition_penalty_is_transformers_own(ours: Runtime, theirs: Any) -> None:
    """Greedy, over prompt and output; also when the prompt is cached.  So are bad words."""
    prompt = tokens(40)
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 16, "min_new_tokens": 16}
    found = []
    with torch.inference_mode():
        plain = theirs.generate(ids, **options)[0, 40:].tolist()
        penalised = theirs.generate(ids, repetition_penalty=1.6, **options)[0, 40:].tolist()
        bad = [[plain[3]], plain[8:10]]
        without = theirs.generate(ids, bad_words_ids=bad, **options)[0, 40:].tolist()
    with make_llm(ours) as llm:
        # What transformers bans to reach its least length, the bias forbids here.
        for params in ({}, {"repetition_penalty": 1.6}, {"repetition_penalty": 1.6}, {"bad_words_ids": bad}):
            output = llm.generate(prompt, sampling(16, temperature=0, logit_bias={EOS: -100}, **params))[0]
            found.append(list(output.outputs[0].token_ids))
    assert found == [plain, penalised, penalised, without]
    assert len({tuple(one) for one in found}) == 3


def test_prompt_logprobs_of_one_token(llm: LLM) -> None:
    assert llm.generate([5], sampling(1, prompt_logprobs=0))[0].prompt_logprobs == (None,)


# --------------------------------------------------------------------------------------------------- what is generated


def answer(llm: LLM, **more: Any) -> CompletionOutput:
    return llm.generate(tokens(20), sampling(8, **more))[0].outputs[0]


def test_a_bias_forces_and_forbids(llm: LLM) -> None:
    assert answer(llm, logit_bias={77: 100}).token_ids == (77,) * 8
    free = answer(llm, temperature=0).token_ids
    without = answer(llm, temperature=0, logit_bias={free[0]: -100}).token_ids
    assert free[0] not in without


def test_only_allowed_tokens_come(llm: LLM) -> None:
    found = answer(llm, allowed_token_ids=[100, 101, 102]).token_ids
    assert set(found) <= {100, 101, 102}
    assert len(set(found)) > 1


def test_bad_words_do_not_come(llm: LLM) -> None:
    found = answer(llm, allowed_token_ids=[100, 101], bad_words_ids=[[100, 100], [101, 101]]).token_ids
    assert all(one != other for one, other in itertools.pairwise(found))
    assert answer(llm, allowed_token_ids=[100], bad_words_ids=[[100]]).token_ids == (100,) * 8


@pytest.mark.parametrize("least", [0, 1, 5, 8])
def test_nothing_ends_before_the_least_length(llm: LLM, least: int) -> None:
    for stop, stops in ((EOS, None), (40, [40])):
        found = answer(llm, ignore_eos=False, stop_token_ids=stops, logit_bias={stop: 100}, min_tokens=least)
        assert len(found.token_ids) == min(8, least + 1)
        assert stop not in found.token_ids[:least]
        assert found.finish_reason == ("stop" if least < 8 else "length")


def test_a_frequency_penalty_makes_tokens_rare(llm: LLM) -> None:
    options = {"allowed_token_ids": [60, 61, 62, 63], "temperature": 0}
    often = answer(llm, logit_bias={60: 3.0}, **options)
    evenly = answer(llm, logit_bias={60: 3.0}, frequency_penalty=2.0, presence_penalty=2.0, **options)
    assert often.token_ids.count(60) > evenly.token_ids.count(60)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {VOCABULARY: 1.0}}, "logit_bias must be from 0 to 511 for this model, not 512"),
        ({"allowed_token_ids": [5, 900]}, "allowed_token_ids must be from 0 to 511 for this model, not 900"),
        ({"stop_token_ids": [512]}, "stop_token_ids must be from 0 to 511"),
        ({"bad_words_ids": [[1, 512]]}, "bad_words_ids must be from 0 to 511"),
        ({"logprobs": 513}, "logprobs must be at most the vocabulary's 512 tokens"),
        ({"prompt_logprobs": 513}, "prompt_logprobs must be at most"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1, "ignore_eos": False}, "min_tokens"),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused(llm: LLM, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingError, match=message):
        llm.generate([tokens(5), tokens(6)], [sampling(), sampling(**fields)])
    assert_at_rest(llm)


def test_bad_words_need_a_tokenizer(llm: LLM) -> None:
    with pytest.raises(RequestError, match="bad_words_ids"):
        answer(llm, bad_words=["no"])


# ------------------------------------------------------------------------------------------------------------ watching


@pytest.mark.parametrize("n", [1, 3])
def test_deltas_add_up_to_the_output(llm: LLM, n: int) -> None:
    engine = llm.built.engine
    heard: list[CompletionDelta] = []
    engine.add("watched", Prompt(None, tokens(70)), sampling(7, n=n))
    engine.add("other", Prompt(None, tokens(40)), sampling(3))
    engine.watch("watched", heard.append)
    finished: dict[str, RequestOutput] = {}
    while engine.has_work:
        before = len(heard)
        for output in engine.step():
            finished[output.request_id] = output
        assert len(heard) - before <= n
    for completion in finished["watched"].outputs:
        mine = [delta for delta in heard if delta.index == completion.index]
        assert tuple(token for delta in mine for token in delta.token_ids) == completion.token_ids
        assert tuple(found for delta in mine for found in delta.logprobs or ()) == completion.logprobs
        assert "".join(delta.text for delta in mine) == completion.text
        assert [delta.finish_reason for delta in mine] == [None] * 6 + ["length"]
    assert len(heard) == 7 * n
    with pytest.raises(RequestError, match="no request"):
        engine.watch("watched", heard.append)


def test_a_listener_may_abort_add_and_fail(llm: LLM, cold: LLM) -> None:
    engine = llm.built.engine
    for name in ("ends", "stays", "fails"):
        engine.add(name, Prompt(None, tokens(40)), sampling(5, n=2))
    heard: list[str] = []

    def abort(delta: CompletionDelta) -> None:
        heard.append(delta.request_id)
        assert engine.abort("ends")
        engine.add("new", Prompt(None, tokens(40)), sampling(5))

    def fail(delta: CompletionDelta) -> None:
        heard.append(delta.request_id)
        raise ZeroDivisionError

    engine.watch("ends", abort)
    engine.watch("fails", fail)
    finished: dict[str, RequestOutput] = {}
    while engine.has_work:
        finished.update((output.request_id, output) for output in engine.step())
    assert heard == ["ends", "fails"]
    assert finished.keys() == {"stays", "fails", "new"}
    assert finished["new"].outputs == cold.generate(tokens(40), sampling(5))[0].outputs
    assert_at_rest(llm)


def test_decoded_tokens_and_text(real_bf16: Runtime) -> None:
    """The real model: text in log-probabilities, bad words in text, an output without text."""
    prompt = "The capital of France is"
    params = {"temperature": 0.0, "max_tokens": 6, "logprobs": 2}
    with make_llm(real_bf16, pages=200) as llm:
        free = llm.generate(prompt, SamplingParams(**params))[0].outputs[0]
        assert free.logprobs is not None
        entries = [found[token] for token, found in zip(free.token_ids, free.logprobs, strict=True)]
        assert "".join(str(entry.decoded_token) for entry in entries) == free.text
        assert all(entry.rank == 1 for entry in entries)
        assert "capital" in free.text
        other = llm.generate(prompt, SamplingParams(**params, bad_words=["capital"]))[0].outputs[0]
        assert "capital" not in other.text
        silent = llm.generate(prompt, SamplingParams(**params, detokenize=False))[0].outputs[0]
        assert silent.token_ids == free.token_ids
        assert silent.text == ""
        assert silent.logprobs is not None
        assert all(entry.decoded_token is None for found in silent.logprobs for entry in found.values())
    assert math.isfinite(free.cumulative_logprob or math.nan)


@pytest.mark.slow
def test_scores_of_a_real_prompt_do_not_depend_on_chunks(real_bf16: Runtime) -> None:
    """Hundreds of rows through the head at once, or a few: the same bits."""
    prompt = real_prompt(real_bf16, 30, "")[:300]
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=1, prompt_logprobs=1, detokenize=False)
    found = []
    for step_tokens in (512, 64, 17):
        with make_llm(real_bf16, pages=200, max_num_batched_tokens=step_tokens) as llm:
            found.append(llm.generate(prompt, params)[0])
    assert found[0].prompt_logprobs == found[1].prompt_logprobs == found[2].prompt_logprobs
    assert found[0].outputs == found[1].outputs == found[2].outputs
