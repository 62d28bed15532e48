"""The Python door: forms of prompts, order, priorities, salts, stops, limits, resets, closing, sharing a runtime."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.support import UNIT, Oracle, assert_at_rest, greedy, make_llm, same, settle, tokens
from e2e.test_errors import run_command
from ostinato.connectors.api import Capabilities, Ownership
from ostinato.connectors.host import HostConnector
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.errors import RequestError
from ostinato.ids import TierId
from ostinato.runtime.load import Runtime
from ostinato.sampling_params import SamplingParams


@pytest.fixture
def llm(tiny_fp32: Runtime) -> Iterator[LLM]:
    with make_llm(tiny_fp32, kv=["host:16MiB"]) as made:
        yield made


@pytest.fixture(scope="module")
def real(real_bf16: Runtime) -> Iterator[LLM]:
    with make_llm(real_bf16, pages=600, kv=["host:64MiB"], max_model_len=600) as made:
        yield made


def test_forms_of_token_prompts(llm: LLM) -> None:
    ids = tokens(40)
    forms = (ids, tuple(ids), [ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}])
    outputs = [output for form in forms for output in llm.generate(form, greedy())]
    assert len(outputs) == len(forms)
    for output in outputs:
        assert same(output, outputs[0])
        assert output.prompt is None
        assert output.prompt_token_ids == tuple(ids)
        assert output.finished
    assert llm.generate([]) == []


def test_forms_of_text_prompts(real: LLM) -> None:
    text = "The river bends"
    assert real.runtime.tokenizer is not None
    ids = real.runtime.tokenizer(text).input_ids
    outputs = real.generate([text, {"prompt": text}, ids, {"prompt_token_ids": ids}], greedy(6))
    assert [output.prompt for output in outputs] == [text, text, None, None]
    assert all(same(output, outputs[0]) for output in outputs)
    assert outputs[0].outputs[0].text == outputs[2].outputs[0].text != ""
    assert real.generate(text, greedy(6))[0].outputs[0].text == outputs[0].outputs[0].text


def test_outputs_come_in_the_order_of_prompts(llm: LLM, cold_fp32: Oracle) -> None:
    """Also when later ones are done first; each with its own parameters."""
    lengths = [(90, 9), (3, 1), (50, 5), (17, 2), (64, 7)]
    finished: list[str] = []
    prompts = [tokens(length, seed=length) for length, _ in lengths]
    params = [greedy(count) for _, count in lengths]
    outputs = llm.generate(prompts, params, on_finished=lambda output: finished.append(output.request_id))
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in prompts]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [count for _, count in lengths]
    assert sorted(finished) == sorted(output.request_id for output in outputs)
    assert finished != [output.request_id for output in outputs]
    for prompt, (_, count), output in zip(prompts, lengths, outputs, strict=True):
        assert same(output, cold_fp32(prompt, count))


def test_priorities_decide_who_is_first(tiny_fp32: Runtime) -> None:
    """Lower comes first, as in vLLM; equal ones keep their order."""
    order: list[str] = []
    with make_llm(tiny_fp32, scheduling_policy="priority", max_num_seqs=1) as llm:
        ranks = [3, 1, 2, 1]
        outputs = llm.generate(
            [tokens(20, seed) for seed in range(4)],
            greedy(2),
            priority=ranks,
            on_finished=lambda output: order.append(output.request_id),
        )
    names = [output.request_id for output in outputs]
    assert order == [names[1], names[3], names[2], names[0]]


def test_fcfs_ignores_priorities(tiny_fp32: Runtime) -> None:
    order: list[str] = []
    with make_llm(tiny_fp32, max_num_seqs=1) as llm:
        prompts = [tokens(20, seed) for seed in range(3)]
        outputs = llm.generate(
            prompts, greedy(2), priority=[3, 2, 1], on_finished=lambda output: order.append(output.request_id)
        )
    assert order == [output.request_id for output in outputs]


def test_a_salt_isolates(llm: LLM) -> None:
    """Within a salt everything is reused, across salts nothing, on the device and in host memory."""
    prompt = tokens(100)
    for device_only in (None, True):
        if device_only:
            llm.reset_prefix_cache(device_only=True)
        for salt in ("", "one", "two"):
            again = llm.generate(prompt, greedy(), cache_salt=salt)[0]
            settle(llm)
            assert again.cached_tokens == (96 if device_only else 0), salt
            assert again.cached_by_tier == ({"host": 96} if device_only else {})
        inside = llm.generate(prompt, greedy(), cache_salt="two")[0]
        assert inside.cached_by_tier == {"device": 96}
    assert llm.generate(prompt, greedy(), cache_salt="three")[0].cached_tokens == 0


def test_what_is_reused_is_the_longest_common_prefix(llm: LLM, cold_fp32: Oracle) -> None:
    """Whole blocks of the longest prefix that any earlier sequence, prompt and answer, had in common."""
    source, seen = random.Random(8), list[tuple[int, ...]]()
    base = tokens(150)
    for turn in range(24):
        cut = source.randrange(len(base))
        prompt = base[:cut] + tokens(source.randint(1, 40), seed=100 + turn)
        if turn == 12:
            llm.reset_prefix_cache(device_only=True)
        output = llm.generate(prompt, greedy())[0]
        settle(llm)
        common = max((common_prefix(prompt, other) for other in seen), default=0)
        assert output.cached_tokens == min(common, len(prompt) - 1) // UNIT * UNIT, (turn, common)
        assert sum(output.cached_by_tier.values()) == output.cached_tokens == output.num_cached_tokens
        assert same(output, cold_fp32(prompt)), turn
        seen.append((*prompt, *output.outputs[0].token_ids[:-1]))


def common_prefix(one: list[int], other: tuple[int, ...]) -> int:
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


def test_no_reuse_when_caching_is_off(tiny_fp32: Runtime) -> None:
    with make_llm(tiny_fp32, enable_prefix_caching=False) as llm:
        outputs = [llm.generate(tokens(100), greedy())[0] for _ in range(2)]
        assert [output.cached_tokens for output in outputs] == [0, 0]
        assert same(*outputs)
        assert_at_rest(llm)
        assert not len(llm.built.hierarchy.core.directory)


def test_stop_strings_end_an_answer(real: LLM) -> None:
    prompt = "One, two, three, four, five, six,"
    free = real.generate(prompt, SamplingParams(temperature=0.0, max_tokens=24))[0].outputs[0]
    words = free.text.split()
    assert len(words) > 3, free.text
    stop = words[2]
    for include in (False, True):
        sampling = SamplingParams(temperature=0.0, max_tokens=24, stop=stop, include_stop_str_in_output=include)
        stopped = real.generate(prompt, sampling)[0].outputs[0]
        end = free.text.index(stop) + (len(stop) if include else 0)
        assert stopped.text == free.text[:end]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
        assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]


def test_stop_tokens_and_eos_end_an_answer(llm: LLM) -> None:
    free = llm.generate(tokens(33), greedy(8))[0].outputs[0]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=[free.token_ids[-1]])
    stopped = llm.generate(tokens(33), sampling)[0].outputs[0]
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[-1]) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", free.token_ids[-1])
    assert free.finish_reason == "length"


@pytest.mark.parametrize("length", [90, 99])
def test_max_model_len_clips_the_answer(tiny_fp32: Runtime, cold_fp32: Oracle, length: int) -> None:
    with make_llm(tiny_fp32, max_model_len=100) as llm:
        output = llm.generate(tokens(length), greedy(64))[0]
    completion = output.outputs[0]
    assert len(completion.token_ids) == 100 - length
    assert completion.finish_reason == "length"
    assert same(output, cold_fp32(tokens(length), 100 - length))


def test_reset_forgets(llm: LLM) -> None:
    def ask() -> RequestOutput:
        output = llm.generate(tokens(80), greedy())[0]
        settle(llm)
        return output

    assert ask().cached_tokens == 0
    assert llm.reset_prefix_cache(device_only=True) > 0
    assert ask().cached_by_tier == {"host": 64}
    assert llm.reset_prefix_cache() > 0
    assert ask().cached_tokens == 0
    assert_at_rest(llm)


def test_a_callback_may_reset_but_not_generate(llm: LLM, cold_fp32: Oracle) -> None:
    """Requests that are still running neither get lost nor keep the batch waiting for ever."""
    prompts = [tokens(20), tokens(60)]
    outputs = llm.generate(prompts, [greedy(1), greedy(9)], on_finished=lambda output: llm.reset_prefix_cache())
    assert same(outputs[0], cold_fp32(prompts[0], 1))
    assert same(outputs[1], cold_fp32(prompts[1], 9))
    with pytest.raises(RequestError, match="generate is running"):
        llm.generate(prompts, [greedy(1), greedy(9)], on_finished=lambda output: llm.generate(tokens(5)) and None)
    assert not llm.built.engine.has_work


def test_a_callback_that_aborts_others_does_not_keep_the_batch_waiting_for_ever(llm: LLM, cold_fp32: Oracle) -> None:
    engine = llm.built.engine

    def abort_all(output: object) -> None:
        for name in [str(name) for name in engine.scheduler.requests]:
            engine.abort(name)

    with pytest.raises(RequestError, match="aborted"):
        llm.generate([tokens(20), tokens(60)], [greedy(1), greedy(9)], on_finished=abort_all)
    assert same(llm.generate(tokens(60), greedy(9))[0], cold_fp32(tokens(60), 9))


class Ending(HostConnector):
    """A tier that says when it is closed, and fails where it is told to."""

    def __init__(self, name: str, calls: list[str], fails: str = "") -> None:
        super().__init__(2**20)
        self.capabilities = Capabilities(TierId(name), Ownership.OWNED)
        self.calls = calls
        self.fails = fails

    def make_mover(self, device: Any, notify: Any) -> Any:
        if self.fails == "make_mover":
            raise ZeroDivisionError
        mover: Any = super().make_mover(device, notify)
        stop = mover.close

        def close() -> None:
            stop()
            self.calls.append(f"{self.tier} mover")
            if self.fails == "mover":
                raise ZeroDivisionError

        mover.close = close
        return mover

    def close(self) -> None:
        self.calls.append(f"{self.tier} connector")
        if self.fails == "connector":
            raise ZeroDivisionError


@pytest.mark.parametrize("fails", ["", "mover", "connector"])
def test_all_tiers_are_closed_movers_first(tiny_fp32: Runtime, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    calls: list[str] = []
    tiers = {"one": Ending("one", calls, fails), "two": Ending("two", calls)}
    monkeypatch.setattr("ostinato.connectors.tiers.make_connector", tiers.__getitem__)
    with make_llm(tiny_fp32, kv=["one", "two"]) as llm:
        llm.generate(tokens(40), greedy())
    assert calls == ["one mover", "two mover", "one connector", "two connector"]


def test_an_engine_that_cannot_be_built_leaves_no_thread(tiny_fp32: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    tiers = {"one": Ending("one", calls), "two": Ending("two", calls, "make_mover")}
    monkeypatch.setattr("ostinato.connectors.tiers.make_connector", tiers.__getitem__)
    with pytest.raises(ZeroDivisionError):
        make_llm(tiny_fp32, kv=["one", "two"])
    assert calls == ["one mover"]


def test_closing_twice(tiny_fp32: Runtime) -> None:
    llm = make_llm(tiny_fp32, kv=["host:1MiB"])
    llm.generate(tokens(40), greedy())
    llm.close()
    llm.close()


def test_two_engines_share_a_runtime(tiny_fp32: Runtime, cold_fp32: Oracle) -> None:
    """Each has a pool of its own; turn by turn, one never sees the other's blocks."""
    with make_llm(tiny_fp32, kv=["host:4MiB"]) as one, make_llm(tiny_fp32, pages=200) as other:
        for _ in range(2):
            outputs = [llm.generate(tokens(70), greedy())[0] for llm in (one, other)]
            assert all(same(output, cold_fp32(tokens(70))) for output in outputs)
            assert outputs[0].cached_tokens == outputs[1].cached_tokens
        settle(one)
        one.close()
        assert same(other.generate(tokens(75), greedy())[0], cold_fp32(tokens(75)))


