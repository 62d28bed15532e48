"""``ostinato bench``: its flags, and the order of a run.

Owns: flags, progress, exit codes.  Does not own: asking (``drive``), sums (``report``), pictures (``plot``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json as jsonlib
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ostinato.errors import ConfigError
from ostinato.serve.settings import Config

if TYPE_CHECKING:
    from ostinato.serve.bench.drive import Asked, Limits, Load
    from ostinato.serve.bench.workload import Workload
    from ostinato.serve.client import Target

app: Final = typer.Typer()
_TRAFFIC: Final = "Traffic"
_TEXTS: Final = "What is asked"
_OUTPUT: Final = "Output"
_REQUESTS: Final = 64
_ENDPOINTS: Final = ("completions", "chat")
_EXAMPLES: Final = """
Examples:

ostinato bench --concurrency 16 --num-requests 200

ostinato bench http://127.0.0.1:8000 --duration 60 --concurrency 64 --shared 0.5 --turns 1:4 --plot load.svg

ostinato bench --endpoint chat --prompt-words 512 --max-tokens 32 --json load.json
"""


def _option(panel: str, *flags: str, **more: Any) -> Any:
    return typer.Option(*flags, rich_help_panel=panel, **more)


@app.command(epilog=_EXAMPLES)
def bench(
    base_url: Annotated[str, typer.Argument(help="A server with OpenAI's API.")] = "http://127.0.0.1:8000",
    config: Config = None,  # noqa: ARG001  # read by its callback
    model: Annotated[str | None, typer.Option(help="Default: the server's first.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Better in OSTINATO_BENCH_API_KEY.")] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    concurrency: Annotated[int, _option(_TRAFFIC, help="Conversations at once.", min=1, max=10_000)] = 8,
    num_requests: Annotated[int | None, _option(_TRAFFIC, help="Requests in all. Default: 64.", min=1)] = None,
    duration: Annotated[float | None, _option(_TRAFFIC, help="Begin new ones for so many seconds.", min=0.1)] = None,
    timeout: Annotated[float, _option(_TRAFFIC, help="Seconds without a byte after which a request failed.")] = 600.0,
    prompt_words: Annotated[str, _option(_TEXTS, help="Words of each turn: a number, or a span.")] = "32:256",
    max_tokens: Annotated[str, _option(_TEXTS, help="Tokens of each answer: a number, or a span.")] = "16:64",
    turns: Annotated[str, _option(_TEXTS, help="Turns of each conversation: a number, or a span.")] = "1",
    shared: Annotated[float, _option(_TEXTS, help="Share of conversations with a common beginning.", min=0, max=1)] = 0,
    shared_words: Annotated[int, _option(_TEXTS, help="Words of a common beginning.", min=1, max=1_000_000)] = 256,
    prefixes: Annotated[int, _option(_TEXTS, help="How many common beginnings there are.", min=1)] = 1,
    distinct: Annotated[
        int | None, _option(_TEXTS, help="Ask the first conversation again after so many.", min=1)
    ] = None,
    seed: Annotated[int, _option(_TEXTS, help="Another one, other texts and lengths.")] = 0,
    temperature: Annotated[float, _option(_TEXTS, help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool, _option(_TEXTS, "--ignore-eos", help="Answers have their full length (a field of vLLM and Ostinato).")
    ] = False,
    json: Annotated[Path | None, _option(_OUTPUT, "--json", help="Write all numbers to this file.")] = None,
    plot: Annotated[
        Path | None, _option(_OUTPUT, help="Draw times to this file: .svg, .html, or with matplotlib .png, .pdf.")
    ] = None,
) -> None:
    """Measure a server under load: first tokens, gaps, whole answers, throughput, what was cached."""
    from ostinato.serve.bench.drive import Limits
    from ostinato.serve.bench.plot import check_plot
    from ostinato.serve.bench.workload import Span, Workload
    from ostinato.serve.client import Target, api_root
    from ostinato.serve.early import check_output

    if endpoint not in _ENDPOINTS:
        raise ConfigError(f"--endpoint must be one of {', '.join(_ENDPOINTS)}, not {endpoint!r}")
    for path in (json, plot):
        check_output(path)
    if plot is not None:
        check_plot(plot)
    extra: dict[str, Any] = {"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {})}
    requests = _REQUESTS if num_requests is None and duration is None else num_requests
    target = Target(api_root(base_url), model or "", api_key, endpoint == "chat", timeout, extra)
    workload = Workload(
        prompt=Span.parse("--prompt-words", prompt_words),
        answer=Span.parse("--max-tokens", max_tokens),
        turns=Span.parse("--turns", turns),
        shared=shared,
        shared_words=shared_words,
        prefixes=prefixes,
        distinct=distinct,
        seed=seed,
    )
    if not asyncio.run(_bench(target, workload, Limits(concurrency, requests, duration), (json, plot))):
        raise typer.Exit(1)


async def _bench(target: Target, workload: Workload, limits: Limits, outputs: tuple[Path | None, Path | None]) -> bool:
    """False when a request failed."""
    from ostinato.serve.bench.drive import Load
    from ostinato.serve.bench.plot import write_plot
    from ostinato.serve.bench.report import Summary, as_fields, print_summary
    from ostinato.serve.client import connect, first_model

    if not target.model:
        async with connect(target) as client:
            target = replace(target, model=await first_model(client))
    console = Console(width=None if sys.stdout.isatty() else 120)
    length = f"{limits.requests} requests" if limits.seconds is None else f"{limits.seconds:g} s"
    caption = f"{target.model} at {target.base_url}: {limits.concurrency} at once, {length}"
    console.print(caption, highlight=False, markup=False)
    with _Watched(limits) as watched:
        load = Load(target, workload, limits, watched.heard)
        watched.load = load
        with contextlib.suppress(NotImplementedError):  # not on every system
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, load.stop)
        await load.run()
    summary = Summary.of(load.asked, load.elapsed_s)
    print_summary(summary, console)
    json, plot = outputs
    if json is not None:
        json.write_text(jsonlib.dumps(as_fields(_settings(target, workload, limits), summary, load.asked), indent=1))
    if plot is not None:
        write_plot(plot, load.asked, load.elapsed_s, caption)
    return not summary.errors


def _settings(target: Target, workload: Workload, limits: Limits) -> dict[str, Any]:
    """Of a run, without the key."""
    whom = {"base_url": target.base_url, "model": target.model, "chat": target.chat, "extra": dict(target.extra)}
    return {**whom, **asdict(workload), **asdict(limits)}


class _Watched:
    """The bar of a run on a terminal."""

    def __init__(self, limits: Limits) -> None:
        self.load: Load | None = None
        self._limits = limits
        self._errors = 0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[said]}"),
            TimeElapsedColumn(),
        )
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("asking", total=limits.requests or limits.seconds, said="")

    def __enter__(self) -> _Watched:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def heard(self, asked: Asked) -> None:
        self._errors += asked.answer.error is not None
        load = self.load
        assert load is not None
        done = len(load.asked)
        said = f"{done} answers, {load.running} running, {self._errors} failed"
        self._bar.update(self._task, completed=done if self._limits.requests else load.since_start_s, said=said)
