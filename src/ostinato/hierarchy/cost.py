"""What loading and computing take, as measured.

Owns: the estimates.  Does not own: what follows from them (``choosing``), transfers.  No knob has to be set: before
something was measured, and a while after, a load counts as free, so a tier is tried (again) and measured.
Thread: the scheduler's only.

Both numbers of a line ``seconds = latency + bytes / bandwidth`` are fitted to a tier's latest loads, older ones
weighing less.  A hit that is loaded from two tiers takes as long as the slower one: they work side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ostinato.ids import TierId
from ostinato.observe.stats import LoadSpeed

BELIEVED_S: Final = 60.0
"""An estimate without a newer load is forgotten: a tier that was slow once is tried again."""
SMALL_STEP: Final = 64
"""Tokens; the speed of smaller steps says nothing about prefill."""
_FADE: Final = 0.9
"""Weight of what is known when one more measurement comes in."""


@dataclass(slots=True)
class _Line:
    """Faded sums of a least-squares fit of seconds over bytes."""

    weight: float = 0.0
    size: float = 0.0
    time: float = 0.0
    size_size: float = 0.0
    size_time: float = 0.0
    measured_at: float = 0.0

    def add(self, size: int, seconds: float, now: float) -> None:
        self.weight = self.weight * _FADE + 1.0
        self.size = self.size * _FADE + size
        self.time = self.time * _FADE + seconds
        self.size_size = self.size_size * _FADE + size * size
        self.size_time = self.size_time * _FADE + size * seconds
        self.measured_at = now

    def fit(self) -> tuple[float, float]:
        """(latency in seconds, seconds per byte), neither below zero."""
        spread = self.weight * self.size_size - self.size * self.size
        slope = (self.weight * self.size_time - self.size * self.time) / spread if spread > 0 else 0.0
        if slope <= 0:  # loads of one size so far, or noise: all of it goes to the bytes
            return 0.0, self.time / self.size
        latency = (self.time - slope * self.size) / self.weight
        return (latency, slope) if latency > 0 else (0.0, self.size_time / self.size_size)


class Costs:
    """Estimates of one engine."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loads: dict[TierId, _Line] = {}
        self._tokens_per_second = 0.0
        self.declined_tokens = 0
        """Tokens that a tier had, and that were computed since that was faster."""

    def note_load(self, tier: TierId, size: int, seconds: float) -> None:
        """A load of ``size`` bytes took ``seconds``."""
        if size > 0 and seconds > 0:
            self._loads.setdefault(tier, _Line()).add(size, seconds, self._clock())

    def note_step(self, tokens: int, seconds: float) -> None:
        """A step computed ``tokens`` tokens in ``seconds``."""
        if tokens < SMALL_STEP or seconds <= 0:
            return
        rate = tokens / seconds
        known = self._tokens_per_second
        self._tokens_per_second = rate if not known else known * _FADE + rate * (1 - _FADE)

    def load_seconds(self, sizes: Mapping[TierId, int]) -> float:
        """Estimate for loads of so many bytes from each tier; what is not known counts as nothing."""
        now = self._clock()
        longest = 0.0
        for tier, size in sizes.items():
            line = self._loads.get(tier)
            if line is not None and size and now - line.measured_at < BELIEVED_S:
                latency, per_byte = line.fit()
                longest = max(longest, latency + size * per_byte)
        return longest

    def compute_seconds(self, tokens: int) -> float | None:
        """Estimate for computing ``tokens`` tokens; None before a step was measured."""
        return tokens / self._tokens_per_second if self._tokens_per_second else None

    def speeds(self) -> tuple[LoadSpeed, ...]:
        """What is known of each tier."""
        rows = []
        for tier, line in self._loads.items():
            latency, per_byte = line.fit()
            rows.append(LoadSpeed(tier, latency, 1 / per_byte if per_byte else 0.0))
        return tuple(rows)

    @property
    def tokens_per_second(self) -> float:
        """Speed of prefill; 0 before a step was measured."""
        return self._tokens_per_second
