"""Host memory as a tier: worker half.

Owns: the host arena and two threads, one for loads and one for stores (a load never queues behind a store).  Does not
own: which slot holds what.  ``submit``, ``poll`` and ``cancel`` are called by the worker's thread only.

The arena is one uint8 tensor ``[slots, page_bytes]``; the operating system gives it memory as it is first written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

import torch

from ostinato.connectors.api import DevicePages
from ostinato.ids import JobId
from ostinato.transfer.job import JobKind, Move, TransferOrder, TransferReport

log: Final = logging.getLogger(__name__)


class HostMover:
    """Copies pages between the device pool and host memory."""

    def __init__(self, device: DevicePages, slots: int, notify: Callable[[], None]) -> None:
        self.pages = torch.empty((slots, device.pages.shape[1]), dtype=torch.uint8)
        self._device = device
        self._notify = notify
        self._reports: deque[TransferReport] = deque()
        self._pending: set[JobId] = set()
        self._cancelled: set[JobId] = set()
        self._queues: dict[JobKind, SimpleQueue[TransferOrder | None]] = {kind: SimpleQueue() for kind in JobKind}
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=f"ostinato-host-{kind.value}", daemon=True)
            for kind, queue in self._queues.items()
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, order: TransferOrder) -> None:
        self._pending.add(order.job_id)
        self._queues[order.kind].put(order)

    def poll(self) -> list[TransferReport]:
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        ended = {report.job_id for report in reports}
        self._pending -= ended
        self._cancelled -= ended
        return reports

    def cancel(self, job_id: JobId) -> None:
        """A job that has not begun is dropped (and reported as failed); one that has begun finishes."""
        if job_id in self._pending:
            self._cancelled.add(job_id)

    def close(self) -> None:
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, queue: SimpleQueue[TransferOrder | None]) -> None:
        while (order := queue.get()) is not None:
            self._reports.append(self._execute(order))
            self._notify()

    def _execute(self, order: TransferOrder) -> TransferReport:
        everything = tuple(range(len(order.moves)))
        if order.job_id in self._cancelled:
            return TransferReport(order.job_id, failed=everything)
        start = time.perf_counter()
        try:
            self._copy(order)
        except Exception:
            log.exception("host %s of job %d failed; the blocks are computed again", order.kind.value, order.job_id)
            return TransferReport(order.job_id, failed=everything)
        return TransferReport(order.job_id, moved_bytes=order.total_bytes, seconds=time.perf_counter() - start)

    def _copy(self, order: TransferOrder) -> None:
        whole: list[Move] = []
        parts: list[Move] = []
        for move in order.moves:
            (whole if self._is_page(move) else parts).append(move)
        load = order.kind is JobKind.LOAD
        source, target = (self.pages, self._device.pages) if load else (self._device.pages, self.pages)
        if whole:
            device, host = [m.device_slot for m in whole], [m.tier_slot for m in whole]
            self._device.copy(source, target, *((host, device) if load else (device, host)))
        for move in parts:
            begin, end = move.offset, move.offset + move.length
            there, here = (move.tier_slot, move.device_slot) if load else (move.device_slot, move.tier_slot)
            target[here, begin:end].copy_(source[there, begin:end])

    def _is_page(self, move: Move) -> bool:
        """Whether the unit is its whole page, up to padding (which may travel too)."""
        return move.offset == 0 and 2 * move.length > self.pages.shape[1]
