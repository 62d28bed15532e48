"""Drawing for the terminal: the start-up table and progress bars.

Owns: the look.  Does not own: the facts (``engine.startup``).  Everything goes to stderr, results go to stdout.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from ostinato.engine.startup import StartupReport


def print_startup(report: StartupReport, console: Console) -> None:
    """One table of groups, one of tiers, and a line for each thing that is off."""
    console.print(f"[bold]{report.model}[/bold]  {report.dtype}  up to {report.max_model_len:,} tokens")
    console.print(report.promise, highlight=False)
    groups = Table("group", "kind", "layers", "hash unit", "page", "page size", "blocks", title="KV cache groups")
    for row in report.groups:
        groups.add_row(
            str(row.group),
            row.kind,
            str(row.layers),
            f"{row.hash_unit} tokens",
            page_text(row.page_tokens),
            f"{row.page_bytes / 1024:,.0f} KiB",
            f"{row.blocks:,} (shared)",
        )
    console.print(groups)
    tiers = Table("tier", "blocks", "budget", "", title="tiers, fastest first")
    for tier in report.tiers:
        blocks = "" if tier.blocks is None else f"{tier.blocks:,}"
        size = "" if tier.size is None else f"{tier.size / 2**20:,.0f} MiB"
        tiers.add_row(tier.tier, blocks, size, tier.note)
    console.print(tiers)
    for line in report.off:
        console.print(f"off: {line}", style="yellow")


def page_text(tokens: int | None) -> str:
    """What a page covers; ``tokens`` is None for recurrent state."""
    return "1 state" if tokens is None else f"{tokens:,} tokens"


class Bars:
    """Progress bars for long work; implements the ``Progress`` that loading reports to."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def start(self, total: int, label: str) -> None:
        self._bars.start()
        self._task = self._bars.add_task(label, total=total)

    def advance(self, n: int = 1) -> None:
        if self._task is not None:
            self._bars.advance(self._task, n)

    def finish(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None
        self._bars.stop()
