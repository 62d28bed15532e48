"""Tiers below host memory: disk and stores, which are asked, loaded from and stored to.

Owns: their movers, the book of what they move, what waits to be stored.  Does not own: host memory (``host_cache``),
which of what they hold makes a hit (``lookup``).  Movers run in the scheduler's process, between host memory and their
tier; vLLM's workers never meet them.  Thread: the scheduler's only.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from ostinato.cache.directory import Entry
from ostinato.cache.keys import BlockKey
from ostinato.cache.pool import Lease
from ostinato.connectors.api import Connector, Mover, Ownership, Site
from ostinato.connectors.hooks import GuardedProbe, close_all
from ostinato.connectors.multi import expand
from ostinato.connectors.registry import make_connector
from ostinato.errors import ConfigError
from ostinato.ids import JobId, Step, TierId
from ostinato.integrations.vllm.host_cache import HOST, HostCache
from ostinato.transfer.book import Book, release
from ostinato.transfer.job import JobKind, Move, TransferJob, TransferOrder, TransferReport

log: Final = logging.getLogger(__name__)
STORE_S: Final = 60.0
PIN_SHARE: Final = 0.5
"""Part of host memory that stores may hold."""
NOW: Final = Step(0)
"""Host memory that an order names is ready when it is ordered."""


class Below:
    """All tiers below host memory, fastest first."""

    def __init__(self, connectors: Sequence[Connector], host: HostCache, pages: Any, patience: float) -> None:
        self.book = Book()
        self.probes: Mapping[TierId, GuardedProbe] = {c.tier: GuardedProbe(c, lambda: None) for c in connectors}
        self._connectors = connectors
        self._movers: dict[TierId, Mover] = {}
        self._host = host
        self._patience = patience
        self._waiting: dict[TierId, deque[BlockKey]] = {c.tier: deque(maxlen=host.pool.capacity) for c in connectors}
        try:
            for connector in connectors:
                self._movers[connector.tier] = connector.make_mover(pages, lambda: None)
        except BaseException:
            self.close()
            raise

    @property
    def busy(self) -> bool:
        return len(self.book) > 0

    def store(self, entries: Sequence[Entry]) -> None:
        """Offer what host memory has got; each tier gets what it wants, as soon as stores may pin it."""
        keys = [entry.key for entry in entries]
        for tier, probe in self.probes.items():
            if keys:
                wanted = probe.offer(keys)
                self._waiting[tier].extend(key for key, wants in zip(keys, wanted, strict=True) if wants)
        self._catch_up()

    def fetch(self, tier: TierId, moves: Sequence[Move], lease: Lease, job_id: JobId) -> None:
        """Load into the host slots that ``moves`` name and ``lease`` holds."""
        self._order(TransferOrder(job_id, JobKind.LOAD, tier, tuple(moves), NOW), lease, self._patience)

    def settle(self, now: float) -> list[TransferJob]:
        """What movers reported, and what they did not in time: loads that are over (``failed`` says what came not)."""
        over = []
        for job in self.book.expire(now):
            self._movers[job.order.tier].cancel(job.job_id)
            if job.order.kind is JobKind.LOAD:
                self._conclude(job, set(range(len(job.order.moves))))
                over.append(job)
        for mover in self._movers.values():
            over += [load for report in mover.poll() if (load := self._reported(report)) is not None]
        self._catch_up()
        return over

    def _reported(self, report: TransferReport) -> TransferJob | None:
        """A load that is over with this report; one that is in doubt was given up before."""
        job = self.book.report(report)
        if job is None:
            return None
        ends = job.order.kind is JobKind.LOAD and not job.device_lease.quarantined
        if ends:
            self._conclude(job, set(job.failed))
        release(job)
        return job if ends else None

    def close(self) -> None:
        """Stores that were ordered get the time that their movers give them."""
        for mover in self._movers.values():
            try:
                mover.close()
            except Exception:
                log.exception("a mover failed in close()")
        close_all(self._connectors)

    def _conclude(self, job: TransferJob, failed: Collection[int]) -> None:
        lost = []
        for index, move in enumerate(job.order.moves):
            self._host.conclude(move.key, job.job_id, index not in failed)
            if index in failed:
                lost.append(move.key)
        job.failed.update(failed)
        if lost:
            self.probes[job.order.tier].refuted(lost)

    def _catch_up(self) -> None:
        room = int(PIN_SHARE * self._host.pool.capacity) - len(self.book.stored_slots)
        for tier, keys in self._waiting.items():
            moves: list[Move] = []
            while keys and room > 0:
                entry = self._host.directory.get(keys.popleft())
                place = entry.places.get(HOST) if entry is not None else None
                if entry is not None and place is not None and place.ready:  # else: evicted before its turn
                    moves.append(self._host.move(entry.key, entry.ordinal, place.slot))
                    room -= 1
            if moves:
                lease = self._host.pool.share([move.device_slot for move in moves], f"store to {tier}")
                order = TransferOrder(self._host.copies.new_id(), JobKind.STORE, tier, tuple(moves), NOW)
                self._order(order, lease, STORE_S)

    def _order(self, order: TransferOrder, lease: Lease, patience: float) -> None:
        self.book.open(order, lease, None, patience)
        self.book.dispatch(time.monotonic())
        self._movers[order.tier].submit(order)


def open_below(texts: Sequence[str], site: Site) -> tuple[Connector, ...]:
    """The connectors that ``texts`` name, open.  What was made until something failed is closed."""
    made: list[Connector] = []
    try:
        for text in texts:
            made.append(make_connector(text))
        connectors = expand(made)
        names = [connector.tier for connector in connectors]
        if len(set(names)) < len(names):
            raise ConfigError("two tiers have one name; each may be given once")
        for connector in connectors:
            if connector.capabilities.ownership is Ownership.OWNED:
                raise ConfigError(f"tier {connector.tier!r} cannot stand below host memory in vLLM")
            if connector.capabilities.hooks:
                raise ConfigError(f"tier {connector.tier!r} wants to see the scheduler's blocks; not inside of vLLM")
            connector.open(site)
    except BaseException:
        close_all(made)
        raise
    return connectors
