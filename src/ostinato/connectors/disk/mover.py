"""The disk tier: worker half.  A load and a store thread between device pages and a :class:`Bytes`.

Owns: batches, one report per order.  Does not own: the threads (``connectors.threaded``), files and index (``store``).
Loads go straight into the device pages that the order names: a page whose load fails is never published, so it does not
matter what was written to it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from ostinato.connectors.api import DevicePages
from ostinato.connectors.disk.codec import Item
from ostinato.connectors.threaded import ThreadedMover
from ostinato.ids import TierId
from ostinato.transfer.job import JobKind, Move, TransferOrder, TransferReport

log: Final = logging.getLogger(__name__)
BATCH_RECORDS: Final = 1024
BATCH_BYTES: Final = 32 << 20


class Bytes(Protocol):
    """Where records are; both calls may block and are made by a thread each."""

    def write(self, items: Sequence[Item]) -> list[bool]: ...

    def read(self, items: Sequence[Item]) -> list[bool]: ...


class DiskMover(ThreadedMover):
    """``drain_s``: how long :meth:`close` goes on with stores that were ordered."""

    def __init__(self, device: DevicePages, notify: Callable[[], None], store: Bytes, drain_s: float) -> None:
        super().__init__(TierId("disk"), notify)
        self._memory = memoryview(device.pages.numpy()).cast("B") if device.pages.numel() else memoryview(b"")
        self._page_bytes = int(device.pages.shape[1])
        self._store = store
        self._drain_s = drain_s
        self._give_up = threading.Event()
        self._start()

    def close(self) -> None:
        """Finish what was ordered, but begin nothing after ``drain_s`` seconds."""
        self._stop()
        deadline = time.monotonic() + self._drain_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._give_up.set()
        for thread in self._threads:
            thread.join()

    def _serve(self, orders: Iterator[TransferOrder]) -> None:
        for order in orders:
            self._report(self._carry_out(order))

    def _carry_out(self, order: TransferOrder) -> TransferReport:
        start, failed = time.perf_counter(), set(range(len(order.moves)))
        move = self._store.read if order.kind is JobKind.LOAD else self._store.write
        try:
            for first, moves in _batches(order.moves):
                if order.job_id in self._cancelled or self._give_up.is_set():
                    break
                done = move([self._item(one) for one in moves])
                failed.difference_update(first + index for index, good in enumerate(done) if good)
        except Exception:
            log.exception("disk: %s of job %d failed; the blocks are computed again", order.kind.value, order.job_id)
        moved = sum(one.length for index, one in enumerate(order.moves) if index not in failed)
        return TransferReport(order.job_id, 0, tuple(sorted(failed)), moved, time.perf_counter() - start)

    def _item(self, move: Move) -> Item:
        begin = move.device_slot * self._page_bytes + move.offset
        return Item(move.key, move.ordinal, self._memory[begin : begin + move.length])


def _batches(moves: Sequence[Move]) -> Iterator[tuple[int, Sequence[Move]]]:
    """Runs of moves that are handed over together, with the index of the first."""
    first = size = 0
    for index, move in enumerate(moves):
        if index > first and (index - first == BATCH_RECORDS or size + move.length > BATCH_BYTES):
            yield first, moves[first:index]
            first, size = index, 0
        size += move.length
    if first < len(moves):
        yield first, moves[first:]
