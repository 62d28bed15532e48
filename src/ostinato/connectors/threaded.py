"""What all movers with a load and a store thread have in common.

Owns: the two queues and their threads (a load never queues behind a store), reports until they are polled, which orders
were cancelled.  Does not own: what is done with an order.  ``submit``, ``poll`` and ``cancel`` are called by the
worker's thread only and never block.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from ostinato.ids import JobId, TierId
from ostinato.transfer.job import JobKind, TransferOrder, TransferReport


class ThreadedMover:
    """Base of movers.  A subclass calls :meth:`_start` when it is made, and reports each order once from ``_serve``."""

    def __init__(self, tier: TierId, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._reports: deque[TransferReport] = deque()
        self._pending: set[JobId] = set()
        self._cancelled: set[JobId] = set()
        self._queues: dict[JobKind, SimpleQueue[TransferOrder | None]] = {kind: SimpleQueue() for kind in JobKind}
        self._threads = [
            threading.Thread(
                target=self._serve, args=(iter(queue.get, None),), name=f"ostinato-{tier}-{kind.value}", daemon=True
            )
            for kind, queue in self._queues.items()
        ]

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
        """What was not begun is given up (and reported as failed); what has begun finishes."""
        if job_id in self._pending:
            self._cancelled.add(job_id)

    def _start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _stop(self) -> None:
        """No order after those that are queued."""
        for queue in self._queues.values():
            queue.put(None)

    def _report(self, report: TransferReport) -> None:
        self._reports.append(report)
        self._notify()

    def _serve(self, orders: Iterator[TransferOrder]) -> None:
        """One thread's work: ``orders`` ends when the mover is closed."""
        raise NotImplementedError
