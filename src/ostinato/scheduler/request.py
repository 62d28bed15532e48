"""One request, as the scheduler sees it.

Owns: the request's tokens and phase.  Knows nothing of tiers.

::

    WAITING -> RUNNING -> FINISHED          WAITING -> PARKED -> READY -> RUNNING
                  |-> WAITING (preempted)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ostinato.hierarchy.residency import HitReport
from ostinato.ids import RequestId
from ostinato.sampling_params import SamplingParams
from ostinato.scheduler.plan import Past


class Phase(Enum):
    WAITING = "waiting"
    """Holds nothing."""
    PARKED = "parked"
    """Admitted; its prefix is on the way."""
    READY = "ready"
    """Its prefix has arrived; goes next."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """``tokens`` = prompt and what was sampled so far; ``computed`` of them have KV.

    ``arrival`` orders requests of equal priority; a smaller ``priority`` goes first.  ``sent[g]``: pages of group ``g``
    that the worker knows.
    """

    request_id: RequestId
    tokens: list[int]
    sampling: SamplingParams
    arrival: int
    priority: int = 0
    salt: str = ""
    prompt_tokens: int = field(init=False)
    phase: Phase = Phase.WAITING
    computed: int = 0
    sent: list[int] = field(default_factory=list)
    preemptions: int = 0
    hit: HitReport | None = None
    """What it did not have to compute when it first started."""

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def sampled(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def past(self) -> Past | None:
        """What a worker that begins this request must know of its tokens; None when sampling needs none of it."""
        if not self.sampling.uses_past:
            return None
        prompt = self.tokens[: self.prompt_tokens] if self.sampling.repetition_penalty != 1 else ()
        return Past(tuple(sorted(set(prompt))), tuple(self.tokens[self.prompt_tokens :]))

    def targets(self, stop: int) -> tuple[int, ...]:
        """The prompt's tokens behind each of those computed up to ``stop``, when they are to be scored."""
        # Whoever has sampled once has had the whole prompt scored.
        if self.sampling.prompt_logprobs is None or self.sampled:
            return ()
        return tuple(self.tokens[self.computed + 1 : min(stop + 1, self.prompt_tokens)])