def test_the_start_up_report_says_what_there_is(llm: LLM) -> None:
    report = llm.startup
    assert [row.kind for row in report.groups].count("full") == 1
    assert [row.tier for row in report.tiers] == ["device", "host"]
    assert report.tiers[0].blocks == 300
    assert report.tiers[1].size == 16 * 2**20
    assert "bitwise" in report.promise


def test_the_command_prints_text(real_bf16: Runtime) -> None:
    """The real model, prompts from stdin and from flags; results alone on stdout."""
    lines = run_command(
        "generate", "gemma3-270m", "-q", "--max-tokens", "5", stdin="The capital of France is\n\nOne, two, three,\n"
    )
    assert lines.returncode == 0, lines.stderr
    assert not lines.stderr
    assert "The capital of France is" in lines.stdout
    assert "One, two, three, four" in lines.stdout


def test_stats_add_up(tiny_fp32: Runtime) -> None:
    with make_llm(tiny_fp32, kv=["host:8MiB"]) as llm:
        llm.generate([[5, 6, 7] * 30, [9] * 70], greedy(4))
        llm.reset_prefix_cache(device_only=True)
        loaded = llm.generate([5, 6, 7] * 30, greedy(4))[0].bytes_loaded
        stats = llm.stats()
    assert stats.bytes_loaded == loaded > 0
    assert stats.bytes_stored >= loaded
    assert [tier.tier for tier in stats.tiers] == ["device", "host"]
    for tier in stats.tiers:
        assert tier.free + tier.idle + tier.held + tier.limbo + tier.quarantine == tier.blocks
        assert tier.quarantine == tier.limbo == 0
