"""``OstinatoConnector``: vLLM's connector interface over our two halves.

Owns: the translation of calls and types.  Does not own: any decision.  The only module that imports vLLM's classes; a
role makes one half, and the calls of the other role never come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from ostinato.integrations.vllm.build import build_scheduler_half
from ostinato.integrations.vllm.compat import check_version, view_step
from ostinato.integrations.vllm.layout import read_layout
from ostinato.integrations.vllm.messages import StepOrders
from ostinato.integrations.vllm.scheduler import SchedulerHalf
from ostinato.integrations.vllm.worker import TORCH_VERSION, WorkerHalf
from ostinato.transfer.job import TransferReport


@dataclass
class OrdersMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step's orders, on their way to the workers."""

    orders: StepOrders


@dataclass
class ReportsMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers did, on its way back."""

    reports: tuple[TransferReport, ...]

    def aggregate(self, other: ReportsMetadata) -> ReportsMetadata:
        return ReportsMetadata(self.reports + other.reports)


class _Scheduling:
    """vLLM's calls of the scheduler's role."""

    _scheduler: SchedulerHalf

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._scheduler.match(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        rows = blocks.get_block_ids() if num_external_tokens else ()
        self._scheduler.allocated(request, rows, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> OrdersMetadata:
        return OrdersMetadata(self._scheduler.plan(view_step(scheduler_output)))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        self._scheduler.reported(meta.reports if isinstance(meta, ReportsMetadata) else ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finished(request, min(request.num_computed_tokens, request.num_tokens - 1))
        return False, None

    def reset_cache(self) -> bool:
        self._scheduler.reset()
        return True


class _Working:
    """vLLM's calls of the worker's role."""

    _worker: WorkerHalf
    _connector_metadata: OrdersMetadata | None

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self._connector_metadata is not None:
            self._worker.load(self._connector_metadata.orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before a forward pass that needs them."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, when the pass is over."""

    def wait_for_save(self) -> None:
        if self._connector_metadata is not None:
            self._worker.save(self._connector_metadata.orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        loaded, failed = self._worker.take_loaded()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def build_connector_worker_meta(self) -> ReportsMetadata | None:
        reports = self._worker.take_reports()
        return ReportsMetadata(reports) if reports else None


class OstinatoConnector(_Scheduling, _Working, KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's device pool over host memory, disk and stores."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_version(str(vllm.__version__))
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        parallel = vllm_config.parallel_config
        if role is KVConnectorRole.SCHEDULER:
            versions = (f"vllm {vllm.__version__}", f"torch {TORCH_VERSION}")
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config
            self._scheduler = build_scheduler_half(vllm_config, kv_cache_config, extra, versions)
        else:
            layout = read_layout(kv_cache_config, int(parallel.world_size))
            self._worker = WorkerHalf(layout, int(parallel.rank))

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not saved is computed again."""
        return False

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.SCHEDULER:
            self._scheduler.close()
