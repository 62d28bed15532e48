"""A store in this process for tests of the base of asked tiers: it can block, raise, lose, corrupt and answer late."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from field.scripted import Clock
from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import Full
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.connectors.api import Capabilities, Ownership, Site
from ostinato.connectors.breaker import Breaker, Breakers
from ostinato.connectors.record import TRAILER_BYTES, RecordIdentity
from ostinato.connectors.records import Record, record_name
from ostinato.connectors.store import StoreConnector
from ostinato.ids import HOLE, GroupId, JobId, Ordinal, SlotId, Step, TierId
from ostinato.transfer.job import JobKind, Move, TransferOrder

LOOKUP, LOAD, STORE = "lookup", "load", "store"
IDENTITY = RecordIdentity(b"l" * 32, b"n" * 32)
UNIT = 64
LAYOUT = CacheLayout((GroupSpec(GroupId(0), Full(), (0,), 16, 1, 16, UNIT, UNIT),), UNIT)


class MemoryStore:
    """``gates``: a call waits until its gate is open.  ``broken``: calls of these kinds raise."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.gates = {kind: threading.Event() for kind in (LOOKUP, LOAD, STORE)}
        for gate in self.gates.values():
            gate.set()
        self.broken: set[str] = set()
        self.room = 1 << 30
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.opened: Counter[str] = Counter()
        self.closed: Counter[str] = Counter()
        self.edit: Callable[[str, Any], Any] = lambda kind, reply: reply

    def enter(self, kind: str, names: Sequence[str]) -> None:
        self.calls.append((kind, tuple(names)))
        assert self.gates[kind].wait(30), "a test forgot to open the gate"
        if kind in self.broken:
            raise ConnectionError(f"{kind} is broken")

    def count(self, kind: str) -> int:
        return sum(call == kind for call, _ in self.calls)


class Side:
    """A connection to the store: directory and records in one."""

    def __init__(self, store: MemoryStore, side: str) -> None:
        self._store = store
        self._side = side
        store.opened[side] += 1

    def contains(self, names: Sequence[str]) -> Sequence[bool]:
        self._store.enter(LOOKUP, names)
        return self._store.edit(LOOKUP, [name in self._store.content for name in names])

    def load(self, batch: Sequence[Record]) -> Sequence[bool]:
        self._store.enter(LOAD, [record.name for record in batch])
        found = []
        for record in batch:
            value = self._store.content.get(record.name)
            found.append(value is not None and len(value) == len(record.payload) + TRAILER_BYTES)
            if found[-1]:
                record.payload[:], record.trailer[:] = value[:-TRAILER_BYTES], value[-TRAILER_BYTES:]
        return self._store.edit(LOAD, found)

    def store(self, batch: Sequence[Record]) -> Sequence[bool]:
        self._store.enter(STORE, [record.name for record in batch])
        taken = []
        for record in batch:
            taken.append(len(self._store.content) < self._store.room)
            if taken[-1]:
                self._store.content[record.name] = bytes(record.payload) + bytes(record.trailer)
        return self._store.edit(STORE, taken)

    def close(self) -> None:
        self._store.closed[self._side] += 1


class MemoryConnector(StoreConnector):
    def __init__(self, store: MemoryStore, ttl_s: float = 30.0, breakers: Breakers | None = None) -> None:
        super().__init__(Capabilities(TierId("memory"), Ownership.SHARED), ttl_s, breakers)
        self.memory = store

    def open_directory(self, site: Site) -> Side:
        return Side(self.memory, "directory")

    def open_records(self, site: Site) -> Side:
        return Side(self.memory, "records")


class Pages:
    """A device pool of ``count`` pages of one unit each, every page with other bytes."""

    def __init__(self, count: int = 64) -> None:
        self.pages = torch.arange(count * UNIT).remainder(251).to(torch.uint8).reshape(count, UNIT)

    def copy(self, source: Any, target: Any, source_index: Sequence[int], target_index: Sequence[int]) -> None:
        raise AssertionError("asked tiers go to the bytes directly")


class Bench:
    """A connector with its mover and a device, driven by hand."""

    def __init__(self, store: MemoryStore, **options: Any) -> None:
        self.store = store
        self.device = Pages()
        self.notified = threading.Event()
        self.connector = MemoryConnector(store, **options)
        self.connector.open(Site(LAYOUT, IDENTITY))
        self.mover = self.connector.make_mover(self.device, self.notified.set)
        self.reports: dict[int, list[Any]] = {}
        self._jobs = 0

    def submit(self, kind: JobKind, moves: Sequence[tuple[BlockKey, int]]) -> int:
        self._jobs += 1
        made = [Move(key, Ordinal(0), SlotId(slot), HOLE, 0, UNIT) for key, slot in moves]
        self.mover.submit(TransferOrder(JobId(self._jobs), kind, self.connector.tier, tuple(made), Step(0)))
        return self._jobs

    def poll(self) -> None:
        for report in self.mover.poll():
            self.reports.setdefault(report.job_id, []).append(report)

    def wait(self, job: int, seconds: float = 10) -> Any:
        """The job's only report."""
        eventually(lambda: (self.poll(), job in self.reports)[1], seconds)
        assert len(self.reports[job]) == 1
        return self.reports[job][0]

    def move(self, kind: JobKind, *moves: tuple[BlockKey, int]) -> tuple[int, ...]:
        """Submit, wait; what failed."""
        return self.wait(self.submit(kind, moves)).failed

    def answer(self, *names: BlockKey) -> list[bool]:
        """Probe until there is an answer."""
        eventually(lambda: self.connector.probe(names) is not None)
        answer = self.connector.probe(names)
        assert answer is not None
        return list(answer)

    def close(self) -> None:
        self.mover.close()
        self.connector.close()


def timed() -> tuple[Breakers, Clock]:
    """Breakers whose time passes only when told to: 3 failures, pauses of 1 s, patience of 3 s."""
    clock = Clock()
    return Breakers(*(Breaker(clock=clock) for _ in range(3))), clock


def key(number: int) -> BlockKey:
    return BlockKey(GroupId(0), number.to_bytes(32, "big"))


def name(number: int) -> str:
    return record_name(key(number))


def eventually(done: Callable[[], Any], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.001)
