"""What a run comes to: percentiles, throughput, where prompts came from, errors; as a table and as JSON.

Owns: the sums.  Does not own: pictures (``plot``).  Failed requests are counted, and are in no other number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from ostinato.serve.bench.drive import Asked

PERCENTILES: Final = (50, 90, 99)
COMPUTED: Final = "computed"
OTHER: Final = "cached"
"""Where a server says that tokens were cached, and not where."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one kind of time, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        found = sorted(values)
        p50, p90, p99 = (percentile(found, p) for p in PERCENTILES)
        return cls(len(found), math.fsum(found) / len(found), p50, p90, p99, found[-1])


@dataclass(frozen=True, slots=True)
class Summary:
    """``prompt_tokens_by_origin``: tier, or ``computed``; the sum is ``prompt_tokens``."""

    seconds: float
    requests: int
    errors: Mapping[str, int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prompt_tokens_by_origin: Mapping[str, int]
    ttft: Spread | None
    itl: Spread | None
    e2e: Spread | None

    @classmethod
    def of(cls, asked: Sequence[Asked], seconds: float) -> Summary:
        answers = [one.answer for one in asked if one.answer.error is None]
        origin: Counter[str] = Counter()
        for answer in answers:
            by_tier = answer.cached_by_tier or {OTHER: answer.cached_tokens}
            origin.update(by_tier)
            origin[COMPUTED] += answer.prompt_tokens - sum(by_tier.values())
        return cls(
            seconds=seconds,
            requests=len(asked),
            errors=dict(Counter(one.answer.error for one in asked if one.answer.error is not None)),
            prompt_tokens=sum(answer.prompt_tokens for answer in answers),
            completion_tokens=sum(answer.completion_tokens for answer in answers),
            cached_tokens=sum(answer.cached_tokens for answer in answers),
            prompt_tokens_by_origin={name: count for name, count in origin.items() if count},
            ttft=Spread.of([answer.ttft_s for answer in answers if answer.ttft_s is not None]),
            itl=Spread.of([gap for answer in answers for gap in answer.gaps_s]),
            e2e=Spread.of([answer.total_s for answer in answers]),
        )

    def rate(self, count: float) -> float:
        """Per second of the run."""
        return count / self.seconds if self.seconds > 0 else 0.0


def percentile(found: Sequence[float], p: float) -> float:
    """Of sorted values, the distance between neighbours divided evenly (numpy's ``linear``)."""
    at = (len(found) - 1) * p / 100
    low = math.floor(at)
    high = min(low + 1, len(found) - 1)
    return found[low] + (found[high] - found[low]) * (at - low)


def as_fields(settings: Mapping[str, Any], summary: Summary, asked: Sequence[Asked]) -> dict[str, Any]:
    """All that is known, for JSON; times are seconds.  Texts are left out."""
    rates = {
        "requests_per_s": summary.rate(summary.requests - sum(summary.errors.values())),
        "prompt_tokens_per_s": summary.rate(summary.prompt_tokens),
        "completion_tokens_per_s": summary.rate(summary.completion_tokens),
    }
    return {"settings": dict(settings), **asdict(summary), **rates, "answers": [_fields(one) for one in asked]}


def _fields(one: Asked) -> dict[str, Any]:
    answer = {name: value for name, value in asdict(one.answer).items() if name != "text"}
    return {"conversation": one.conversation, "turn": one.turn, "began_s": one.began_s, **answer}


def print_summary(summary: Summary, console: Console) -> None:
    """Two tables, and a line for each kind of error."""
    times = Table("", "p50", "p90", "p99", "mean", "max", title="times")
    rows = (("time to first token", summary.ttft), ("between tokens", summary.itl), ("whole answer", summary.e2e))
    for label, spread in rows:
        if spread is not None:
            values = (spread.p50, spread.p90, spread.p99, spread.mean, spread.most)
            times.add_row(label, *(_time(value) for value in values))
    console.print(times)
    totals = Table("", "in all", "per second", title="throughput")
    good = summary.requests - sum(summary.errors.values())
    totals.add_row("answers", f"{good:,}", f"{summary.rate(good):,.2f}")
    totals.add_row(
        "generated tokens", f"{summary.completion_tokens:,}", f"{summary.rate(summary.completion_tokens):,.1f}"
    )
    totals.add_row("prompt tokens", f"{summary.prompt_tokens:,}", f"{summary.rate(summary.prompt_tokens):,.1f}")
    for name, count in sorted(summary.prompt_tokens_by_origin.items(), key=lambda item: -item[1]):
        totals.add_row(f"  {name}", f"{count:,}", f"{count / max(summary.prompt_tokens, 1):.1%} of them")
    console.print(totals)
    for error, count in sorted(summary.errors.items(), key=lambda item: -item[1]):
        console.print(f"{count} x {error}", style="red", highlight=False, markup=False)
    console.print(f"{summary.seconds:.1f} s", highlight=False)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"
