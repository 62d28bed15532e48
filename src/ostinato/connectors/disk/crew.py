"""A few threads that share one batch: while one waits for the disk or copies, another checks what it has.

Owns: the threads, made when first needed.  Does not own: what a piece of work is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")
R = TypeVar("R")
HANDS: Final = 2
"""Threads per direction; more only fight for the interpreter."""
SHARES: Final = 4
"""Portions per thread: few, since handing one over is not free; some, since they take unequal time."""


class Crew:
    """Work of one direction: loads have a crew of their own, so that they never wait for stores."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: ThreadPoolExecutor | None = None

    def each(self, work: Callable[[T], R], pieces: Sequence[T]) -> list[R]:
        """Results in order; the first exception is raised after all pieces have ended."""
        if len(pieces) < 2:
            return [work(piece) for piece in pieces]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(HANDS, self._name)
        share = -(-len(pieces) // (SHARES * HANDS))
        shares = [pieces[start : start + share] for start in range(0, len(pieces), share)]
        futures = [self._threads.submit(lambda some: [work(piece) for piece in some], some) for some in shares]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            raise errors[0]
        return [result for future in futures for result in future.result()]

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
