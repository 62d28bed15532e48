"""Host memory as a tier: worker half.

Owns: the host arena and the copies.  Does not own: the threads (``threaded``), which slot holds what.

The arena is one uint8 tensor ``[slots, page_bytes]``; the operating system gives it memory as it is first written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Final

import torch

from ostinato.connectors.api import DevicePages
from ostinato.connectors.threaded import ThreadedMover
from ostinato.ids import TierId
from ostinato.transfer.job import JobKind, Move, TransferOrder, TransferReport

log: Final = logging.getLogger(__name__)


class HostMover(ThreadedMover):
    """Copies pages between the device pool and host memory."""

    def __init__(self, device: DevicePages, slots: int, notify: Callable[[], None]) -> None:
        super().__init__(TierId("host"), notify)
        self.pages = torch.empty((slots, device.pages.shape[1]), dtype=torch.uint8)
        self._device = device
        self._start()

    def close(self) -> None:
        self._stop()
        for thread in self._threads:
            thread.join()

    def _serve(self, orders: Iterator[TransferOrder]) -> None:
        for order in orders:
            self._report(self._execute(order))

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
