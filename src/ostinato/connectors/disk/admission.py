"""What the disk tier takes of what it is offered: a limit on writing, and admission on second sight.

Owns: the bucket of bytes, the memory of names seen once.  Does not own: what is held already.  Scheduler's thread.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Final

from ostinato.cache.keys import BlockKey
from ostinato.connectors.registry import parse_bytes
from ostinato.errors import ConfigError

MAX_SEEN: Final = 1 << 18
_PERIODS: Final = MappingProxyType({"s": 1, "min": 60, "h": 3600, "day": 86400})
_BURST: Final = MappingProxyType({"s": 1.0, "min": 60.0, "h": 600.0, "day": 3600.0})
"""Seconds' worth of writing that may happen at once, by the period in which the limit is given."""


class Rate:
    """At most ``per_second`` bytes on average, ``burst`` at once."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = self._left = burst
        self._clock = clock
        self._then = clock()

    @classmethod
    def parse(cls, text: str) -> Rate:
        """``100MiB/s``, ``50GiB/day``."""
        match = re.fullmatch(r"([^/]+)/(s|min|h|day)", text)
        size = parse_bytes(match[1]) if match is not None else 0
        if match is None or size <= 0:
            raise ConfigError(f"write_limit={text} is not a rate; write for example 100MiB/s or 50GiB/day")
        rate = size / _PERIODS[match[2]]
        return cls(rate, rate * _BURST[match[2]])

    def take(self, size: int) -> bool:
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._then) * self._per_second)
        self._then = now
        if size > self._left:
            return False
        self._left -= size
        return True


class Admission:
    """``second``: a unit is taken when it is offered for the second time."""

    def __init__(self, rate: Rate | None = None, second: bool = False) -> None:
        self._rate = rate
        self._second = second
        self._seen: OrderedDict[BlockKey, None] = OrderedDict()

    def takes(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> list[bool]:
        return [self._was_seen(key) and self._fits(size) for key, size in zip(keys, sizes, strict=True)]

    def _was_seen(self, key: BlockKey) -> bool:
        if not self._second:
            return True
        if key in self._seen:
            self._seen.move_to_end(key)
            return True
        self._seen[key] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return False

    def _fits(self, size: int) -> bool:
        return self._rate is None or self._rate.take(size)
