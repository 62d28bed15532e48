"""Whatever layers keep, it is a hit in the next process, to the end of the last answer, and nothing differs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from disk.chats import ask, check, model, start, tokens, whole
from disk.chatter import open_llm
from e2e.conftest import need_real_model, real_prompt
from e2e.support import Oracle, greedy, make_llm, same
from ostinato.connectors.disk import tools
from ostinato.connectors.disk.files import OsFile
from ostinato.engine.llm import LLM
from ostinato.runtime.load import load_runtime

FAMILIES = ("gemma3", "deepseek_v3", "qwen3_next", "bamba")
LENGTH, ANSWER = 105, 27


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_the_next_processes_go_on_with_the_chat(tmp_path: Path) -> None:
    """The first ones ask and end at once; the second ones' hits reach to the end of the answer."""
    first = ask(tmp_path, [[name, tokens(LENGTH), ANSWER] for name in FAMILIES])
    chats = [answer["prompt"] + answer["tokens"] + tokens(9, 3) for answer in first]
    second = ask(tmp_path, [[name, chat, 4] for name, chat in zip(FAMILIES, chats, strict=True)])
    for name, *answers in zip(FAMILIES, first, second, strict=True):
        for answer in answers:
            check(name, answer)
        assert [answer["cached"] for answer in answers] == [0, whole(LENGTH + ANSWER - 1)], name


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_the_next_engine_finds_what_was_stored(tmp_path: Path, name: str, mode: str) -> None:
    runtime, cold = model(name)
    spec = f"disk:{tmp_path}/kv:64MiB?mode={mode}"
    with make_llm(runtime, kv=[spec], max_num_batched_tokens=43) as llm:
        assert same(llm.generate(tokens(LENGTH), greedy())[0], cold(tokens(LENGTH)))
    for _ in range(2):
        with make_llm(runtime, kv=[spec], max_num_batched_tokens=50) as llm:
            output = llm.generate(tokens(LENGTH), greedy())[0]
            assert output.cached_tokens == whole(LENGTH - 1)
            assert same(output, cold(tokens(LENGTH)))
            shared = tokens(70) + tokens(25, 5)
            assert same(llm.generate(shared, greedy())[0], cold(shared))
    report = tools.verify(f"{tmp_path}/kv")
    assert report.checked
    assert not report.bad
    (owner,) = tools.inspect(f"{tmp_path}/kv").owners
    assert owner.model == name


class Written:
    """Bytes given to the operating system for files of the tier, and bytes of the 4 KiB blocks that they touch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = self.blocks = 0
        inner = OsFile.write

        def write(file: OsFile, buffers: Sequence[Any], offset: int) -> None:
            size = sum(len(buffer) for buffer in buffers)
            self.bytes += size
            self.blocks += (offset + size + 4095) // 4096 * 4096 - offset // 4096 * 4096
            inner(file, buffers, offset)

        monkeypatch.setattr(OsFile, "write", write)


def grow(llm: LLM, path: Path, monkeypatch: pytest.MonkeyPatch, turns: int = 20) -> float:
    """Bytes written for a chat of ``turns`` turns, over the bytes of units that it added."""
    (tier,) = llm.built.connectors
    written, before = Written(monkeypatch), payload_bytes(path)
    chat: list[int] = []
    for turn in range(turns):
        chat += tokens(16, 100 + turn)
        output = llm.generate(chat, greedy(8))[0]
        chat += output.outputs[0].token_ids
        llm.built.engine.drain()
        llm.reset_prefix_cache(device_only=True)
    tier.store.flush()  # type: ignore[attr-defined]
    payload = payload_bytes(path) - before
    units = [group.unit_bytes for group in llm.runtime.layout.groups]
    print(f"\n{llm.runtime.name}: {len(chat)} tokens, units of {units} bytes, {payload} bytes in all: written "
          f"{written.bytes / payload:.3f} of that, in blocks {written.blocks / payload:.3f}")  # fmt: skip
    return written.bytes / payload


def payload_bytes(path: Path) -> int:
    return sum(owner.payload_bytes for owner in tools.inspect(str(path)).owners)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_growing_chat_writes_its_new_bytes(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E14: slots, trailers, log and all, over the bytes of the units; those of tiny models have 4 to 10 KiB."""
    with make_llm(model(name)[0], kv=[f"disk:{tmp_path}/kv:64MiB"]) as llm:
        assert grow(llm, tmp_path / "kv", monkeypatch) <= 1.1


