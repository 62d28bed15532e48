"""A circuit breaker: a store that fails is left alone for a while, and tried again by one call.

Owns: the state.  Does not own: what a failure is (the caller says so), time (a clock is given).  Any thread.

::

    CLOSED --limit failures in a row--> OPEN --after pause_s, one trial--> CLOSED | OPEN, for twice as long

A call that is still on its way after ``patience_s`` holds others back too, until it returns: whatever waits behind it
would only wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


class Breaker:
    """``allows()`` before a call, ``succeeded()`` or ``failed()`` after it, on the same thread."""

    def __init__(
        self,
        limit: int = 3,
        pause_s: float = 1.0,
        max_pause_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = 3.0,
    ) -> None:
        self._limit = limit
        self._first_pause = self._pause = pause_s
        self._max_pause = max_pause_s
        self._clock = clock
        self._patience = patience_s
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0
        self._trial: int | None = None
        """The thread that makes the trial."""
        self._calls: dict[int, float] = {}
        """Threads with a call on its way, and when it began."""
        self.trips = 0
        """How often it opened."""

    @property
    def is_open(self) -> bool:
        """Whether calls are held back now; asks without taking the trial."""
        with self._lock:
            now = self._clock()
            return self._holds(now) or any(now - start > self._patience for start in self._calls.values())

    def allows(self) -> bool:
        """Whether to make a call now.  After a pause one caller gets True, and must report how it went."""
        with self._lock:
            now, me = self._clock(), threading.get_ident()
            if self._holds(now):
                return False
            if self._failures >= self._limit:
                self._trial = me
            self._calls[me] = now
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._calls.pop(threading.get_ident(), None)
            self._failures, self._trial, self._pause = 0, None, self._first_pause

    def failed(self) -> None:
        with self._lock:
            me = threading.get_ident()
            self._calls.pop(me, None)
            trial = self._trial == me
            if self._failures >= self._limit and not trial:
                return  # a call from before it opened: nothing new
            self._failures += 1
            if self._failures < self._limit:
                return
            if trial:
                self._pause = min(2 * self._pause, self._max_pause)
            self._trial = None
            self._until = self._clock() + self._pause
            self.trips += 1

    def _holds(self, now: float) -> bool:
        return self._failures >= self._limit and (self._trial is not None or now < self._until)


@dataclass(frozen=True, slots=True)
class Breakers:
    """One per kind of call: a store may answer questions and deliver nothing, or be full and still deliver."""

    lookup: Breaker = field(default_factory=Breaker)
    load: Breaker = field(default_factory=Breaker)
    store: Breaker = field(default_factory=Breaker)
