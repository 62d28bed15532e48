"""The worker half: copies between vLLM's blocks and host memory.

Owns: the views of vLLM's KV tensors as bytes, the mapped host memory, the copies, their reports.  Does not own: what is
copied (orders say).  Thread: vLLM's worker's only; a copy is over when the call returns, so a block that was saved may
be written again at once.

A block is copied whole, as the bytes that it has: what a kernel makes of them is its own affair.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from ostinato.errors import ConnectorError
from ostinato.integrations.vllm.arena import map_arena
from ostinato.integrations.vllm.compat import NULL_BLOCK
from ostinato.integrations.vllm.layout import VllmLayout
from ostinato.integrations.vllm.messages import ArenaPlace, StepOrders
from ostinato.transfer.job import JobKind, Move, TransferOrder, TransferReport

TORCH_VERSION: Final = str(torch.__version__)
log: Final = logging.getLogger(__name__)


class ArenaPages:
    """Host memory as movers see it (``connectors.api.DevicePages``)."""

    def __init__(self, memory: Any, slots: int, page_bytes: int) -> None:
        self.pages = torch.frombuffer(memory, dtype=torch.uint8).view(slots, page_bytes)

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, source_index: Sequence[int], target_index: Sequence[int]
    ) -> None:
        for here, there in zip(source_index, target_index, strict=True):
            target[there].copy_(source[here])


class WorkerHalf:
    """``rank`` of ``layout``'s world."""

    def __init__(self, layout: VllmLayout, rank: int = 0) -> None:
        self._layout = layout
        self._rank = rank
        self._groups: list[list[tuple[torch.Tensor, int]]] = []
        """By group: each layer's blocks as rows of bytes, and where they lie in a page."""
        self._place: ArenaPlace | None = None
        self._pages = torch.empty((0, 0), dtype=torch.uint8)
        self._reports: list[TransferReport] = []
        self._loaded: set[str] = set()
        self._failed: set[str] = set()

    def register(self, caches: Mapping[str, Any]) -> None:
        """``caches``: vLLM's KV tensors by layer."""
        for spec, names in zip(self._layout.cache.groups, self._layout.layers, strict=True):
            offset, rows = self._rank * self._layout.rank_bytes, []
            for name in names:
                blocks = bytes_by_block(name, caches[name])
                rows.append((blocks, offset))
                offset += blocks.shape[1]
            if offset - self._rank * self._layout.rank_bytes > min(spec.unit_bytes, self._layout.rank_bytes):
                raise ConnectorError(f"blocks of group {spec.group} are larger than vLLM said: they cannot be stored")
            self._groups.append(rows)

    def load(self, orders: StepOrders) -> None:
        self._map(orders.arena)
        for request_id, order in orders.loads:
            report = self._carry_out(order)
            self._loaded.add(request_id)
            if report.failed:
                self._failed.add(request_id)

    def save(self, orders: StepOrders) -> None:
        self._map(orders.arena)
        for order in orders.saves:
            self._carry_out(order)

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Requests whose loads are over, and those among them that must not use what arrived."""
        loaded, failed = self._loaded, self._failed
        self._loaded, self._failed = set(), set()
        return loaded, failed

    def take_reports(self) -> tuple[TransferReport, ...]:
        reports, self._reports = tuple(self._reports), []
        return reports

    def _map(self, place: ArenaPlace) -> None:
        if place != self._place:
            memory = map_arena(place)
            self._pages = torch.frombuffer(memory, dtype=torch.uint8).view(place.slots, place.page_bytes)
            self._place = place

    def _carry_out(self, order: TransferOrder) -> TransferReport:
        start, failed = time.perf_counter(), []
        for index, move in enumerate(order.moves):
            try:
                self._copy(order.kind, move)
            except Exception as error:
                log.warning("a block could not be copied (%s); its tokens are computed", error)
                failed.append(index)
        moved = sum(move.length for move in order.moves) if not failed else 0
        report = TransferReport(order.job_id, self._rank, tuple(failed), moved, time.perf_counter() - start)
        self._reports.append(report)
        return report

    def _copy(self, kind: JobKind, move: Move) -> None:
        if move.device_slot == NULL_BLOCK:
            raise ConnectorError("vLLM gave no block for it")
        page = self._pages[move.tier_slot]
        for blocks, offset in self._groups[move.key.group]:
            ours, theirs = page[offset : offset + blocks.shape[1]], blocks[move.device_slot]
            if kind is JobKind.LOAD:
                theirs.copy_(ours)
            else:
                ours.copy_(theirs)


def bytes_by_block(name: str, tensor: Any) -> torch.Tensor:
    """``[blocks, bytes of a block]`` over the memory of ``tensor``, whose first dimension counts blocks.

    Raises ConnectorError when a block's bytes do not lie together.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
        raise ConnectorError(f"layer {name}: its cache is no tensor of blocks: it cannot be stored")
    size = tensor.element_size()
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    if span != tensor[0].numel():
        raise ConnectorError(f"layer {name}: the bytes of a block do not lie together: it cannot be stored")
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * size,
        (tensor.shape[0], span * size),
        (tensor.stride(0) * size, 1),
    )
