"""A tier that is asked (a disk, a shared store): scheduler half, and what it needs of the store itself.

Owns: asking without blocking, the decision when to leave a broken or slow store alone.  Does not own: the memory of
answers (``answers``), bytes (``store_mover``), any store's protocol (each connector brings its ``Directory`` and its
``Records``, both in ``records``).

::

    scheduler's thread   probe(keys) --unknown--> queue          offer(keys) -> True where not held
                              ^                     |
    lookup thread             |             Directory.contains(names), all that wait in one batch
                              +---- answers, each good for ``ttl_s`` ----+--> notify()
                              +---- True for what was stored ------- mover's store thread
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Final, Protocol

from ostinato.cache.keys import BlockKey
from ostinato.connectors.answers import Answers
from ostinato.connectors.api import Capabilities, Connector, DevicePages, Mover, Site
from ostinato.connectors.breaker import Breakers
from ostinato.connectors.records import CLOSE_S, Directory, Records, StoreLink, record_name

log: Final = logging.getLogger(__name__)
MAX_QUESTION: Final = 4096
"""Keys after which a question takes no more of those that wait."""
REFUTED_S: Final = 5.0
"""Seconds for which a store that failed to deliver a record is not asked for it again."""
MAX_BACKLOG: Final = 256 << 20
"""Bytes on their way into the store, above which nothing is offered to it: they pin device pages."""


class StoreTraffic(Protocol):
    """What the scheduler half wants to know of the mover."""

    @property
    def backlog_bytes(self) -> int: ...

    @property
    def faults(self) -> Mapping[str, int]: ...


class StoreConnector(Connector):
    """Scheduler half of an asked tier.  A subclass sets nothing else than how its two sides are opened."""

    def __init__(self, capabilities: Capabilities, ttl_s: float = 2.0, breakers: Breakers | None = None) -> None:
        self.capabilities = capabilities
        self.breakers = breakers or Breakers()
        self.site: Site | None = None
        self._ttl = ttl_s
        self._answers = Answers(time.monotonic)
        self._questions: SimpleQueue[tuple[BlockKey, ...] | None] = SimpleQueue()
        self._notify: Callable[[], None] = lambda: None
        self._lookups: threading.Thread | None = None
        self._closing = False
        self._traffic: StoreTraffic | None = None

    # What a subclass provides.

    def open_directory(self, site: Site) -> Directory:
        """Called on the lookup thread at the first question, and again after a failure; may block, may raise."""
        raise NotImplementedError

    def open_records(self, site: Site) -> Records:
        """Called on a mover's thread at the first order, and again after a failure; may block, may raise."""
        raise NotImplementedError

    # What the core calls.

    def open(self, site: Site) -> None:
        self.site = site

    def make_mover(self, device: DevicePages, notify: Callable[[], None]) -> Mover:
        from ostinato.connectors.store_mover import StoreMover

        assert self.site is not None, "open() comes first"
        site, self._notify = self.site, notify
        link = StoreLink(self.tier, site.identity, self.breakers, lambda: self.open_records(site), self._stored)
        mover = StoreMover(device, notify, link)
        self._traffic = mover
        return mover

    @property
    def faults(self) -> Mapping[str, int]:
        """Records that were not what was asked for, by kind of fault (:class:`~ostinato.connectors.record.Fault`)."""
        return {} if self._traffic is None else dict(self._traffic.faults)

    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        # An answer is of no use while nothing can be loaded, and none will come while questions are held back.
        if self.breakers.lookup.is_open or self.breakers.load.is_open:
            return [False] * len(keys)
        answers = self._answers.look_up(keys)
        known = [answer for answer in answers if answer is not None]
        if len(known) == len(keys):
            return known
        new = self._answers.claim([key for key, answer in zip(keys, answers, strict=True) if answer is None])
        if new:
            self._question(new)
        return None

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        if self.site is None or self._traffic is None or self.breakers.store.is_open:
            return [False] * len(keys)
        groups, wanted = self.site.layout.groups, []
        room = MAX_BACKLOG - self._traffic.backlog_bytes
        for key, held in zip(keys, self._answers.look_up(keys), strict=True):
            wanted.append(room > 0 and not held)
            room -= groups[key.group].unit_bytes if wanted[-1] else 0
        return wanted

    def refuted(self, keys: Sequence[BlockKey]) -> None:
        now = time.monotonic()
        self._answers.remember(keys, [False] * len(keys), now, now + REFUTED_S)

    def close(self) -> None:
        self._closing = True
        if self._lookups is not None:
            self._questions.put(None)
            self._lookups.join(CLOSE_S)
            if self._lookups.is_alive():
                log.warning("tier %s: a question has hung for %.0f s; left behind", self.tier, CLOSE_S)

    # Other threads.

    def _question(self, keys: tuple[BlockKey, ...]) -> None:
        if self._lookups is None:
            self._lookups = threading.Thread(target=self._answer_all, name=f"ostinato-{self.tier}-lookup", daemon=True)
            self._lookups.start()
        self._questions.put(keys)

    def _answer_all(self) -> None:
        """The lookup thread."""
        directory: Directory | None = None
        assert self.site is not None
        while keys := self._next_question():
            held, began = [False] * len(keys), time.monotonic()
            if self.breakers.lookup.allows():
                try:
                    directory = directory or self.open_directory(self.site)
                    reply = directory.contains([record_name(key) for key in keys])
                    if len(reply) != len(keys):
                        raise ValueError(f"{len(reply)} answers to {len(keys)} questions")
                    held = [bool(answer) for answer in reply]
                    self.breakers.lookup.succeeded()
                except Exception as error:
                    log.warning("tier %s cannot be asked (%s); counted as holding nothing", self.tier, error)
                    self.breakers.lookup.failed()
                    _close(directory)
                    directory = None
            now = time.monotonic()
            # Good for longer than it takes to ask again: else those asked first would be stale when the last are known.
            self._answers.remember(keys, held, began, now + max(self._ttl, 2 * (now - began)))
            self._answers.settle(keys)
            self._notify()
        _close(directory)

    def _next_question(self) -> list[BlockKey]:
        """All keys that wait to be asked about; empty = the end."""
        keys: list[BlockKey] = list(self._questions.get() or ())
        while keys and len(keys) < MAX_QUESTION and not self._closing:
            try:
                keys += self._questions.get_nowait() or ()
            except Empty:
                break
        return [] if self._closing else keys

    def _stored(self, keys: Sequence[BlockKey]) -> None:
        """The store took these (the mover's store thread)."""
        now = time.monotonic()
        self._answers.remember(keys, [True] * len(keys), now, now + self._ttl)


def _close(directory: Directory | None) -> None:
    if directory is not None:
        try:
            directory.close()
        except Exception as error:
            log.debug("closing a directory failed: %s", error)
