"""``ostinato conformance``: does a connector keep its contract?

Owns: how verdicts are drawn.  Does not own: the checks (``ostinato.conformance``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ostinato.conformance.kit import CHECKS, run_all, subject_of
from ostinato.conformance.verdict import Outcome, Verdict

_STYLES: Final = (
    (Outcome.PASSED, "green"),
    (Outcome.FAILED, "bold red"),
    (Outcome.WARNED, "yellow"),
    (Outcome.SKIPPED, "dim"),
)


def run_conformance(specs: Sequence[str], as_json: bool, progress: Console, result: Console) -> bool:
    """Run all checks on ``specs`` together and print the verdicts; whether none failed.

    Raises :class:`ConfigError` where a tier cannot be made.
    """
    with subject_of(specs) as subject:
        for connector in subject.make():  # so that a wrong specification is told before anything is run
            connector.close()
        done: list[Verdict] = []

        def note(verdict: Verdict) -> None:
            done.append(verdict)
            line = f"{len(done)}/{len(CHECKS)} {verdict.check}: {verdict.outcome.value}"
            progress.print(line, style="dim", highlight=False)

        verdicts = run_all(subject, note)
    if as_json:
        print(_as_json(subject.name, verdicts))
    else:
        _print_table(subject.name, verdicts, result)
    return not any(verdict.outcome is Outcome.FAILED for verdict in verdicts)


def _print_table(name: str, verdicts: Sequence[Verdict], console: Console) -> None:
    styles = dict(_STYLES)
    table = Table("check", "verdict", "s", "what it proves, or what is wrong", title=f"conformance of {escape(name)}")
    for verdict in verdicts:
        style = styles[verdict.outcome]
        text = verdict.text if verdict.outcome is not Outcome.PASSED else verdict.contract
        table.add_row(
            verdict.check,
            f"[{style}]{verdict.outcome.value}[/{style}]",
            f"{verdict.seconds:.1f}",
            escape(text),
        )
    console.print(table)
    counts = [f"{sum(verdict.outcome is kind for verdict in verdicts)} {kind.value}" for kind in Outcome]
    console.print(", ".join(counts), highlight=False)


def _as_json(name: str, verdicts: Sequence[Verdict]) -> str:
    rows = [
        {
            "check": verdict.check,
            "contract": verdict.contract,
            "outcome": verdict.outcome.value,
            "seconds": round(verdict.seconds, 3),
            "text": verdict.text,
        }
        for verdict in verdicts
    ]
    failed = sum(verdict.outcome is Outcome.FAILED for verdict in verdicts)
    return json.dumps({"tiers": name, "failed": failed, "checks": rows}, indent=2)
