"""Faults of a worker half: reports that fail, are late, come twice, in another order, or never.

Owns: reports between the inner mover and the worker.  Does not own: moving bytes; a fault only spoils the target of a
load that it reports as failed.  Thread: the worker's.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

from ostinato.connectors.api import DevicePages, Mover
from ostinato.connectors.faults import Faults
from ostinato.ids import JobId
from ostinato.transfer.job import JobKind, TransferOrder, TransferReport

RUBBISH: Final = 0xA5
NO_JOB: Final = JobId(1 << 40)
REORDER_S: Final = 0.2
"""How long a report waits for another one to come first."""


@dataclass(slots=True)
class _Waiting:
    report: TransferReport
    due: float
    behind: bool
    """Goes out as soon as another one has."""


class FaultyMover:
    """Wraps the mover of one ``rank``.

    It notifies nobody of a report that was late: the worker finds it when it looks again.
    """

    def __init__(self, inner: Mover, device: DevicePages, faults: Faults, counts: Counter[str], rank: int = 0) -> None:
        self.inner = inner
        self._device = device
        self._faults = faults
        self._counts = counts
        self._rank = rank
        self._orders: dict[JobId, TransferOrder] = {}
        self._waiting: list[_Waiting] = []

    def submit(self, order: TransferOrder) -> None:
        self._orders[order.job_id] = order
        self.inner.submit(order)

    def poll(self) -> list[TransferReport]:
        for report in self.inner.poll():
            self._take(report)
        now = time.monotonic()
        ready = [item.report for item in self._waiting if item.due <= now and not item.behind]
        free = bool(ready)
        due = [item for item in self._waiting if item.due <= now and (not item.behind or free)]
        late = [item for item in self._waiting if item.behind and now >= item.due + REORDER_S and item not in due]
        self._waiting = [item for item in self._waiting if item not in due and item not in late]
        out = ready + [item.report for item in (*due, *late) if item.behind]
        for report in list(out):
            if self._faults.draws("duplicate", (self._rank, report.job_id)):
                self._counts["duplicate"] += 1
                out += [report, TransferReport(NO_JOB)]
        return out

    def cancel(self, job_id: JobId) -> None:
        self.inner.cancel(job_id)

    def close(self) -> None:
        self.inner.close()

    def _take(self, report: TransferReport) -> None:
        order, job = self._orders.pop(report.job_id, None), (self._rank, report.job_id)
        if order is None:
            return  # the inner mover repeats itself: its business
        if self._faults.draws("drop", job):
            self._counts["drop"] += 1
            return
        if self._faults.draws("fail", job):
            report = self._spoil(order, report, self._faults.source("moves", job))
        late = self._faults.delay * self._faults.source("delay", job).random() if self._faults.delay else 0.0
        behind = self._faults.draws("reorder", job)
        self._counts["delay"] += late > 0
        self._counts["reorder"] += behind
        self._waiting.append(_Waiting(report, time.monotonic() + late, behind))

    def _spoil(self, order: TransferOrder, report: TransferReport, source: random.Random) -> TransferReport:
        failed = {index for index in range(len(order.moves)) if source.random() < 0.5} or {0}
        self._counts["fail"] += 1
        for index in failed if order.kind is JobKind.LOAD else ():
            move = order.moves[index]
            self._device.pages[move.device_slot, move.offset : move.offset + move.length] = RUBBISH
        return replace(report, failed=tuple(sorted({*report.failed, *failed})))
