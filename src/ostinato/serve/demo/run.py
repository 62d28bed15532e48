"""The main job, shown: a hybrid model's evicted prompt comes back from a lower tier, and nothing differs.

Owns: the order of runs and the verdict.  Does not own: prompts (``prompts``), drawing (``report``).

For each scenario and tier::

    cold       asked, cache off                     the oracle
    device     stored, asked, asked                 the prefix is in the device pool
    <tier>     stored, evicting prompts, asked      it was evicted, and comes back from the tier
    <tier>-same   then evicting prompts, stored     the whole stored prompt comes back

``<tier>`` is the connector's name; where rows have that name already, the whole specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from ostinato.connectors.registry import make_connector, parse_spec
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.runtime.load import Runtime, load_runtime
from ostinato.sampling_params import SamplingParams
from ostinato.serve.demo.prompts import Scenario, greetings, needle, needle_answer
from ostinato.serve.demo.report import Row, print_rows, write_json
from ostinato.serve.early import check_output
from ostinato.serve.tables import Bars, print_startup

STEP_TOKENS: Final = 512
OUTPUT_TOKENS: Final = 16
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


@dataclass(slots=True)
class _Demo:
    """One run: the loaded model, the cold results by prompt, the rows so far."""

    runtime: Runtime
    bars: Bars
    pages: int = 0
    cold: dict[str, RequestOutput] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


def run_demo(options: DemoOptions, console: Console) -> bool:
    """Run everything; True when every row is identical to its cold run and reused what it should."""
    tiers = list(dict.fromkeys([FULL_TIER if options.full else DEFAULT_TIER, *options.extra_tiers]))
    check_output(options.json_path)
    _check_early(tiers)
    bars = Bars(console)
    runtime = load_runtime(options.model, options.dtype, progress=bars)
    demo = _Demo(runtime, bars)
    repeats = 5000 if options.full else 2000
    greeting = greetings(repeats, 1000)
    facts = needle(STORED_FACTS, ASKED_FACTS, NEEDLE_FACT, greeting.evicting)
    demo.pages = _pool_pages(runtime, greeting.evicting[-1])
    bars.start(6 + 11 * len(tiers), "running")
    _run_cold(demo, [(greeting.asked, "cold"), (greeting.stored, ""), (facts.asked, "needle-cold")])
    for tier, name in zip(tiers, row_names(tiers), strict=True):
        with _llm(demo, kv=[tier]) as llm:
            if tier == tiers[0]:
                bars.finish()
                print_startup(llm.startup, console)
                _explain(console)
                bars.start(6 + 11 * len(tiers), "running")
                _warm_up(llm)
                _run_device(demo, llm, greeting)
            _run_tier(demo, llm, greeting, name, f"{name}-same")
            _run_tier(demo, llm, facts, f"needle-{name}", "")
    bars.finish()
    print_rows(demo.rows, needle_answer(NEEDLE_FACT), console)
    if options.json_path is not None:
        write_json(options.json_path, demo.rows)
    return all(row.identical and row.cached_tokens == row.expected_tokens for row in demo.rows)


def row_names(tiers: Sequence[str]) -> list[str]:
    """A name for each tier's rows, unlike those of all other rows: its connector's, or else the whole specification."""
    names: list[str] = []
    taken = {"cold", "device", "needle-cold"}
    for tier in tiers:
        name = parse_spec(tier).name
        if not taken.isdisjoint(_rows_of(name)):
            name = tier
        taken |= _rows_of(name)
        names.append(name)
    return names


def _rows_of(name: str) -> set[str]:
    return {name, f"{name}-same", f"needle-{name}"}


def _check_early(tiers: Sequence[str]) -> None:
    """Mistakes that would otherwise show only after minutes."""
    for tier in tiers:
        make_connector(tier).close()


def _pool_pages(runtime: Runtime, longest: str) -> int:
    """Room for the longest prompt while it runs, and a quarter more: too little to keep two, or all window layers."""
    assert runtime.tokenizer is not None
    tokens = len(runtime.tokenizer(longest).input_ids) + OUTPUT_TOKENS
    return runtime.layout.peak_pages(tokens, STEP_TOKENS) * 5 // 4


def _llm(demo: _Demo, **options: Any) -> LLM:
    return LLM(demo.runtime, num_gpu_blocks_override=demo.pages, max_num_batched_tokens=STEP_TOKENS, **options)


def _run_cold(demo: _Demo, prompts: Sequence[tuple[str, str]]) -> None:
    with _llm(demo, enable_prefix_caching=False) as llm:
        _warm_up(llm)
        for prompt, name in prompts:
            output = demo.cold[prompt] = _generate(demo, llm, prompt)
            if name:
                demo.rows.append(Row.of(name, output, output, expected=0))


def _run_device(demo: _Demo, llm: LLM, scenario: Scenario) -> None:
    """The asked prompt twice: the first time brings the windows at its cut back into the pool."""
    for prompt in (scenario.stored, scenario.asked):
        _generate(demo, llm, prompt)
    _add_row(demo, llm, "device", scenario.asked, seen=[scenario.stored, scenario.asked])
    llm.reset_prefix_cache()


def _run_tier(demo: _Demo, llm: LLM, scenario: Scenario, name: str, same: str) -> None:
    """Nothing but the stored and the evicting prompts has been seen before the row is taken."""
    seen = [scenario.stored, *scenario.evicting]
    for prompt in seen:
        _generate(demo, llm, prompt)
    _add_row(demo, llm, name, scenario.asked, seen)
    if same:
        # The row above brought a part back into the device: evict again (these come back quickly themselves).
        for prompt in scenario.evicting:
            _generate(demo, llm, prompt)
        _add_row(demo, llm, same, scenario.stored, seen)
    llm.reset_prefix_cache()


def _add_row(demo: _Demo, llm: LLM, name: str, prompt: str, seen: Sequence[str]) -> None:
    output = _generate(demo, llm, prompt)
    assert llm.runtime.tokenizer is not None
    others = [llm.runtime.tokenizer(text).input_ids for text in seen]
    unit = llm.runtime.layout.granularity
    common = max(_common_prefix(output.prompt_token_ids, ids) for ids in others)
    expected = min(common, len(output.prompt_token_ids) - 1) // unit * unit
    demo.rows.append(Row.of(name, output, demo.cold[prompt], expected))


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def _generate(demo: _Demo, llm: LLM, prompt: str) -> RequestOutput:
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logits_digest=True)
    output = llm.generate(prompt, sampling)[0]
    # Stores run behind the answers; a prompt counts as stored when they are done.
    llm.built.engine.drain()
    demo.bars.advance(1)
    return output


def _warm_up(llm: LLM) -> None:
    """The first pass of a process pays for memory and kernels; no row should."""
    llm.generate("Warm up: " + "one two three four " * 150, SamplingParams(temperature=0.0, max_tokens=4))
    llm.reset_prefix_cache()


def _explain(console: Console) -> None:
    console.print(
        "On a machine without an accelerator both tiers are main memory: `device` is the bounded pool that attention "
        "reads in place, kept small here so that prompts are evicted.",
        style="dim",
    )
