"""Errors a user meets: the right type, one line, what to do.  In the shell: exit code 2, no traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.support import greedy, make_llm, same, tokens
from ostinato.engine.llm import LLM
from ostinato.errors import (
    CapacityError,
    ConfigError,
    OstinatoError,
    PromptTooLongError,
    RequestError,
    SamplingError,
    UnknownConnectorError,
    UnknownModelError,
)
from ostinato.runtime.load import Runtime
from ostinato.sampling_params import SamplingParams

CONFIG_ERRORS: list[tuple[dict[str, Any], type[OstinatoError], str]] = [
    ({"num_gpu_blocks_override": 3}, CapacityError, r"even one request: kv_cache_memory must be at least .* pages\)"),
    ({"kv_cache_memory": 0}, CapacityError, "must be at least"),
    ({"kv_cache_memory": -1}, ConfigError, "kv_cache_memory"),
    ({"kv_cache_memory": 1e9}, ConfigError, "kv_cache_memory"),
    ({"kv_cache_memory": None}, ConfigError, "kv_cache_memory"),
    ({"kv_cache_memory": "lots"}, ConfigError, "8GiB"),
    ({"kv_cache_memory": "100TiB"}, CapacityError, "free memory"),
    ({"num_gpu_blocks_override": 100, "max_model_len": 2000}, CapacityError, "one request of 2000 tokens.*at least"),
    ({"max_model_len": 10**6}, ConfigError, "2048 tokens at most"),
    ({"max_model_len": 0}, ConfigError, "max_model_len"),
    ({"kv": ["host:100TiB"]}, CapacityError, "this machine has"),
    ({"kv": ["host:10"]}, CapacityError, "less than one page"),
    ({"kv": ["disc:1GiB"]}, UnknownConnectorError, "known:.*host"),
    ({"kv": ["host"]}, ConfigError, "for example host:8GiB"),
    ({"kv": ["host:much"]}, ConfigError, "is not a size"),
    ({"kv": [""]}, ConfigError, "for example host:8GiB"),
    ({"kv": ["host:1MiB?store=never"]}, ConfigError, "store=eager or store=lazy"),
    ({"kv": ["host:1MiB?store"]}, ConfigError, "name=value"),
    ({"kv": ["host:1MiB", "host:2MiB"]}, ConfigError, "each may be given once"),
    ({"kv": "host:1MiB"}, ConfigError, "kv is a list"),
    ({"kv": ["host:1MiB"], "enable_prefix_caching": False}, ConfigError, "without enable_prefix_caching"),
    ({"kv_cash_memory": "1GiB"}, ConfigError, "unknown option 'kv_cash_memory'; known:.*kv_cache_memory"),
    ({"scheduling_policy": "lifo"}, ConfigError, "fcfs, priority"),
    ({"dtype": "float16"}, ConfigError, "bfloat16, float32"),
    ({"max_num_batched_tokens": 0}, ConfigError, "at least 1"),
]


def assert_one_line(error: BaseException) -> None:
    text = str(error)
    assert text
    assert "\n" not in text
    assert len(text) < 400, text


@pytest.mark.parametrize(("options", "kind", "words"), CONFIG_ERRORS, ids=lambda value: str(value)[:40])
def test_configuration(tiny_fp32: Runtime, options: dict[str, Any], kind: type[OstinatoError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        LLM(tiny_fp32, **options)
    assert_one_line(caught.value)


@pytest.mark.parametrize("model", ["gemma3-271m", "", "/no/such/folder"])
def test_unknown_models(model: str) -> None:
    with pytest.raises(UnknownModelError, match="gemma3-270m") as caught:
        LLM(model)
    assert_one_line(caught.value)


def test_a_wrong_tier_is_told_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.engine.llm.load_runtime", lambda *args, **options: pytest.fail("it was loaded"))
    with pytest.raises(UnknownConnectorError):
        LLM("gemma3-270m", kv=["disc:1GiB"])


def test_something_else_as_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a model is"):
        LLM(None)  # type: ignore[arg-type]
    with pytest.raises(OstinatoError, match=r"config\.json"):
        LLM(tmp_path)


@pytest.fixture(scope="module")
def small(tiny_fp32: Runtime) -> Iterator[LLM]:
    """64 pages: fewer than a request of ``max_model_len`` tokens needs."""
    with make_llm(tiny_fp32, pages=64, max_num_batched_tokens=32) as llm:
        yield llm


PROMPT_ERRORS: list[tuple[Any, type[RequestError], str]] = [
    ([[]], RequestError, "prompt is empty"),
    ([-1], RequestError, "from 0 to 511, not -1"),
    ([[5, 512]], RequestError, "from 0 to 511, not 512"),
    ([[True]], RequestError, "not True"),
    ([[1.5]], RequestError, r"not 1\.5"),
    ("text", RequestError, "no tokenizer: give token ids"),
    (5, RequestError, "a prompt is text"),
    (None, RequestError, "a prompt is text"),
    ([None], RequestError, "a prompt is text"),
    (b"bytes", RequestError, "a prompt is text"),
    ({}, RequestError, "a prompt is text"),
    ({"prompt": 5}, RequestError, "a prompt is text"),
    ({"prompt_token_ids": 5}, RequestError, "a prompt is text"),
    (tokens(2048), PromptTooLongError, "2048 tokens, but max_model_len is 2048"),
    (tokens(2000), PromptTooLongError, "raise kv_cache_memory or shorten"),
]


@pytest.mark.parametrize(("prompt", "kind", "words"), PROMPT_ERRORS, ids=lambda value: str(value)[:30])
def test_prompts(small: LLM, prompt: Any, kind: type[RequestError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        small.generate(prompt)
    assert_one_line(caught.value)
    assert not small.built.engine.has_work


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampling_params": [SamplingParams()] * 2}, "1 prompts, but 2 sampling"),
        ({"sampling_params": {"temperature": 0}}, "one SamplingParams"),
        ({"sampling_params": 5}, "one SamplingParams"),
        ({"priority": [1, 2]}, "1 prompts, but 2 priorities"),
        ({"priority": 1}, "a list of whole numbers"),
        ({"priority": ["high"]}, "a list of whole numbers"),
        ({"cache_salt": 5}, "cache_salt is text"),
    ],
)
def test_arguments_of_generate(small: LLM, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        small.generate([5, 6, 7], **options)
    assert not small.built.engine.has_work


def test_a_salt_may_be_any_text(tiny_fp32: Runtime) -> None:
    with make_llm(tiny_fp32) as llm:
        assert llm.generate([5, 6, 7], cache_salt="\ud800")[0].finished


@pytest.mark.parametrize("field", [{"temperature": -1}, {"top_p": 0}, {"max_tokens": 0}, {"stop": [""]}, {"top_k": -5}])
def test_sampling_values(field: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match=f"{next(iter(field))} must be") as caught:
        SamplingParams(**field)
    assert_one_line(caught.value)


def test_one_bad_prompt_spoils_nothing(small: LLM) -> None:
    """Nothing of a refused batch runs, and the engine goes on."""
    with pytest.raises(RequestError):
        small.generate([[5, 6], [999]])
    assert not small.built.engine.has_work
    assert len(small.generate([5, 6], greedy(3))[0].outputs[0].token_ids) == 3


def test_a_failing_callback_spoils_nothing(small: LLM) -> None:
    def fail(output: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        small.generate([tokens(20), tokens(30)], [greedy(2), greedy(9)], on_finished=fail)
    assert not small.built.engine.has_work
    first, second = (small.generate(tokens(30), greedy(9))[0] for _ in range(2))
    assert same(first, second)


def test_an_interrupted_step_ends_the_engine_clearly(tiny_fp32: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C inside a step: what it computed is unknown, so the engine says that it cannot go on."""
    llm = make_llm(tiny_fp32, kv=["host:1MiB"])

    def interrupt(plan: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.built.worker, "execute", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([5, 6, 7])
    monkeypatch.undo()
    with pytest.raises(OstinatoError, match="interrupted; make a new one"):
        llm.generate([5, 6, 7])
    llm.close()


# The command.


def run_command(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    code = "from ostinato.serve.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "gemma3-271m", "-p", "x"], "gemma3-270m"),
        (["generate", "gemma3-270m", "-p", "x", "--temperature", "-1"], "temperature must be"),
        (["generate", "gemma3-270m", "-p", "x", "--kv", "disc:1GiB"], "no connector 'disc'"),
        (["generate", "gemma3-270m"], "there is no prompt"),
        (["demo", "--json", "/no/such/folder/rows.json"], "cannot write"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_the_command(arguments: list[str], words: str) -> None:
    done = run_command(*arguments)
    assert done.returncode == 2, done
    assert not done.stdout
    # The very first use of the model on a machine also names its licence.
    said = [line for line in done.stderr.splitlines() if "Gemma Terms of Use" not in line]
    assert len(said) == 1, done.stderr
    assert said[0].startswith("ostinato: error: "), done.stderr
    assert words in said[0]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["gemma3-271m"], "UnknownModelError"),
        (["gemma3-270m", "--kv", "disc:1GiB"], "UnknownConnectorError"),
        (["gemma3-270m", "--kv-cache-memory", "100TiB"], "CapacityError"),
        (["gemma3-270m", "--dtype", "float16"], "ConfigError"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_can_be_told_at_once_does_not_wait_for_torch(arguments: list[str], error: str) -> None:
    code = (
        "import sys; from ostinato.serve.cli import app\n"
        "try: app(standalone_mode=False)\n"
        "except Exception as error: print(type(error).__name__, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "generate", *arguments, "-p", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == [error, "False"], done


def test_an_unknown_flag_is_a_usage_error() -> None:
    done = run_command("generate", "gemma3-270m", "--no-such-flag")
    assert done.returncode == 2
    assert "no-such-flag" in done.stderr
    assert "Traceback" not in done.stderr
