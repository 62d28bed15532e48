"""A trial's verdict is taken over by the next start, and by no other model, machine or code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny_models as tiny
from ostinato.runtime import load, selfcheck, verdict
from ostinato.runtime.linear import ANY_ROWS, Choice
from ostinato.runtime.load import Runtime, build_runtime
from ostinato.runtime.verdict import Verdict, recall, remember, trial_name

GIVEN = Verdict(True, False, 1e-5, {"4 x 8 float32": Choice(ANY_ROWS, True), "4 x 9 float32": Choice(None, False)})
PARTS = (b"weights", b"config", b"layout", "float32")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ostinato" / "verdicts"


def test_what_is_remembered_is_recalled(folder: Path) -> None:
    assert recall("a") is None
    remember("a", GIVEN)
    assert recall("a") == GIVEN
    assert recall("b") is None


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"\xff\xfe", b'{"strict": true}'),
        b'{"strict": 1, "bitwise": true, "difference": 0.5, "choices": {}}',
        b'{"strict": true, "bitwise": true, "difference": 0.5, "choices": {"a": 3}}',
    ],
)
def test_a_damaged_file_is_none(folder: Path, content: bytes) -> None:
    remember("a", GIVEN)
    (folder / "a.json").write_bytes(content)
    assert recall("a") is None


def test_a_folder_that_cannot_be_written_costs_nothing(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    remember("a", GIVEN)
    assert recall("a") is None


def test_the_name_follows_all_that_the_outcome_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    first = trial_name(*PARTS)
    assert trial_name(*PARTS) == first
    others = (
        {trial_name(*PARTS[:i], b"other", *PARTS[i + 1 :]) for i in range(3)}
        | {  # type: ignore[arg-type]
            trial_name(*PARTS[:3], "bfloat16")
        }
    )
    with monkeypatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        others.add(trial_name(*PARTS))
    for part, value in (("_code_digest", b"other code"), ("_processor", b"other machine")):
        with monkeypatch.context() as patch:
            patch.setattr(verdict, part, lambda value=value: value)
            others.add(trial_name(*PARTS))
    assert first not in others
    assert len(others) == 7


def start(monkeypatch: pytest.MonkeyPatch, weights: bytes = b"the same") -> tuple[Runtime, int]:
    """A start of the tiny model, and how many trials it took."""
    held: list[Any] = []
    settle = selfcheck.settle
    monkeypatch.setattr(load.selfcheck, "settle", lambda *given: held.append(given) or settle(*given))
    runtime = build_runtime(tiny.gemma3(), None, "tiny", weights)
    monkeypatch.setattr(load.selfcheck, "settle", settle)
    return runtime, len(held)


def test_the_second_start_takes_over_what_the_first_found(monkeypatch: pytest.MonkeyPatch) -> None:
    first, trials = start(monkeypatch)
    again, more = start(monkeypatch)
    assert (trials, more) == (1, 0)
    # What cached keys depend on must not depend on it.
    assert again.identity == first.identity
    assert again.promise == first.promise
    assert again.prepared.linears == first.prepared.linears
    prompts = tiny.prompts([30, 7])
    assert tiny.Driver(again).generate(prompts, 6) == tiny.Driver(first).generate(prompts, 6)
    assert start(monkeypatch, b"other weights")[1] == 1
    assert start(monkeypatch, b"")[1] == 1, "nothing names this model, so nothing may be known of it"


def test_a_model_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def refuse(*_: Any) -> Any:
        raise selfcheck.ModelRefusedError("no")

    monkeypatch.setattr(load.selfcheck, "settle", refuse)
    with pytest.raises(selfcheck.ModelRefusedError):
        build_runtime(tiny.gemma3(), None, "tiny", b"the same")
    assert not list(folder.glob("*.json"))