@pytest.mark.parametrize("name", ["gemma3", "bamba"])
def test_sigkill_loses_what_was_on_its_way(tmp_path: Path, name: str) -> None:
    """What was finished a second ago is there, nothing is wrong, and the folder can be used."""
    child = start(tmp_path, "hang", [[name, tokens(LENGTH), ANSWER]])
    assert child.stdout is not None
    answer = json.loads(child.stdout.readline())
    assert child.stdout.readline() == "hanging\n"
    time.sleep(1.5)
    child.kill()
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    with open_llm(name, str(tmp_path)) as llm:
        chat = answer["prompt"] + answer["tokens"] + [9, 8, 7]
        output = llm.generate(chat, greedy())[0]
        assert output.cached_tokens == whole(LENGTH + ANSWER - 1)
        assert same(output, model(name)[1](chat))
    assert not tools.verify(f"{tmp_path}/{name}").bad


def test_sigterm_keeps_what_was_finished(tmp_path: Path) -> None:
    """While 40 requests are asked for, two at a time: exit code 143, and all that had ended are hits, with answers."""
    child = start(tmp_path, "signal", [["bamba", tokens(64, seed), 24] for seed in range(40)])
    assert child.stdout is not None
    answers = [json.loads(child.stdout.readline()) for _ in range(4)]
    child.send_signal(signal.SIGTERM)
    rest, _ = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM
    answers += [json.loads(line) for line in rest.splitlines()]
    assert 4 <= len(answers) < 40
    with open_llm("bamba", str(tmp_path)) as llm:
        for answer in answers:
            check("bamba", answer)
            chat = answer["prompt"] + answer["tokens"] + [5]
            output = llm.generate(chat, greedy())[0]
            assert output.cached_tokens == whole(64 + 24 - 1)
            assert same(output, model("bamba")[1](chat))


def test_closing_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes its time: what is not stored by then is lost, and the next engine is right all the same."""
    runtime, cold = model("bamba")
    inner = OsFile.write

    def write(file: OsFile, buffers: Sequence[Any], offset: int) -> None:
        time.sleep(0.4 if len(buffers) > 1 else 0.0)
        inner(file, buffers, offset)

    monkeypatch.setattr(OsFile, "write", write)
    monkeypatch.setattr("ostinato.engine.llm.CLOSE_S", 0.3)
    monkeypatch.setattr("ostinato.connectors.disk.connector.DRAIN_S", 0.3)
    llm = make_llm(runtime, kv=[f"disk:{tmp_path}/kv:64MiB"], max_num_batched_tokens=16)
    llm.generate([tokens(LENGTH, seed) for seed in range(3)], greedy())
    begin = time.monotonic()
    llm.close()
    assert time.monotonic() - begin < 4
    monkeypatch.undo()
    with make_llm(runtime, kv=[f"disk:{tmp_path}/kv:64MiB"]) as llm:
        for seed in range(3):
            output = llm.generate(tokens(LENGTH, seed), greedy())[0]
            assert same(output, cold(tokens(LENGTH, seed)))


@pytest.mark.slow
def test_sigterm_of_the_command(tmp_path: Path) -> None:
    """What ``ostinato generate`` computed up to a signal is there for the next one."""
    need_real_model()
    words = ["generate", "gemma3-270m", "-p", "The river bends once more, and", "--max-tokens", "4000", "--ignore-eos"]
    script = "from ostinato.serve.cli import main; main()"
    command = [sys.executable, "-c", script, *words, "--kv", f"disk:{tmp_path}/kv:1GiB"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "kv").exists() or not any(o.records > 20 for o in tools.inspect(f"{tmp_path}/kv").owners):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.3)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=30)
    assert child.returncode == 128 + signal.SIGTERM, said
    assert "Traceback" not in said
    with LLM("gemma3-270m", kv=[f"disk:{tmp_path}/kv:1GiB"]) as llm:
        prompt = llm.runtime.tokenizer("The river bends once more, and").input_ids  # type: ignore[union-attr]
        answer = llm.generate([list(prompt)], greedy(60))[0].outputs[0].token_ids
        llm.reset_prefix_cache(device_only=True)
        output = llm.generate([[*prompt, *answer]], greedy(1))[0]
        assert output.cached_by_tier.get("disk", 0) >= 48


@pytest.mark.slow
def test_gemma_3_270m_goes_on_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_real_model()
    runtime = load_runtime("gemma3-270m", "bfloat16")
    prompt = real_prompt(runtime, 60, "And then")
    spec = f"disk:{tmp_path}/kv:1GiB"
    cold = Oracle(runtime, 2000)(prompt, 8)
    with make_llm(runtime, 2000, kv=[spec]) as llm:
        assert same(llm.generate(prompt, greedy(8))[0], cold)
    with make_llm(runtime, 2000, kv=[spec]) as llm:
        output = llm.generate(prompt, greedy(8))[0]
        assert output.cached_tokens == whole(len(prompt) - 1)
        assert same(output, cold)
        assert grow(llm, tmp_path / "kv", monkeypatch) <= 1.05
