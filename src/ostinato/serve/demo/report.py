"""The demo's rows, on the terminal and as JSON.

Owns: what a row says.  ``identical`` compares token ids and the digest of all logits with the cold run's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ostinato.engine.outputs import RequestOutput
from ostinato.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Row:
    """One run.  ``expected_tokens``: whole blocks of the longest token prefix that a prompt before it had in common.

    ``note``: what has to be known of this run besides.
    """

    name: str
    prompt_tokens: int
    cached_tokens: int
    expected_tokens: int
    cached_by_tier: Mapping[str, int]
    blocks_by_group: tuple[int, ...]
    bytes_loaded: int
    ttft_s: float
    token_ids: tuple[int, ...]
    text: str
    logits_sha256: str
    identical: bool
    note: str = ""

    @classmethod
    def of(cls, name: str, output: RequestOutput, cold: RequestOutput, expected: int, note: str = "") -> Row:
        completion = output.outputs[0]
        same_tokens = completion.token_ids == cold.outputs[0].token_ids
        return cls(
            name,
            len(output.prompt_token_ids),
            output.cached_tokens,
            expected,
            dict(output.cached_by_tier),
            output.blocks_by_group,
            output.bytes_loaded,
            output.metrics.ttft_s,
            completion.token_ids,
            completion.text,
            output.logits_sha256,
            same_tokens and output.logits_sha256 == cold.logits_sha256 != "",
            note,
        )


def print_rows(rows: Sequence[Row], answer: str, console: Console) -> None:
    columns = ("run", "prompt", "reused", "from", "blocks by group", "loaded", "first token", "identical")
    table = Table(*columns, title="Ostinato demo")
    for row in rows:
        tiers = ", ".join(f"{count:,} {tier}" for tier, count in row.cached_by_tier.items())
        reused = f"{row.cached_tokens:,}" + ("" if row.cached_tokens == row.expected_tokens else " (!)")
        table.add_row(
            row.name,
            f"{row.prompt_tokens:,}",
            reused,
            tiers or "-",
            " ".join(map(str, row.blocks_by_group)) if row.cached_tokens else "-",
            f"{row.bytes_loaded / 2**20:.1f} MiB" if row.bytes_loaded else "-",
            f"{row.ttft_s * 1e3:,.0f} ms",
            "[green]yes[/green]" if row.identical else "[red]NO[/red]",
        )
    console.print(table)
    for row in rows:
        if row.name.startswith("needle"):
            console.print(f"{row.name}: the number is {answer}; the model goes on: {row.text!r}", highlight=False)
        if row.note:
            console.print(f"{row.name}: {row.note}", highlight=False)
    bad = [row.name for row in rows if not row.identical or row.cached_tokens != row.expected_tokens]
    if bad:
        console.print(f"not as promised: {', '.join(bad)}", style="bold red")
    else:
        console.print("Every run gave the tokens and, to the last bit, the logits of the cold run.", style="green")


def write_json(path: Path, rows: Sequence[Row]) -> None:
    try:
        path.write_text(json.dumps([_as_json(row) for row in rows], indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _as_json(row: Row) -> dict[str, object]:
    """The row's fields; an empty note is left out."""
    return {name: value for name, value in asdict(row).items() if name != "note" or value}
