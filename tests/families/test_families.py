"""Every family, whatever its layers keep: a result is the cold one, bit for bit, from every schedule and every tier.

Prompts are a few windows and chunks long, and not whole hash units.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from e2e.support import UNIT, assert_at_rest, greedy, make_llm, same, settle
from families.configs import FAMILIES, VOCABULARY
from families.conftest import Subject
from ostinato.cache.kinds import describe
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput

LENGTH = 105
STEPS = (5, 19, 50)


def tokens(count: int, seed: int = 0) -> list[int]:
    """``count`` token ids; a longer list of the same seed begins with a shorter one."""
    source = random.Random(seed)
    return [source.randrange(4, VOCABULARY) for _ in range(count)]


def fork(shared: int, tail: int, seed: int) -> list[int]:
    """The first ``shared`` tokens of seed 0, then ``tail`` others."""
    return tokens(shared) + tokens(tail, seed)


def ask(llm: LLM, prompt: Sequence[int], max_tokens: int = 4) -> RequestOutput:
    """One request, and all stores behind it."""
    output = llm.generate(list(prompt), greedy(max_tokens))[0]
    settle(llm)
    return output


def whole_units(count: int) -> int:
    return count // UNIT * UNIT


def reused(output: RequestOutput, tier: str) -> int:
    """Tokens that were not computed; some of them, and nothing slower, came from ``tier``.

    Not all: tokens that no layer needs any more (all windows have passed them) count for the fastest tier.
    """
    assert output.cached_by_tier.get(tier, 0) > 0, output.cached_by_tier
    assert tier == "host" or set(output.cached_by_tier) == {tier}
    return output.cached_tokens


@pytest.fixture
def warm(subject: Subject) -> Iterator[LLM]:
    """An engine with a host tier and steps that cut prompts at odd places; checked for leaks afterwards."""
    with make_llm(subject.runtime, kv=["host:8MiB"], max_num_batched_tokens=43) as llm:
        yield llm
        settle(llm)
        assert_at_rest(llm)


def test_the_layers_are_understood(subject: Subject) -> None:
    """The groups are of the kinds that the family is here for, and the promise is the strong one."""
    kinds = {describe(group.kind).split()[0] for group in subject.runtime.layout.groups}
    assert kinds == set(FAMILIES[subject.name].kinds)
    assert subject.runtime.promise.bitwise, subject.runtime.promise


def test_tokens_are_those_of_transformers(subject: Subject) -> None:
    if subject.dtype != torch.float32:
        pytest.skip("in bf16 two correct programs may part at a near tie")
    for length in (1, 17, LENGTH):
        prompt = torch.tensor([tokens(length)])
        with torch.inference_mode():
            result = subject.untouched.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
            )
        assert list(subject.cold(tokens(length), 12).outputs[0].token_ids) == result[0, length:].tolist(), length


@pytest.mark.parametrize("step", STEPS)
def test_chunking_changes_nothing(subject: Subject, step: int) -> None:
    with make_llm(subject.runtime, max_num_batched_tokens=step, enable_prefix_caching=False) as llm:
        assert same(ask(llm, tokens(LENGTH)), subject.cold(tokens(LENGTH)))


def test_a_batch_changes_nothing(subject: Subject) -> None:
    """Prefill chunks and decodes mixed, some prompts prefixes of others."""
    prompts = [tokens(length, seed) for length, seed in ((1, 0), (16, 1), (47, 0), (64, 1), (LENGTH, 0), (130, 2))]
    for caching in (False, True):
        with make_llm(subject.runtime, max_num_batched_tokens=29, enable_prefix_caching=caching) as llm:
            outputs = llm.generate(prompts, greedy())
            wrong = [len(p) for p, output in zip(prompts, outputs, strict=True) if not same(output, subject.cold(p))]
            assert not wrong, (caching, wrong)
            assert_at_rest(llm)


def test_the_same_prompt_again(subject: Subject, warm: LLM) -> None:
    """From the device, and from the host after the device forgot it."""
    prompt, cold = tokens(LENGTH), subject.cold(tokens(LENGTH))
    assert same(ask(warm, prompt), cold)
    for _ in range(2):
        device = ask(warm, prompt)
        assert same(device, cold)
        assert reused(device, "device") == whole_units(LENGTH - 1)
    for _ in range(2):
        assert warm.reset_prefix_cache(device_only=True)
        host = ask(warm, prompt)
        assert same(host, cold)
        assert reused(host, "host") == whole_units(LENGTH - 1)


def test_a_prompt_that_shares_a_part(subject: Subject, warm: LLM) -> None:
    """Where two prompts parted, the third one resumes at the latest; from the host too."""
    ask(warm, tokens(LENGTH))
    for shared, seed in ((70, 5), (70, 6), (33, 7), (33, 8)):
        prompt = fork(shared, 25, seed)
        output = ask(warm, prompt)
        assert same(output, subject.cold(prompt)), (shared, seed)
        if seed in (6, 8):
            assert reused(output, "device") == whole_units(shared)
            warm.reset_prefix_cache(device_only=True)
            third = fork(shared, 18, seed + 10)
            output = ask(warm, third)
            assert same(output, subject.cold(third)), (shared, seed)
            assert reused(output, "host") == whole_units(shared)


def test_a_prompt_that_other_traffic_evicted(subject: Subject) -> None:
    """A device pool for hardly more than one request, and lazy stores: blocks go down only when they must."""
    prompts = [tokens(LENGTH, seed) for seed in range(3)]
    pages = subject.runtime.layout.peak_pages(LENGTH + 4, 40) * 4 // 3
    for store in ("eager", "lazy"):
        options = {"kv": [f"host:8MiB?store={store}"], "max_num_batched_tokens": 40}
        with make_llm(subject.runtime, pages, **options) as llm:
            outputs = [ask(llm, prompt) for _ in range(2) for prompt in prompts]
            for prompt, output in zip(prompts * 2, outputs, strict=True):
                assert same(output, subject.cold(prompt)), store
            assert sum(output.cached_by_tier.get("host", 0) for output in outputs[3:]) > 0, store
            assert_at_rest(llm)


@pytest.mark.parametrize("tier", [(), ("host:8MiB",)], ids=["recomputed", "reloaded"])
def test_preemption_changes_nothing(subject: Subject, tier: tuple[str, ...]) -> None:
    """Three requests whose answers outgrow the pool together."""
    # Prompts of less than a unit: of recurrent state, a longer one never takes more pages again.
    prompts, answer = [tokens(12, seed) for seed in range(3)], 30
    pages = subject.runtime.layout.peak_pages(12 + answer, 32)
    with make_llm(subject.runtime, pages, max_num_batched_tokens=32, kv=list(tier)) as llm:
        outputs = llm.generate(prompts, greedy(answer))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert same(output, subject.cold(prompt, answer))
        assert sum(output.metrics.preemptions for output in outputs) > 0
        settle(llm)
        assert_at_rest(llm)


@pytest.mark.parametrize("answer", [9, 27])
def test_a_chat_goes_on(subject: Subject, warm: LLM, answer: int) -> None:
    """Prompt and answer are the next prompt's prefix; what decoding left behind equals what a prefill leaves."""
    first = ask(warm, tokens(60), answer)
    turn = tokens(60) + list(first.outputs[0].token_ids) + tokens(9, seed=3)
    for tier in ("device", "host"):
        output = ask(warm, turn)
        assert same(output, subject.cold(turn)), tier
        assert reused(output, tier) >= whole_units(60 + answer - 1)
        warm.reset_prefix_cache(device_only=True)
