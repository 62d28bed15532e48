"""What requests with hints were first to compute, and how long it may be found.

Owns: which keys are bound to expire or to go first, and whether somebody else uses them by now.  Does not own:
forgetting them (``removal``), eviction order (``cache.retention``).  Thread: the scheduler's only.

A key is watched while everybody who used it gave a hint.  Whoever uses it without one makes it an ordinary one: what
is shared does not end because one of its users is done.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Final

from ostinato.cache.keys import BlockKey
from ostinato.hierarchy.residency import Residency
from ostinato.ids import RequestId

_SPARE: Final = 1024


@dataclass(slots=True)
class _Life:
    """``users``: open requests with hints.  ``until``: -inf until the first of them ends, inf = it does not expire."""

    users: int
    until: float
    goes_first: bool


class Lifetimes:
    """Times are seconds of the hierarchy's clock."""

    def __init__(self) -> None:
        self._lives: dict[BlockKey, _Life] = {}
        self._keys: dict[RequestId, dict[BlockKey, None]] = {}
        self._ends: list[tuple[float, int, tuple[BlockKey, ...]]] = []
        self._pushes = 0
        self._released: list[BlockKey] = []

    def __len__(self) -> int:
        """Keys that are watched."""
        return len(self._lives)

    def expires(self, key: BlockKey) -> bool:
        """Whether ``key`` is bound to expire, so that nothing which outlives the process may have it."""
        life = self._lives.get(key)
        return life is not None and life.until < math.inf

    def begin(self, request: Residency, keys: Iterable[BlockKey]) -> None:
        """The request published ``keys`` first."""
        hints = request.hints
        if hints.ttl_s is None and not hints.end_of_use:
            return
        mine = self._keys.setdefault(request.request_id, {})
        for key in keys:
            until = -math.inf if hints.ttl_s is not None else math.inf
            self._lives[key] = _Life(1, until, hints.end_of_use)
            mine[key] = None

    def use(self, request: Residency, key: BlockKey) -> None:
        """The request found ``key``, or computed it a second time."""
        life, hints = self._lives.get(key), request.hints
        if life is None or key in self._keys.get(request.request_id, ()):
            return
        if hints.no_store:  # it leaves no trace
            return
        if hints.ttl_s is None and not hints.end_of_use:
            if self.expires(key):
                self._released.append(key)
            del self._lives[key]
            return
        life.users += 1
        life.goes_first &= hints.end_of_use
        if hints.ttl_s is None:
            if life.until < math.inf:
                self._released.append(key)
            life.until = math.inf
        self._keys.setdefault(request.request_id, {})[key] = None

    def take_released(self) -> list[BlockKey]:
        """Keys that do not expire any more, since the last call."""
        released, self._released = self._released, []
        return released

    def end(self, request: Residency, now: float) -> list[BlockKey]:
        """The request is over; returns the keys that go first from now on."""
        keys = [key for key in self._keys.pop(request.request_id, {}) if key in self._lives]
        first = []
        until = now + (request.hints.ttl_s or math.inf)
        for key in keys:
            life = self._lives[key]
            life.users -= 1
            life.until = max(life.until, until)
            if life.goes_first and not life.users:
                first.append(key)
            if not life.users and life.until == math.inf:
                del self._lives[key]
        if until < math.inf and keys:
            self._pushes += 1
            heapq.heappush(self._ends, (until, self._pushes, tuple(keys)))
        return first

    def due(self, now: float) -> list[BlockKey]:
        """Keys whose time is up; they are not watched any more."""
        due = []
        while self._ends and self._ends[0][0] <= now:
            for key in heapq.heappop(self._ends)[2]:
                life = self._lives.get(key)
                if life is not None and not life.users and life.until <= now:
                    del self._lives[key]
                    due.append(key)
        return due

    def prune(self, cached: Container[BlockKey], size: int) -> None:
        """Forget what was evicted before its time, when that is more than what is cached: ``size`` keys."""
        if len(self._lives) > 2 * size + _SPARE:
            gone = [key for key, life in self._lives.items() if not life.users and key not in cached]
            for key in gone:
                del self._lives[key]
