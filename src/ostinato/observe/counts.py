"""Counts that grow while an engine runs, kept where the counted things happen.

Owns: the shapes.  Does not own: any export format.  Thread: whoever counts; others read between steps.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Final

SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds for what lasts from a memory copy to a slow store."""


@dataclass(slots=True)
class Durations:
    """How many durations were at most each of ``SECONDS``, and how many were longer."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self.total_s += seconds

    def __len__(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class FlowCounts:
    """Transfers between the device and one tier, in one direction, since start.

    ``units``: hash units that arrived; ``failed``: those that did not; ``late``: units of jobs that missed their
    deadline; ``revoked``: units of stores that were taken back before a mover had seen them.
    """

    units: int = 0
    bytes: int = 0
    failed: int = 0
    late: int = 0
    revoked: int = 0
    seconds: Durations = field(default_factory=Durations)
    """Of jobs, as their movers report them."""


@dataclass(slots=True)
class AnswerCounts:
    """What an asked tier said, in hash units, since start; whether a hit was made of it does not matter here.

    ``silent``: prompts for which it was not waited any longer; ``declined``: units that it did not want to store.
    """

    held: int = 0
    absent: int = 0
    silent: int = 0
    declined: int = 0
    seconds: Durations = field(default_factory=Durations)
    """From a prompt's first question to the tier's last answer."""
