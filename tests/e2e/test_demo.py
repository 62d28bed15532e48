"""The demo's parts; the whole demo, on the real model, is slow."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from e2e.conftest import need_real_model
from ostinato.engine.build import NoTokenizer
from ostinato.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from ostinato.errors import ConfigError
from ostinato.runtime.load import Runtime
from ostinato.serve.demo.prompts import GREETING, GREETING_TAIL, greetings, needle, needle_answer
from ostinato.serve.demo.report import Row, print_rows, write_json
from ostinato.serve.demo.restart import Answer, drop_from_memory, warmth
from ostinato.serve.demo.run import DemoOptions, row_names, run_demo
from ostinato.serve.demo.several import run_several, together
from ostinato.serve.demo.stage import Stage, common_prefix
from ostinato.serve.tables import Bars


def output(token_ids: tuple[int, ...] = (5, 6), digest: str = "aa", cached: int = 0) -> RequestOutput:
    completion = CompletionOutput(0, "text", token_ids, "length")
    tiers = {"host": cached} if cached else {}
    return RequestOutput(
        "r", None, (1, 2, 3), (completion,), RequestMetrics(0.01, 0.02), cached, tiers, (1, 2), logits_sha256=digest
    )


@pytest.mark.parametrize(
    ("other", "identical"),
    [
        (output(), True),
        (output(cached=16), True),
        (output(token_ids=(5, 7)), False),
        (output(token_ids=(5,)), False),
        (output(digest="ab"), False),
        (output(digest=""), False),
    ],
)
def test_identical_means_tokens_and_logits(other: RequestOutput, identical: bool) -> None:
    assert Row.of("run", other, output(), 16).identical is identical


def test_without_a_digest_nothing_is_identical() -> None:
    """Two missing digests are equal, and prove nothing."""
    nameless = output(digest="")
    assert not Row.of("run", nameless, nameless, 0).identical


def test_a_row_says_what_the_output_says() -> None:
    row = Row.of("host", output(cached=16), output(), 32)
    assert (row.name, row.prompt_tokens, row.cached_tokens, row.expected_tokens) == ("host", 3, 16, 32)
    assert row.cached_by_tier == {"host": 16}
    assert row.blocks_by_group == (1, 2)
    assert row.token_ids == (5, 6)
    assert row.ttft_s == 0.01


def shown(*rows: Row) -> str:
    console = Console(file=io.StringIO(), width=160)
    print_rows(rows, "1234", console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_the_table_names_what_is_not_as_promised() -> None:
    good = Row.of("cold", output(), output(), 0)
    assert "to the last bit" in shown(good)
    for bad in (replace(good, name="worse", identical=False), replace(good, name="worse", expected_tokens=16)):
        text = shown(good, bad)
        assert "not as promised: worse" in text
        assert "to the last bit" not in text
    assert "(!)" in shown(replace(good, expected_tokens=16))
    assert "the number is 1234" in shown(replace(good, name="needle-host"))


def test_rows_as_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    write_json(path, [Row.of("host", output(cached=16), output(), 16)])
    (row,) = json.loads(path.read_text())
    assert row["name"] == "host"
    assert row["cached_by_tier"] == {"host": 16}
    assert row["identical"] is True
    assert row["token_ids"] == [5, 6]
    with pytest.raises(ConfigError, match="cannot write"):
        write_json(tmp_path, [])


def test_greetings_share_what_they_say() -> None:
    scenario = greetings(20, 10)
    assert scenario.stored == GREETING * 20 + GREETING_TAIL
    assert scenario.asked.startswith(GREETING * 10)
    assert not scenario.asked.startswith(GREETING * 11)
    assert len({scenario.stored[:1], *(text[:1] for text in scenario.evicting)}) == 3


def test_the_needle_is_in_the_shared_part_and_only_once() -> None:
    scenario = needle(60, 40, 25, ("1", "2"))
    answer = needle_answer(25)
    shared = scenario.asked[: common_prefix(scenario.asked.encode(), scenario.stored.encode())]
    assert shared.count(answer) == 1
    assert not scenario.asked[len(shared) :].count(answer)
    question = scenario.asked[len(shared) :].splitlines()[-1]
    assert f"{question} {answer}" in scenario.stored
    assert len({needle_answer(fact) for fact in range(400)}) == 400


@pytest.mark.parametrize(
    ("one", "other", "length"), [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([1, 2], [1, 3], 1)]
)
def testcommon_prefix(one: list[int], other: list[int], length: int) -> None:
    assert common_prefix(one, other) == length


@pytest.mark.parametrize(
    ("tiers", "names"),
    [
        (["host:2GiB"], ["host"]),
        (["host:2GiB", "host:1GiB"], ["host", "host:1GiB"]),
        (["host:2GiB", "host:2GiB?store=lazy", "other"], ["host", "host:2GiB?store=lazy", "other"]),
        (["host:2GiB", "other?a=1", "other:x"], ["host", "other", "other:x"]),
        (["host:2GiB", "device:x", "cold:x", "needle-host:x"], ["host", "device:x", "cold:x", "needle-host:x"]),
    ],
)
def test_no_two_rows_have_one_name(tiers: list[str], names: list[str]) -> None:
    assert row_names(tiers) == names


def test_mistakes_show_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.serve.demo.run.load_runtime", lambda *args, **options: pytest.fail("it was loaded"))
    console = Console(file=io.StringIO())
    for options in (DemoOptions(extra_tiers=["disc:1GiB"]), DemoOptions(json_path=tmp_path / "no" / "rows.json")):
        with pytest.raises(ConfigError):
            run_demo(options, console)


def test_a_note_is_shown_and_written_where_there_is_one(tmp_path: Path) -> None:
    plain, noted = Row.of("cold", output(), output(), 0), Row.of("merged", output(), output(), 0, "from two tiers")
    assert "merged: from two tiers" in shown(plain, noted)
    path = tmp_path / "rows.json"
    write_json(path, [plain, noted])
    first, second = json.loads(path.read_text())
    assert "note" not in first
    assert second["note"] == "from two tiers"


def test_files_are_dropped_from_memory_and_looking_does_not_bring_them_back(tmp_path: Path) -> None:
    (tmp_path / "slab-00000000-1000").write_bytes(b"x" * (1 << 20))
    (tmp_path / "slab-00000001-1000").write_bytes(b"")
    assert drop_from_memory(tmp_path) == drop_from_memory(tmp_path)
    assert drop_from_memory(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("warm", "text"), [(0.0, "came from the disk"), (0.4, "warm: 40%"), (None, "cannot be told here")]
)
def test_a_restart_says_where_its_bytes_came_from(warm: float | None, text: str) -> None:
    assert text in warmth(Answer(output(), warm))


def test_tiers_that_one_engine_can_have(tmp_path: Path) -> None:
    disk = f"disk:{tmp_path / 'kv'}:64MiB"
    assert together(["host:2GiB", "host:1GiB", disk]) == ["host:2GiB", disk]


class Words(NoTokenizer):
    """Every character is a token."""

    def __call__(self, text: str, **options: Any) -> Any:
        return SimpleNamespace(input_ids=[4 + ord(letter) % 500 for letter in text])


def test_several_tiers(tiny_fp32: Runtime, tmp_path: Path) -> None:
    """One keeps the head and the other one what follows: the prompt comes back whole."""
    runtime = replace(tiny_fp32, tokenizer=Words())
    console = Console(file=io.StringIO())
    stage = Stage(runtime, Bars(console), pages=200)
    scenario = greetings(12, 9)
    with stage.llm(enable_prefix_caching=False) as llm:
        stage.cold[scenario.asked] = stage.generate(llm, scenario.asked)
    run_several(stage, ["host:64MiB", f"disk:{tmp_path / 'kv'}:64MiB"], scenario)
    multi, merged = stage.rows
    for row in (multi, merged):
        assert row.identical
        assert row.cached_tokens == row.expected_tokens > 100
    assert set(multi.cached_by_tier) == {"host"}
    cut = len(scenario.asked) // 2 // 16 * 16
    assert merged.cached_by_tier == {"disk": cut, "host": merged.cached_tokens - cut}


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_real_model()
    # Records are kept apart by the number of threads too, and this process was told to use one in another way.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    console = Console(file=io.StringIO(), width=160)
    path = tmp_path / "rows.json"
    options = DemoOptions(extra_tiers=[f"disk:{tmp_path / 'kv'}:2GiB"], json_path=path)
    assert run_demo(options, console), console.file.getvalue()  # type: ignore[attr-defined]
    rows = {row["name"]: row for row in json.loads(path.read_text())}
    assert {"cold", "device", "host", "host-same", "needle-cold", "needle-host"} <= rows.keys()
    assert all(row["identical"] and row["cached_tokens"] == row["expected_tokens"] for row in rows.values())
    assert rows["host"]["cached_by_tier"]["host"] > 5000
    assert {"disk", "disk-same", "needle-disk", "disk-restart", "multi", "merged"} <= rows.keys()
    for name in ("disk", "disk-restart"):
        assert rows[name]["cached_by_tier"].keys() == {"disk"}
    assert rows["disk-restart"]["note"].startswith("a new process")
    assert rows["merged"]["cached_by_tier"].keys() == {"host", "disk"}
