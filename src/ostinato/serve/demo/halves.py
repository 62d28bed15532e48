"""A tier that keeps only one part of a prompt: for showing a hit that no single tier has.

Owns: leaving stores out, by where their units lie.  Does not own: anything of the tier; loads and questions go straight
to it.  Threads: as the connector and the mover underneath.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ostinato.cache.layout import CacheLayout
from ostinato.connectors.api import Connector, DevicePages, Mover, Site
from ostinato.connectors.forwarding import ForwardingConnector
from ostinato.ids import JobId
from ostinato.transfer.job import JobKind, Move, TransferOrder, TransferReport


class PartConnector(ForwardingConnector):
    """``inner``, which is given only the units that end in ``tokens`` (1 = after the first token)."""

    def __init__(self, inner: Connector, tokens: range) -> None:
        super().__init__(inner)
        self._tokens = tokens
        self._layout: CacheLayout | None = None

    def open(self, site: Site) -> None:
        self._layout = site.layout
        super().open(site)

    def make_mover(self, device: DevicePages, notify: Callable[[], None]) -> Mover:
        return PartMover(self.inner.make_mover(device, notify), self._keeps, notify)

    def _keeps(self, move: Move) -> bool:
        assert self._layout is not None, "open() comes first"
        return (move.ordinal + 1) * self._layout.groups[move.key.group].hash_unit in self._tokens


class PartMover:
    """Stores what ``keeps`` says, and reports the rest as failed."""

    def __init__(self, inner: Mover, keeps: Callable[[Move], bool], notify: Callable[[], None]) -> None:
        self._inner = inner
        self._keeps = keeps
        self._notify = notify
        self._refused: list[TransferReport] = []
        self._kept: dict[JobId, tuple[list[int], int]] = {}
        """Of orders that went on in part: the indices of their moves, and how many there were."""

    def submit(self, order: TransferOrder) -> None:
        count = len(order.moves)
        kept = [i for i, move in enumerate(order.moves) if order.kind is JobKind.LOAD or self._keeps(move)]
        if not kept:
            self._refused.append(TransferReport(order.job_id, failed=tuple(range(count))))
            self._notify()
        elif len(kept) == count:
            self._inner.submit(order)
        else:
            self._kept[order.job_id] = kept, count
            self._inner.submit(replace(order, moves=tuple(order.moves[i] for i in kept)))

    def poll(self) -> list[TransferReport]:
        refused, self._refused = self._refused, []
        return refused + [self._whole(report) for report in self._inner.poll()]

    def cancel(self, job_id: JobId) -> None:
        self._inner.cancel(job_id)

    def close(self) -> None:
        self._inner.close()

    def _whole(self, report: TransferReport) -> TransferReport:
        """In terms of the order as it came."""
        if report.job_id not in self._kept:
            return report
        kept, count = self._kept.pop(report.job_id)
        done = {index for place, index in enumerate(kept) if place not in report.failed}
        return replace(report, failed=tuple(index for index in range(count) if index not in done))
