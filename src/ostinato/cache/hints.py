"""What whoever sends a request says about the cache's use of it.

Owns: the values and their ranges.  Does not own: what is made of them (``hierarchy``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ostinato.errors import RequestError

LONGEST_TTL_S: Final = 30 * 86400.0


def check_ttl(ttl_s: float | None) -> None:
    """Raises RequestError for a time to live that is none."""
    if ttl_s is not None and not (math.isfinite(ttl_s) and 0 < ttl_s <= LONGEST_TTL_S):
        raise RequestError(f"ttl is a number of seconds above 0 and up to {LONGEST_TTL_S:.0f}, not {ttl_s!r}")


@dataclass(frozen=True, slots=True)
class CacheHints:
    """How what a request computes is kept.

    ``no_store``: nothing of it can be found afterwards, in any tier; it may still begin with what others computed.
    ``ttl_s``: what it was first to compute can be found for so many seconds after its end, and is not given to tiers
    that outlive this process.  ``end_of_use``: what it alone used goes first when room is needed.  ``expect_return``:
    it is kept longer than its age alone would have it.
    """

    no_store: bool = False
    ttl_s: float | None = None
    end_of_use: bool = False
    expect_return: bool = False

    def __post_init__(self) -> None:
        check_ttl(self.ttl_s)
        if self.no_store and (self.ttl_s is not None or self.end_of_use or self.expect_return):
            raise RequestError("no_store leaves nothing that ttl, end_of_use or expect_return could be about")
        if self.end_of_use and self.expect_return:
            raise RequestError("end_of_use and expect_return contradict each other")


PLAIN: Final = CacheHints()
