"""Asking an LMCache server about prompts.

Owns: the lookup thread, and that every lookup ends: in a load that takes it over, or released here.  Does not own: the
answers (``lmcache_claims``), the protocol (``lmcache_mover``).  The scheduler's thread calls :meth:`Lookups.ask`.

::

    ask(tip, chain) -> queue -> look_up at the server -> claims.answer -> notify
                                     |                       |
                                     +-- 0 units: ended      +-- loaded: the mover ends it;  not loaded: released here
"""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, Protocol

from ostinato.cache.keys import BlockKey
from ostinato.cache.layout import CacheLayout
from ostinato.connectors.breaker import Breaker
from ostinato.connectors.lmcache_claims import Chain, Claims, Lookup, Written, required_keys
from ostinato.connectors.records import CLOSE_S

log: Final = logging.getLogger(__name__)
SWEEP_S: Final = 0.5
"""How often lookups that nobody uses are looked for, while there are any."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is.

    ``url`` as LMCache has it; ``buffer``: bytes of shared memory of each of two threads that move records;
    ``timeout``: seconds for each call.
    """

    url: str
    buffer: int = 64 << 20
    timeout: float = 2.0


class LookupLink(Protocol):
    """A connection to the server; every call may block for as long as its own time-out, and may raise."""

    def look_up(self, name: str, chain: Chain) -> int:
        """Units of ``chain`` that can be restored.  More than 0: what is needed for them is held until it is ended."""

    def end(self, lookup: Lookup) -> None:
        """Release what a lookup holds."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Desk:
    """What both halves share.  ``names`` are unique among all clients of a server."""

    layout: CacheLayout
    claims: Claims
    written: Written
    names: Callable[[], str]


def look_up(desk: Desk, link: LookupLink, chain: Chain) -> Lookup | None:
    """What ``link`` says of ``chain``, and holds; None = nothing.  One that fails is ended when that is possible."""
    name = desk.names()
    try:
        units = link.look_up(name, chain)
    except BaseException:
        desk.claims.give_back(Lookup(name, chain))
        raise
    return Lookup(name, chain[:units]) if units else None


def make_names() -> Callable[[], str]:
    prefix, numbers = uuid.uuid4().hex, itertools.count()
    return lambda: f"{prefix}-{next(numbers)}"


class Lookups:
    """``connect`` is called on the lookup thread, at the first question and after a failure."""

    def __init__(
        self, desk: Desk, breaker: Breaker, connect: Callable[[], LookupLink], notify: Callable[[], None]
    ) -> None:
        self._desk = desk
        self._breaker = breaker
        self._connect = connect
        self._notify = notify
        self._link: LookupLink | None = None
        self._questions: SimpleQueue[tuple[bytes, Chain] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, tip: bytes, chain: Chain) -> None:
        if not self._desk.claims.ask(tip):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ostinato-lmcache-lookup", daemon=True)
            self._thread.start()
        self._questions.put((tip, chain))

    def close(self) -> None:
        if self._thread is not None:
            self._questions.put(None)
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.warning("tier lmcache: a lookup has hung for %.0f s; left behind", CLOSE_S)

    def _run(self) -> None:
        while True:
            try:
                question = self._questions.get(timeout=SWEEP_S if self._desk.claims.holds_lookups() else None)
            except Empty:
                self._sweep()
                continue
            if question is None:
                break
            self._answer(*question)
            self._sweep()
        self._sweep(last=True)
        self._disconnect()

    def _answer(self, tip: bytes, chain: Chain) -> None:
        desk, lookup = self._desk, None
        if self._breaker.allows():
            try:
                self._link = self._link or self._connect()
                lookup = look_up(desk, self._link, chain)
                self._breaker.succeeded()
                # Perhaps more is there than is claimed; storing that again costs little.
                desk.written.discard(BlockKey(spec.group, digest) for spec in desk.layout.groups for digest in chain)
            except Exception as error:
                self._failed("cannot be asked", error)
        found: Chain = lookup.chain if lookup is not None else ()
        held = required_keys(desk.layout, found) if found else frozenset()
        desk.written.add(held)
        desk.claims.answer(tip, found, held, lookup)
        self._notify()

    def _sweep(self, last: bool = False) -> None:
        """What cannot be released is tried again, and at last left to the server's own time limit."""
        lookups = self._desk.claims.overdue(last)
        while lookups:
            if not self._breaker.allows():
                break
            try:
                self._link = self._link or self._connect()
                self._link.end(lookups[-1])
                self._breaker.succeeded()
                lookups.pop()
            except Exception as error:
                self._failed("did not release a lookup", error)
                break
        for lookup in lookups:
            self._desk.claims.give_back(lookup)

    def _failed(self, what: str, error: Exception) -> None:
        log.warning("tier lmcache %s (%s); counted as holding nothing", what, error)
        self._breaker.failed()
        self._disconnect()
        self._desk.written.clear()  # when it is back, it may be another server, and an empty one

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            try:
                link.close()
            except Exception as error:
                log.debug("tier lmcache: closing failed: %s", error)
