"""A result does not depend on what was cached, batched, chunked, reloaded or preempted: equal to cold, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from e2e.conftest import real_prompt
from e2e.support import UNIT, WINDOW, Oracle, assert_at_rest, greedy, make_llm, same, settle, tokens
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.runtime.load import Runtime

BOUNDARY_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97)
CHUNKS = (16, 17, 31, 32, 33, 50, 64, 127, 200, 512)


def ask(llm: LLM, prompt: Sequence[int], max_tokens: int = 4) -> RequestOutput:
    """One request, and all stores behind it."""
    output = llm.generate(list(prompt), greedy(max_tokens))[0]
    settle(llm)
    return output


def fork(shared: int, tail: int, seed: int) -> list[int]:
    """The first ``shared`` tokens of seed 0, then ``tail`` others."""
    return tokens(shared) + tokens(tail, seed)


@pytest.fixture
def warm(tiny: Runtime) -> Iterator[LLM]:
    """An engine with a host tier, closed and checked for leaks afterwards."""
    with make_llm(tiny, kv=["host:16MiB"]) as llm:
        yield llm
        settle(llm)
        assert_at_rest(llm)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunking_changes_nothing(tiny: Runtime, cold: Oracle, chunk: int) -> None:
    with make_llm(tiny, max_num_batched_tokens=chunk, enable_prefix_caching=False) as llm:
        for length in (33, 200):
            prompt = tokens(length)
            assert same(ask(llm, prompt, 3), cold(prompt, 3)), length


@pytest.mark.parametrize("chunk", [19, 64, 512])
def test_a_batch_changes_nothing(tiny: Runtime, cold: Oracle, chunk: int) -> None:
    """All lengths together, prefill chunks and decodes mixed, some prompts prefixes of others."""
    prompts = [tokens(length, seed) for length in BOUNDARY_LENGTHS for seed in (0, 1)]
    for caching in (False, True):
        with make_llm(tiny, max_num_batched_tokens=chunk, enable_prefix_caching=caching) as llm:
            outputs = llm.generate(prompts, greedy())
            wrong = [len(p) for p, output in zip(prompts, outputs, strict=True) if not same(output, cold(p))]
            assert not wrong, wrong
            assert_at_rest(llm)


@pytest.mark.parametrize("length", BOUNDARY_LENGTHS)
def test_the_same_prompt_from_device_and_from_host(warm: LLM, cold: Oracle, length: int) -> None:
    prompt = tokens(length)
    reusable = (length - 1) // UNIT * UNIT
    assert same(ask(warm, prompt), cold(prompt))
    device = ask(warm, prompt)
    assert same(device, cold(prompt))
    assert device.cached_by_tier == ({"device": reusable} if reusable else {})
    warm.reset_prefix_cache(device_only=True)
    host = ask(warm, prompt)
    assert same(host, cold(prompt))
    assert host.cached_tokens == reusable
    assert host.cached_by_tier.get("host", 0) == reusable


@pytest.mark.parametrize("cut", [*range(0, 161, 16), 1, 15, 17, 31, 33, 100, 111, 113, 159])
def test_a_cut_in_the_middle_of_a_stored_prompt(warm: LLM, cold: Oracle, cut: int) -> None:
    """Each cut of a stored prompt, aligned or not, first from the host, then from the device."""
    ask(warm, tokens(200))
    warm.reset_prefix_cache(device_only=True)
    prompt = fork(cut, 20, seed=5)
    host, device = ask(warm, prompt), ask(warm, prompt)
    assert host.cached_tokens == cut // UNIT * UNIT
    assert host.cached_by_tier.get("device", 0) == 0 or host.cached_tokens > WINDOW
    assert same(host, cold(prompt))
    assert same(device, cold(prompt))


@pytest.mark.parametrize("head", [16, 48, 80, 112])
def test_a_hit_of_both_tiers(warm: LLM, cold: Oracle, head: int) -> None:
    """The head of the prompt is on the device, the rest in host memory only."""
    ask(warm, tokens(192))
    warm.reset_prefix_cache(device_only=True)
    ask(warm, fork(head, 20, seed=6))
    for prompt in (tokens(192), fork(176, 40, seed=7)):
        mixed = ask(warm, prompt)
        assert same(mixed, cold(prompt))
        assert mixed.cached_tokens == 176
        assert sum(mixed.cached_by_tier.values()) == mixed.cached_tokens
    assert mixed.cached_by_tier == {"device": 176}


def test_a_mixed_hit_names_both_tiers(warm: LLM, cold: Oracle) -> None:
    ask(warm, tokens(192))
    warm.reset_prefix_cache(device_only=True)
    ask(warm, fork(64, 20, seed=6))
    mixed = ask(warm, tokens(192))
    assert mixed.cached_by_tier == {"device": 64, "host": 112}
    assert same(mixed, cold(tokens(192)))


def test_only_what_the_kinds_require_is_loaded(warm: LLM, tiny: Runtime, cold: Oracle) -> None:
    """Window groups bring back their last blocks, the full group all of its own."""
    ask(warm, tokens(300))
    warm.reset_prefix_cache(device_only=True)
    host = ask(warm, tokens(300))
    required = [sum(high - low for low, high in g.kind.required(288, UNIT)) for g in tiny.layout.groups]
    assert host.blocks_by_group == tuple(required)
    assert host.bytes_loaded == sum(n * g.unit_bytes for n, g in zip(required, tiny.layout.groups, strict=True))
    assert same(host, cold(tokens(300)))


def test_many_at_once_from_the_host(warm: LLM, cold: Oracle) -> None:
    """Requests that share loads with one another, in one batch."""
    ask(warm, tokens(160))
    warm.reset_prefix_cache(device_only=True)
    prompts = [fork(cut, 10 + cut % 7, seed=cut) for cut in (160, 32, 33, 64, 96, 160, 128, 0)]
    for prompt, output in zip(prompts, warm.generate(prompts, greedy()), strict=True):
        assert same(output, cold(prompt)), len(prompt)


@pytest.mark.parametrize("answer", [1, 15, 16, 17, 33])
def test_an_answer_is_reused_too(warm: LLM, cold: Oracle, answer: int) -> None:
    """The next turn of a chat: prompt and answer are its prefix; decoded blocks equal prefilled ones."""
    first = ask(warm, tokens(40), answer)
    turn = tokens(40) + list(first.outputs[0].token_ids) + tokens(9, seed=3)
    reusable = (40 + answer - 1) // UNIT * UNIT
    for reset in (False, True):
        if reset:
            warm.reset_prefix_cache(device_only=True)
        again = ask(warm, turn)
        assert same(again, cold(turn)), reset
        assert again.cached_tokens >= reusable


@pytest.mark.parametrize(("caching", "tier"), [(False, ()), (True, ()), (True, ("host:16MiB",))])
def test_preemption_changes_nothing(tiny: Runtime, cold: Oracle, caching: bool, tier: tuple[str, ...]) -> None:
    """Four prompts whose answers outgrow the pool together."""
    prompts = [tokens(60, seed) for seed in range(4)]
    pages = tiny.layout.peak_pages(60 + 48, 64)
    with make_llm(tiny, pages, max_num_batched_tokens=64, enable_prefix_caching=caching, kv=list(tier)) as llm:
        outputs = llm.generate(prompts, greedy(48))
        assert sum(output.metrics.preemptions for output in outputs) > 0
        for prompt, output in zip(prompts, outputs, strict=True):
            assert same(output, cold(prompt, 48))
        settle(llm)
        assert_at_rest(llm)


def test_lazy_stores_are_exact(tiny: Runtime, cold: Oracle) -> None:
    """The pool forgets each prompt while the next one runs; the tier gets blocks only then."""
    prompts = [tokens(150, seed) for seed in range(5)]
    pages = tiny.layout.peak_pages(154, 64) * 3 // 2
    with make_llm(tiny, pages, max_num_batched_tokens=64, kv=["host:16MiB?store=lazy"]) as llm:
        outputs = [ask(llm, prompt) for _ in range(2) for prompt in prompts]
        for prompt, output in zip(prompts * 2, outputs, strict=True):
            assert same(output, cold(prompt))
        assert sum(output.cached_by_tier.get("host", 0) for output in outputs) > 0
        assert_at_rest(llm)


def test_sampling_with_a_seed_is_repeated(warm: LLM) -> None:
    """A seeded draw sees the same logits, so it gives the same tokens from every tier."""
    from ostinato.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=12, ignore_eos=True)
    results = []
    for _ in range(2):
        results += [warm.generate(tokens(70), sampling)[0].outputs[0].token_ids for _ in range(2)]
        settle(warm)
        warm.reset_prefix_cache(device_only=True)
    assert len(set(results)) == 1


# The real model: window 512, so prompts here cross it.


def test_the_real_model_in_brief(real_bf16: Runtime) -> None:
    """Cold, batched, device, host and a cut in the middle, on prompts beyond the window."""
    long, middle = real_prompt(real_bf16, 52, "Then"), real_prompt(real_bf16, 40, "But what of the sea?")
    pages = real_bf16.layout.peak_pages(len(long) + 8, 512) * 2
    oracle = Oracle(real_bf16, pages)
    assert len(long) > 700 > 512 < len(middle)
    options = {"kv": ["host:128MiB"], "max_num_batched_tokens": 300}
    with make_llm(real_bf16, pages, **options) as llm:
        assert same(ask(llm, long), oracle(long))
        assert same(ask(llm, long), oracle(long))
        llm.reset_prefix_cache(device_only=True)
        host = ask(llm, middle)
        common = sum(1 for _ in iter_common(long, middle))
        assert host.cached_tokens == common // UNIT * UNIT > 512
        assert same(host, oracle(middle))
        both = llm.generate([long, middle], greedy())
        assert [same(*pair) for pair in zip(both, (oracle(long), oracle(middle)), strict=True)] == [True, True]
        settle(llm)
        assert_at_rest(llm)


def iter_common(first: Sequence[int], second: Sequence[int]) -> Iterator[int]:
    for one, other in zip(first, second, strict=False):
        if one != other:
            return
        yield one
