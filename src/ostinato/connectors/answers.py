"""What a store said about keys, for as long as it is worth something.

Owns: answers, their age and their number; which keys are being asked about.  Does not own: asking (``store``).
Any thread: the scheduler's, the lookup thread and a mover's write it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ostinato.cache.keys import BlockKey

MAX_ANSWERS: Final = 1 << 18
"""Remembered answers; when there are more, all are forgotten and asked again."""


class _Answer(NamedTuple):
    held: bool
    until: float
    since: float
    """When it was true: an older one that arrives later does not replace it."""


class Answers:
    """``clock`` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[BlockKey, _Answer] = {}
        self._asked: set[BlockKey] = set()

    def __len__(self) -> int:
        return len(self._known)

    def look_up(self, keys: Sequence[BlockKey]) -> list[bool | None]:
        """What is known of each key; None = nothing, or nothing recent."""
        now = self._clock()
        with self._lock:
            known = [self._known.get(key) for key in keys]
        return [answer.held if answer is not None and answer.until > now else None for answer in known]

    def claim(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Those of ``keys`` that nobody is asking about yet; the caller does, and will :meth:`remember`."""
        with self._lock:
            new = tuple(key for key in dict.fromkeys(keys) if key not in self._asked)
            self._asked.update(new)
        return new

    def remember(self, keys: Sequence[BlockKey], held: Sequence[bool], since: float, until: float) -> None:
        """The store's state as of ``since``, to be believed before ``until``."""
        with self._lock:
            if len(self._known) > MAX_ANSWERS:
                self._known = {}
            for key, answer in zip(keys, held, strict=True):
                known = self._known.get(key)
                if known is None or known.since <= since or known.until <= since:
                    self._known[key] = _Answer(answer, until, since)

    def settle(self, keys: Sequence[BlockKey]) -> None:
        """Nobody asks about ``keys`` any more."""
        with self._lock:
            self._asked.difference_update(keys)
