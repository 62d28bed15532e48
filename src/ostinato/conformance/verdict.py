"""What a check can come to.

Owns: the values and the exceptions by which a check ends early.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Violation(Exception):  # noqa: N818 (it is not an error of this program)
    """The connector broke its contract; the text says how, and what to look at."""


class Unsuitable(Exception):  # noqa: N818
    """The check says nothing about a connector of this kind; the text says why."""


class Slow(Exception):  # noqa: N818
    """The contract may be broken, but the machine is too busy to tell."""


class Outcome(Enum):
    PASSED = "passed"
    FAILED = "failed"
    WARNED = "warned"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Verdict:
    """``check``: its name; ``contract``: what it proves; ``text``: why it did not pass."""

    check: str
    contract: str
    outcome: Outcome
    seconds: float
    text: str = ""
