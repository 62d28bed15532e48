"""``ostinato simulate``: a trace replayed on the real scheduler and cache, in virtual time.

Owns: flags, the table, JSON.  Does not own: the replay (``ostinato.simulate``).
"""

from __future__ import annotations

import json as json_format
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from ostinato.connectors.registry import parse_bytes
from ostinato.errors import ConfigError
from ostinato.serve.early import check_output
from ostinato.serve.settings import Config
from ostinato.serve.tables import Bars
from ostinato.simulate.machine import Machine, h100, instant
from ostinato.simulate.readers import SESSION_SPAN_S, read_trace
from ostinato.simulate.replay import Outcome, Replay, Setup
from ostinato.simulate.shapes import SHAPES, find_shape
from ostinato.simulate.trace import Trace

app: Final = typer.Typer()
_WIDTH: Final = 120


@app.command()
def simulate(
    trace: Annotated[Path, typer.Argument(help="A trace of Mooncake's or kv-cache-tester's form; may be .gz.")],
    config: Config = None,  # noqa: ARG001  # read by its callback
    model: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "qwen3-next-80b",
    capacity: Annotated[
        list[str] | None, typer.Option(help="Memory of the device pool, such as 32GB; repeat it to compare.")
    ] = None,
    kv: Annotated[list[str] | None, typer.Option("--kv", help="A lower tier, such as host:128GB; repeat it.")] = None,
    machine: Annotated[str, typer.Option(help="instant, or 1xh100, 2xh100, ...")] = "instant",
    unit: Annotated[int, typer.Option(help="Blocks of the trace that make one hash unit.")] = 1,
    first: Annotated[int | None, typer.Option(help="Only the first requests, so many.")] = None,
    answers: Annotated[bool, typer.Option("--answers", help="Compute the outputs as well.")] = False,
    seed: Annotated[int, typer.Option(help="Places sessions in time.")] = 0,
    span: Annotated[float, typer.Option(help="Seconds within which sessions start.")] = SESSION_SPAN_S,
    json: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Replay a trace of requests on the real scheduler and cache, in virtual time and without bytes."""
    check_output(json)
    requests = read_trace(trace, seed, span).regrouped(unit).first(first)
    lower = [_tier(text) for text in kv or ()]
    speeds = find_machine(machine)
    rows = []
    for text in capacity or ["32GB"]:
        setup = Setup(
            find_shape(model),
            speeds,
            (("device", parse_bytes(text)), *lower),
            serial=machine == "instant",
            answers=answers,
        )
        rows.append((text, run(requests, setup)))
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    print_outcomes(f"{requests.name}, {len(requests.requests):,} requests; {model}, {machine}", rows, console)
    if json is not None:
        json.write_text(json_format.dumps([as_row(name, outcome) for name, outcome in rows], indent=2) + "\n")


def run(trace: Trace, setup: Setup) -> Outcome:
    """One replay with a progress bar on stderr."""
    bars = Bars(Console(stderr=True))
    bars.start(len(trace.requests), f"{setup.policy} {setup.tiers[0][1] / 1e9:,.0f} GB")
    try:
        return Replay(trace, setup).run(bars.advance)
    finally:
        bars.finish()


def find_machine(name: str) -> Machine:
    count, _, kind = name.partition("x")
    if name == "instant":
        return instant()
    if kind == "h100" and count.isdecimal() and int(count):
        return h100(int(count))
    raise ConfigError(f"no machine is called {name!r}: give instant, 1xh100, 2xh100, ...")


def _tier(text: str) -> tuple[str, int]:
    name, _, size = text.partition(":")
    if name not in ("host", "disk", "store") or not size:
        raise ConfigError(f"--kv {text!r}: expected host:SIZE, disk:SIZE or store:SIZE")
    return name, parse_bytes(size)


def print_outcomes(title: str, rows: Sequence[tuple[str, Outcome]], console: Console) -> None:
    timed = any(outcome.busy_s for _, outcome in rows)
    columns = ["", "hit", "FLOPs saved", "hits by tier", "loaded", "stored"]
    table = Table(*columns, *(["TTFT mean", "p95", "busy"] if timed else []), title=title)
    for name, outcome in rows:
        cells = [
            name,
            f"{outcome.hit_rate:.1%}",
            f"{outcome.flops_saved:.1%}",
            ", ".join(f"{tier} {tokens / outcome.prompt_tokens:.1%}" for tier, tokens in outcome.by_tier.items()),
            _volumes(outcome.loaded_bytes),
            _volumes(outcome.stored_bytes),
        ]
        if timed:
            mean, late = ttft(outcome)
            cells += [f"{mean:.2f} s", f"{late:.2f} s", f"{outcome.busy_s / outcome.end_s:.0%}"]
        table.add_row(*cells)
    console.print(table)
    refused = max(outcome.refused for _, outcome in rows)
    if refused:
        console.print(f"{refused:,} requests do not fit into the smallest device pool and were not served")


def ttft(outcome: Outcome) -> tuple[float, float]:
    """Mean and 95th percentile in seconds."""
    times = sorted(outcome.ttft_s)
    return (statistics.fmean(times), times[int(0.95 * (len(times) - 1))]) if times else (0.0, 0.0)


def as_row(name: str, outcome: Outcome) -> dict[str, Any]:
    """What is written of one replay."""
    mean, late = ttft(outcome)
    row = {key: value for key, value in asdict(outcome).items() if key != "ttft_s"}
    rates = {"hit_rate": outcome.hit_rate, "flops_saved": outcome.flops_saved}
    return {"name": name, **rates, "ttft_mean_s": mean, "ttft_p95_s": late, **row}


def _volumes(volumes: Mapping[str, int]) -> str:
    return ", ".join(f"{tier} {size / 1e9:,.0f} GB" for tier, size in volumes.items() if size)
