"""A request's phases as spans of time.

Owns: the shapes.  Does not own: watching (``hierarchy.timeline``).  Times are seconds of ``time.perf_counter``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class RequestPhase(Enum):
    """What a request is doing.  A preempted one is queued again."""

    QUEUED = "queued"
    """It waits for room, or for its turn."""
    LOOKUP = "lookup"
    """A tier has not said yet what it holds."""
    LOAD = "load"
    """Its prefix is on the way to the device."""
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Span:
    """``end`` is None while it lasts."""

    phase: RequestPhase
    start: float
    end: float | None = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, live or over.  Nothing of its content.

    ``salt`` names its tenant.  ``started_at``: seconds since the epoch; ``arrival``: of the spans' clock.  ``outcome``
    is None while it lives, then ``finished`` or ``aborted``; what was cached is known when it is finished.
    """

    request_id: str
    salt: str
    started_at: float
    arrival: float
    prompt_tokens: int
    completions: int
    spans: tuple[Span, ...]
    outcome: str | None = None
    generated_tokens: int = 0
    cached_by_tier: Mapping[str, int] | None = None
    ttft_s: float | None = None
    total_s: float | None = None
    preemptions: int = 0
    finish_reasons: tuple[str, ...] = ()

    @property
    def cached_tokens(self) -> int:
        return sum((self.cached_by_tier or {}).values())

    def seconds(self, phase: RequestPhase) -> float:
        """How long it was in ``phase``, over all its spans that have ended."""
        return sum(span.end - span.start for span in self.spans if span.phase is phase and span.end is not None)
