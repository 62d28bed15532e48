"""A tier that is asked: worker half.  Reads and writes records on threads of its own.

Owns: batches, sealing and checking of records, one report per order.  Does not own: the threads (``threaded``), the
store's protocol (``Records``), when a store is left alone (``breaker``, shared with the scheduler half).  ``close`` is
called by the worker's thread, and the only call that waits.

Loads go straight into the device pages that the order names: a page whose load fails is never published, so it does not
matter what was written to it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ostinato.connectors.api import DevicePages
from ostinato.connectors.record import TRAILER_BYTES, check, seal
from ostinato.connectors.records import CLOSE_S, Record, Records, StoreLink, record_name
from ostinato.connectors.threaded import ThreadedMover
from ostinato.transfer.job import JobKind, Move, TransferOrder, TransferReport

log: Final = logging.getLogger(__name__)
BATCH_RECORDS: Final = 256
BATCH_BYTES: Final = 32 << 20


class StoreMover(ThreadedMover):
    """``link.open_records`` connects; it is called on the mover's threads, when the first order comes."""

    def __init__(self, device: DevicePages, notify: Callable[[], None], link: StoreLink) -> None:
        super().__init__(link.tier, notify)
        self.faults: Counter[str] = Counter()
        """Records that were not what was asked for, by kind of fault."""
        self._memory = memoryview(device.pages.numpy()).cast("B") if device.pages.numel() else memoryview(b"")
        self._page_bytes = int(device.pages.shape[1])
        self._link = link
        self._breakers = {JobKind.LOAD: link.breakers.load, JobKind.STORE: link.breakers.store}
        self._closing = False
        # Two counters, each written by one thread.
        self._bytes_taken = 0
        self._bytes_ended = 0
        self._start()

    @property
    def backlog_bytes(self) -> int:
        """Bytes of stores that were ordered and are not reported yet: what they pin of the device."""
        return self._bytes_taken - self._bytes_ended

    def submit(self, order: TransferOrder) -> None:
        if order.kind is JobKind.STORE:
            self._bytes_taken += order.total_bytes
        super().submit(order)

    def close(self) -> None:
        """Give up what was not begun, and wait for the batches that were, which the store's own time-outs bound."""
        self._closing = True
        self._stop()
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                log.warning("tier %s: %s has hung for %.0f s; left behind", self._link.tier, thread.name, CLOSE_S)

    def _serve(self, orders: Iterator[TransferOrder]) -> None:
        records: Records | None = None
        for order in orders:
            start, failed = time.perf_counter(), set(range(len(order.moves)))
            breaker = self._breakers[order.kind]
            for first, moves in _batches(order.moves, self._link):
                if self._closing or order.job_id in self._cancelled or not breaker.allows():
                    break
                try:
                    records = records or self._link.open_records()
                    good = self._move(records, order.kind, moves)
                except Exception as error:
                    log.warning("tier %s: a %s failed (%s)", self._link.tier, order.kind.value, error)
                    breaker.failed()
                    self._close(records)
                    records = None
                    break
                failed.difference_update(first + index for index, moved in enumerate(good) if moved)
                if order.kind is JobKind.STORE and not any(good):
                    log.warning("tier %s took none of %d records: it is full", self._link.tier, len(good))
                    breaker.failed()
                    # The next try may be long from now, and should not fail because a connection is gone by then.
                    self._close(records)
                    records = None
                    break
                breaker.succeeded()
            moved = sum(move.length for index, move in enumerate(order.moves) if index not in failed)
            took = time.perf_counter() - start
            if order.kind is JobKind.STORE:
                self._bytes_ended += order.total_bytes
            self._report(TransferReport(order.job_id, 0, tuple(sorted(failed)), moved, took))
        self._close(records)

    def _move(self, records: Records, kind: JobKind, moves: Sequence[Move]) -> Sequence[bool]:
        batch = [self._record(move) for move in moves]
        if kind is JobKind.STORE:
            for move, record in zip(moves, batch, strict=True):
                record.trailer[:] = seal(self._link.identity, move.key, move.ordinal, [record.payload])
            good = _answers(records.store(batch), batch)
            self._link.stored([record.key for record, taken in zip(batch, good, strict=True) if taken])
            return good
        return self._check(batch, _answers(records.load(batch), batch))

    def _record(self, move: Move) -> Record:
        begin = move.device_slot * self._page_bytes + move.offset
        payload = self._memory[begin : begin + move.length]
        return Record(record_name(move.key), move.key, payload, bytearray(TRAILER_BYTES))

    def _check(self, batch: Sequence[Record], found: Sequence[bool]) -> Sequence[bool]:
        """Which of the records that were found are what was asked for."""
        faults: Counter[str] = Counter()
        good = []
        for record, there in zip(batch, found, strict=True):
            fault = check(self._link.identity, record.key, [record.payload], record.trailer) if there else None
            good.append(there and fault is None)
            if fault is not None:
                faults[fault.value] += 1
        if faults:
            self.faults.update(faults)
            what = ", ".join(f"{kind} {count}" for kind, count in faults.items())
            log.warning("tier %s: unusable records (%s); their tokens are computed again", self._link.tier, what)
        return good

    def _close(self, records: Records | None) -> None:
        if records is not None:
            try:
                records.close()
            except Exception as error:
                log.debug("tier %s: closing failed: %s", self._link.tier, error)


def _answers(given: Sequence[bool], batch: Sequence[Record]) -> Sequence[bool]:
    if len(given) != len(batch):
        raise ValueError(f"{len(given)} answers for {len(batch)} records")
    return [bool(answer) for answer in given]


def _batches(moves: Sequence[Move], link: StoreLink) -> Iterator[tuple[int, Sequence[Move]]]:
    """Runs of moves that are handed over together, with the index of the first."""
    max_bytes, max_records = link.batch_bytes or BATCH_BYTES, link.batch_records or BATCH_RECORDS
    first = size = 0
    for index, move in enumerate(moves):
        if index > first and (index - first == max_records or size + move.length > max_bytes):
            yield first, moves[first:index]
            first, size = index, 0
        size += move.length
    if first < len(moves):
        yield first, moves[first:]
