"""The main job, shown: a hybrid model's evicted prompt comes back from a lower tier, and nothing differs.

Owns: the order of runs and the verdict.  Does not own: prompts (``prompts``), drawing (``report``).

For each scenario and tier::

    cold       asked, cache off                     the oracle
    device     stored, asked, asked                 the prefix is in the device pool
    <tier>     stored, evicting prompts, asked      it was evicted, and comes back from the tier
    <tier>-same   then evicting prompts, stored     the whole stored prompt comes back
    disk-restart  asked, in a new process           only the files have seen it

``<tier>`` is the connector's name; where rows have that name already, the whole specification.  With more tiers than
one come the rows of ``several``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from ostinato.connectors.registry import parse_spec
from ostinato.engine.llm import LLM
from ostinato.runtime.load import Runtime, load_runtime
from ostinato.serve.demo.prompts import Scenario, greetings, needle, needle_answer
from ostinato.serve.demo.report import Row, print_rows, write_json
from ostinato.serve.demo.restart import Question, ask_anew, warmth
from ostinato.serve.demo.several import RUNS, run_several, together
from ostinato.serve.demo.stage import OUTPUT_TOKENS, STEP_TOKENS, Stage, new_salt, warm_up
from ostinato.serve.early import check_output
from ostinato.serve.tables import Bars, print_startup

STORED_FACTS: Final = 360
ASKED_FACTS: Final = 240
NEEDLE_FACT: Final = 122
DEFAULT_TIER: Final = "host:2GiB"
FULL_TIER: Final = "host:6GiB"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """``extra_tiers``: specifications of tiers that get rows of their own."""

    model: str = "gemma3-270m"
    dtype: str = "bfloat16"
    full: bool = False
    extra_tiers: Sequence[str] = ()
    json_path: Path | None = None


def run_demo(options: DemoOptions, console: Console) -> bool:
    """Run everything; True when every row is identical to its cold run and reused what it should."""
    tiers = list(dict.fromkeys([FULL_TIER if options.full else DEFAULT_TIER, *options.extra_tiers]))
    check_output(options.json_path)
    shared = together(tiers)
    bars = Bars(console)
    runtime = load_runtime(options.model, options.dtype, progress=bars)
    stage = Stage(runtime, bars)
    greeting = greetings(5000 if options.full else 2000, 1000)
    facts = needle(STORED_FACTS, ASKED_FACTS, NEEDLE_FACT, greeting.evicting)
    stage.pages = _pool_pages(runtime, greeting.evicting[-1])
    total = 6 + 11 * len(tiers) + sum(map(_has_files, tiers)) + (RUNS if len(shared) > 1 else 0)
    bars.start(total, "running")
    _run_cold(stage, [(greeting.asked, "cold"), (greeting.stored, ""), (facts.asked, "needle-cold")])
    for tier, name in zip(tiers, row_names(tiers), strict=True):
        salt = "" if tier == tiers[0] else new_salt()
        with stage.llm(kv=[tier]) as llm:
            if tier == tiers[0]:
                bars.finish()
                print_startup(llm.startup, console)
                _explain(console)
                bars.start(total, "running")
                warm_up(llm)
                _run_device(stage, llm, greeting)
            _run_tier(stage, llm, greeting, (name, f"{name}-same"), salt)
            _run_tier(stage, llm, facts, (f"needle-{name}", ""), salt)
        if _has_files(tier):
            _run_restart(stage, options, tier, f"{name}-restart", (greeting.asked, salt))
    if len(shared) > 1:
        run_several(stage, shared, greeting)
    bars.finish()
    print_rows(stage.rows, needle_answer(NEEDLE_FACT), console)
    if options.json_path is not None:
        write_json(options.json_path, stage.rows)
    return all(row.identical and row.cached_tokens == row.expected_tokens for row in stage.rows)


def row_names(tiers: Sequence[str]) -> list[str]:
    """A name for each tier's rows, unlike those of all other rows: its connector's, or else the whole specification."""
    names: list[str] = []
    taken = {"cold", "device", "needle-cold", "multi", "merged"}
    for tier in tiers:
        name = parse_spec(tier).name
        if not taken.isdisjoint(_rows_of(name)):
            name = tier
        taken |= _rows_of(name)
        names.append(name)
    return names


def _rows_of(name: str) -> set[str]:
    return {name, f"{name}-same", f"{name}-restart", f"needle-{name}"}


def _has_files(tier: str) -> bool:
    return parse_spec(tier).name == "disk"


def _pool_pages(runtime: Runtime, longest: str) -> int:
    """Room for the longest prompt while it runs, and a quarter more: too little to keep two, or all window layers."""
    assert runtime.tokenizer is not None
    tokens = len(runtime.tokenizer(longest).input_ids) + OUTPUT_TOKENS
    return runtime.layout.peak_pages(tokens, STEP_TOKENS) * 5 // 4


def _run_cold(stage: Stage, prompts: Sequence[tuple[str, str]]) -> None:
    with stage.llm(enable_prefix_caching=False) as llm:
        warm_up(llm)
        for prompt, name in prompts:
            output = stage.cold[prompt] = stage.generate(llm, prompt)
            if name:
                stage.rows.append(Row.of(name, output, output, expected=0))


def _run_device(stage: Stage, llm: LLM, scenario: Scenario) -> None:
    """The asked prompt twice: the first time brings the windows at its cut back into the pool."""
    seen = [scenario.stored, scenario.asked]
    for prompt in seen:
        stage.generate(llm, prompt)
    stage.add_row("device", stage.generate(llm, scenario.asked), scenario.asked, seen)
    llm.reset_prefix_cache()


def _run_tier(stage: Stage, llm: LLM, scenario: Scenario, names: tuple[str, str], salt: str) -> None:
    """Nothing but the stored and the evicting prompts has been seen before the row is taken.

    ``names``: of the row for the asked prompt, and of that for the stored one (empty = none).
    """
    name, same = names
    seen = [scenario.stored, *scenario.evicting]
    for prompt in seen:
        stage.generate(llm, prompt, salt)
    stage.add_row(name, stage.generate(llm, scenario.asked, salt), scenario.asked, seen)
    if same:
        # The row above brought a part back into the device: evict again (these come back quickly themselves).
        for prompt in scenario.evicting:
            stage.generate(llm, prompt, salt)
        stage.add_row(same, stage.generate(llm, scenario.stored, salt), scenario.stored, seen)
    llm.reset_prefix_cache()


def _run_restart(stage: Stage, options: DemoOptions, tier: str, name: str, asked: tuple[str, str]) -> None:
    """The first engine of a new process; the tier's last one here is closed.  ``asked``: a prompt and its salt."""
    prompt, salt = asked
    question = Question(options.model, options.dtype, tier, stage.pages, salt, prompt)
    answer = ask_anew(question)
    stage.bars.advance(1)
    stage.add_row(name, answer.output, prompt, [prompt], warmth(answer))


def _explain(console: Console) -> None:
    console.print(
        "On a machine without an accelerator both tiers are main memory: `device` is the bounded pool that attention "
        "reads in place, kept small here so that prompts are evicted.",
        style="dim",
    )
