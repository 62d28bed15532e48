"""The survey: verdicts on a few classes, crashes and hangs of one class, the page and its comparison."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from ostinato.errors import ConfigError
from ostinato.runtime.load import build_runtime
from ostinato.runtime.survey import Verdict, causal_classes, check, judge
from ostinato.runtime.survey.numbers import OVERRIDES
from ostinato.runtime.survey.tiny import tiny_model
from ostinato.runtime.survey.verdict import one_line
from ostinato.serve import survey
from ostinato.serve.cli import app
from ostinato.serve.survey import SurveyOptions, judge_all, render, run_survey
from ostinato.serve.tables import Bars

VERDICTS = (
    Verdict("ZForCausalLM", exact=True, keeps="window, full", promise="bitwise"),
    Verdict("AForCausalLM", exact=False, reason="it has a | in it"),
)


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=200)


def shown(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("name", "keeps"),
    [("Gemma3ForCausalLM", "window, full"), ("GPT2LMHeadModel", "full"), ("Llama4ForCausalLM", "chunked, full")],
)
def test_an_exact_class(name: str, keeps: str) -> None:
    verdict = judge(name)
    assert verdict == Verdict(name, exact=True, keeps=keeps, promise="bitwise")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("GPTNeoForCausalLM", "attention interface"),
        ("DeepseekV32ForCausalLM", "indexer"),
        ("MusicgenForCausalLM", "does not run on token ids"),
    ],
)
def test_a_refused_class_says_why(name: str, why: str) -> None:
    verdict = judge(name)
    assert why in verdict.reason
    assert not verdict.exact
    assert not verdict.missed


def test_a_class_that_does_not_exist_is_refused() -> None:
    assert "no tiny model" in judge("NoSuchForCausalLM").reason


def test_the_list_is_that_of_transformers() -> None:
    names = causal_classes()
    assert {"LlamaForCausalLM", "GPT2LMHeadModel", "MambaForCausalLM"} <= set(names)
    assert names == sorted(set(names))
    assert set(OVERRIDES) <= set(names)


def test_the_long_check_notices_a_forgotten_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is trimmed one unit too far, which prompts of the self-check are too short to show."""
    model = tiny_model("MistralForCausalLM")
    trials = check.expect(model)
    runtime = build_runtime(model, max_model_len=512)
    check.run(runtime, trials)
    trim = check.BlockTable.trim
    monkeypatch.setattr(check.BlockTable, "trim", lambda table, tokens, fence: trim(table, tokens + 16, fence))
    with pytest.raises(check.MismatchError, match="off by"):
        check.run(runtime, trials)


def test_the_long_check_notices_wrong_logits() -> None:
    model = tiny_model("LlamaForCausalLM")
    *trials, last = check.expect(model)
    runtime = build_runtime(model, max_model_len=512)
    trials.append(last)
    check.run(runtime, trials)
    noise = torch.randn(last.logits.shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    trials[-1] = check.Trial(last.tokens, last.logits + noise)
    with pytest.raises(check.MismatchError, match="prompt of 134"):
        check.run(runtime, trials)


def test_reasons_are_the_same_everywhere() -> None:
    assert one_line("a\n  b <x at 0x7f12ab> in /usr/lib/python3/x.py") == "a b <x at 0x..> in (path)"
    assert len(one_line("word " * 100)) <= 200


# ------------------------------------------------------------------------------------------------------ the processes

FAKE = """
import json, os, sys, time
for line in sys.stdin:
    name = line.strip()
    if name == "Crash":
        os._exit(3)
    if name == "Hang":
        time.sleep(60)
    print(json.dumps({"model": name, "exact": True}), flush=True)
"""


@pytest.fixture
def fake_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that answer at once, crash or hang, by the name that they are asked for."""
    script = tmp_path / "judge.py"
    script.write_text(FAKE)
    monkeypatch.setattr(survey, "COMMAND", (sys.executable, str(script)))


@pytest.mark.usefixtures("fake_judges")
def test_a_crash_or_a_hang_costs_one_class(console: Console) -> None:
    names = ["One", "Crash", "Two", "Hang", "Three", "Four"]
    verdicts = judge_all(names, Bars(console), limit=2.0)
    assert [verdict.model for verdict in verdicts] == names
    reasons = {verdict.model: verdict.reason for verdict in verdicts if not verdict.exact}
    assert reasons == {"Crash": "it ended the process that tried it (exit status 3)", "Hang": "it took longer than 2 s"}


# ----------------------------------------------------------------------------------------------------------- the page


def test_the_page_is_sorted_and_counts() -> None:
    page = render(VERDICTS)
    assert page == render(reversed(VERDICTS))
    assert "**1 of 2 classes are served exactly**, 1 are refused" in page
    assert page.endswith(
        "| `AForCausalLM` | refused |  |  | it has a \\| in it |\n"
        "| `ZForCausalLM` | exact | window, full | bitwise |  |\n"
    )


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    """What the processes answer."""
    answers = list(VERDICTS)
    monkeypatch.setattr(survey, "causal_classes", lambda: sorted(verdict.model for verdict in answers))
    monkeypatch.setattr(survey, "judge_all", lambda names, bars: [v for v in answers if v.model in names])
    return answers


def test_a_survey_writes_the_page_and_a_check_compares(tmp_path: Path, judged: list[Verdict], console: Console) -> None:
    page, facts = tmp_path / "models.md", tmp_path / "facts.json"
    assert run_survey(SurveyOptions(page, json_path=facts), console)
    assert page.read_text() == render(VERDICTS)
    assert [item["model"] for item in json.loads(facts.read_text())] == ["ZForCausalLM", "AForCausalLM"]
    assert run_survey(SurveyOptions(page, check=True), console)
    judged[1] = Verdict("AForCausalLM", exact=True, keeps="full", promise="bitwise")
    assert not run_survey(SurveyOptions(page, check=True), console)
    assert run_survey(SurveyOptions(page, check=True, only="Z*"), console)
    assert page.read_text() == render(VERDICTS)
    assert f"AForCausalLM is exact, in {page} it is refused" in shown(console)


def test_what_the_self_check_missed_is_told(tmp_path: Path, judged: list[Verdict], console: Console) -> None:
    judged[0] = Verdict("ZForCausalLM", exact=False, reason="the self-check passed, yet", missed=True)
    assert not run_survey(SurveyOptions(tmp_path / "models.md"), console)
    assert "not noticed by the self-check: ZForCausalLM" in shown(console)


@pytest.mark.usefixtures("judged")
def test_mistakes_are_told(tmp_path: Path, console: Console) -> None:
    with pytest.raises(ConfigError, match=r"is called 'Nothing\*'"):
        run_survey(SurveyOptions(tmp_path / "models.md", only="Nothing*"), console)
    with pytest.raises(ConfigError, match="without --check first"):
        run_survey(SurveyOptions(tmp_path / "models.md", check=True), console)
    result = CliRunner().invoke(app, ["survey", "--json", str(tmp_path / "no" / "facts.json")])
    assert isinstance(result.exception, ConfigError)


@pytest.mark.slow
def test_the_command_judges_in_processes(tmp_path: Path) -> None:
    """The whole way, for one class that loads fast."""
    facts = tmp_path / "facts.json"
    result = CliRunner().invoke(app, ["survey", "--only", "Qwen3For*", "--json", str(facts)])
    assert result.exit_code == 0, result.output
    assert json.loads(facts.read_text())[0] == {
        "model": "Qwen3ForCausalLM",
        "exact": True,
        "keeps": "window, full",
        "promise": "bitwise",
        "reason": "",
        "missed": False,
    }
