"""What goes wrong with a faulty tier, and how often.

Owns: the probabilities, and the draw, which depends on nothing but a seed and what it is about.  Pure; any thread.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Final

from ostinato.errors import ConfigError

LONGEST_DELAY_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities, and ``delay``: the longest time in seconds by which a report is late.

    ``drop``: the report of an order never comes.  ``duplicate``: it comes twice, and once for a job that never was.
    ``reorder``: it waits for the next one and comes after it.  ``fail``: some moves fail, and leave rubbish where they
    were to load to.  ``corrupt``: a loaded record has a wrong byte (tiers on ``StoreConnector`` only).  ``lie``: a
    probe's answer is turned round.

    What happens to which order, record or key follows from ``seed`` alone, whatever threads do.
    """

    seed: int = 0
    delay: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    fail: float = 0.0
    corrupt: float = 0.0
    lie: float = 0.0

    def __post_init__(self) -> None:
        for name in PROBABILITIES:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"faults: {name} is a probability from 0 to 1, not {getattr(self, name)}")
        if not 0 <= self.delay <= LONGEST_DELAY_S:
            raise ConfigError(f"faults: delay is from 0 to {LONGEST_DELAY_S:.0f} seconds, not {self.delay}")

    def draws(self, name: str, subject: object) -> bool:
        """Whether the fault ``name`` befalls ``subject``."""
        chance: float = getattr(self, name)
        return chance > 0 and self.source(name, subject).random() < chance

    def source(self, name: str, subject: object) -> random.Random:
        return random.Random(f"{self.seed}/{name}/{subject}")


PROBABILITIES: Final = ("drop", "duplicate", "reorder", "fail", "corrupt", "lie")
OPTIONS: Final = tuple(field.name for field in fields(Faults))
