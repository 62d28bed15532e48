"""A host mover that keeps to its contract badly: it fails, delays, withholds and repeats.

What it never does is lie: bytes that it reports as moved were moved.  A failed move leaves rubbish at its target, as an
interrupted copy would.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ostinato.connectors.api import DevicePages
from ostinato.connectors.host_mover import HostMover
from ostinato.ids import JobId
from ostinato.transfer.job import JobKind, TransferOrder, TransferReport


@dataclass(frozen=True)
class Faults:
    """Probabilities per order.  ``withhold``: the report comes only after the job was given up, or at ``confess``.

    Stores have a deadline of a minute, so few of them may be withheld: each locks the blocks that it was to copy.
    """

    fail: float = 0.2
    delay: float = 0.3
    withhold: float = 0.05
    repeat: float = 0.2
    most_withheld_stores: int = 3
    longest_delay: int = 6
    lost: bool = False
    """Whether a withheld report never comes, not even late."""


class FaultyMover:
    """Wraps a :class:`HostMover`; deterministic in what it does to which order, given the seed."""

    def __init__(
        self, device: DevicePages, slots: int, notify: Callable[[], None], faults: Faults, seed: int = 0
    ) -> None:
        self.inner = HostMover(device, slots, notify)
        self.counts: Counter[str] = Counter()
        self._device = device
        self._faults = faults
        self._random = random.Random(seed)
        self._orders: dict[JobId, TransferOrder] = {}
        self._waiting: list[tuple[int, TransferReport]] = []
        self._withheld: dict[JobId, TransferReport | None] = {}

    def submit(self, order: TransferOrder) -> None:
        self._orders[order.job_id] = order
        stores = self.counts[f"withheld {JobKind.STORE.value}"]
        allowed = order.kind is JobKind.LOAD or stores < self._faults.most_withheld_stores
        if allowed and self._random.random() < self._faults.withhold:
            self._withheld[order.job_id] = None
            self.counts[f"withheld {order.kind.value}"] += 1
        self.inner.submit(order)

    def poll(self) -> list[TransferReport]:
        for report in self.inner.poll():
            self._decide(report)
        self._waiting = [(polls - 1, report) for polls, report in self._waiting]
        due = [report for polls, report in self._waiting if polls < 0]
        self._waiting = [item for item in self._waiting if item[0] >= 0]
        if due and self._random.random() < self._faults.repeat:
            self.counts["repeated"] += 1
            due.append(self._random.choice(due))
            due.append(TransferReport(JobId(10**9)))
        return due

    def cancel(self, job_id: JobId) -> None:
        """A job that was given up is reported some polls later: late, but quiet at last."""
        self.inner.cancel(job_id)
        report = self._withheld.pop(job_id, None)
        if report is not None and not self._faults.lost:
            self.counts["late"] += 1
            self._waiting.append((self._faults.longest_delay, report))

    def confess(self) -> None:
        """Report what was withheld."""
        for job_id, report in list(self._withheld.items()):
            if report is not None:
                del self._withheld[job_id]
                self._waiting.append((0, report))

    def close(self) -> None:
        self.inner.close()

    def _decide(self, report: TransferReport) -> None:
        order = self._orders.pop(report.job_id)
        if self._random.random() < self._faults.fail and not report.failed:
            report = self._spoil(order, report)
        if report.job_id in self._withheld:
            self._withheld[report.job_id] = report
            return
        polls = self._random.randint(1, self._faults.longest_delay) if self._random.random() < self._faults.delay else 0
        self.counts["delayed"] += polls > 0
        self._waiting.append((polls, report))

    def _spoil(self, order: TransferOrder, report: TransferReport) -> TransferReport:
        count = self._random.randint(1, len(order.moves))
        failed = tuple(sorted(self._random.sample(range(len(order.moves)), count)))
        self.counts[f"failed {order.kind.value}"] += 1
        for index in failed:
            move = order.moves[index]
            if order.kind is JobKind.LOAD:
                self._device.pages[move.device_slot] = 0xFF
            else:
                self.inner.pages[move.tier_slot] = 0xFF
        return replace(report, failed=failed)


def host_pages(mover: object) -> torch.Tensor:
    """The arena of a host mover, faulty or not."""
    inner = mover.inner if isinstance(mover, FaultyMover) else mover
    assert isinstance(inner, HostMover)
    return inner.pages
