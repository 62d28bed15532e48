"""A vLLM small enough to read: requests, block tables and KV tensors, driven through the plug-in's two halves.

What a block must contain is a function of the tokens before its end, so whatever is found in one can be checked.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from ostinato.cache.kinds import contains, keeps_checkpoints
from ostinato.integrations.vllm.build import build_scheduler_half
from ostinato.integrations.vllm.compat import view_step
from ostinato.integrations.vllm.layout import read_layout
from ostinato.integrations.vllm.scheduler import SchedulerHalf
from ostinato.integrations.vllm.worker import WorkerHalf

LAYER_BYTES: Final = 128
PATIENCE: Final = 2000
"""How many times a request asks again before a test gives up."""


@dataclass
class KVCacheSpec:
    block_size: int = 16
    page_size_bytes: int = LAYER_BYTES
    prefix_cacheable: bool = True


@dataclass
class FullAttentionSpec(KVCacheSpec): ...


@dataclass
class MLAAttentionSpec(FullAttentionSpec): ...


@dataclass
class RSWASpec(FullAttentionSpec): ...


@dataclass
class CrossAttentionSpec(KVCacheSpec): ...


@dataclass
class SlidingWindowSpec(KVCacheSpec):
    sliding_window: int = 40


@dataclass
class ChunkedLocalAttentionSpec(KVCacheSpec):
    attention_chunk_size: int = 64


@dataclass
class MambaSpec(KVCacheSpec):
    mamba_cache_mode: str = "align"


def cache_config(specs: Sequence[KVCacheSpec], blocks: int = 64, layers: int = 2) -> Any:
    groups = [
        SimpleNamespace(layer_names=[f"g{group}.l{layer}" for layer in range(layers)], kv_cache_spec=spec)
        for group, spec in enumerate(specs)
    ]
    size = max(spec.page_size_bytes for spec in specs) * layers * blocks
    return SimpleNamespace(
        num_blocks=blocks,
        kv_cache_groups=groups,
        kv_cache_tensors=[SimpleNamespace(size=size)],
        kv_cache_layout="LBHNC",
        hash_block_size=min(spec.block_size for spec in specs),
    )


def engine_config(world: int = 1) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="fake", seed=0, quantization=None, dtype="bf16", hf_config=SimpleNamespace(to_dict=dict)
        ),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(world_size=world, pipeline_parallel_size=1),
    )


@dataclass(eq=False)
class Request:
    request_id: str
    tokens: list[int]
    hash_block: int
    num_computed_tokens: int = 0
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return [
            prefix_digest(self.tokens, end) for end in range(self.hash_block, len(self.tokens) + 1, self.hash_block)
        ]


def prefix_digest(tokens: Sequence[int], end: int) -> bytes:
    return hashlib.sha256(repr(tokens[:end]).encode()).digest()


@dataclass
class Ran:
    """``loaded``: tokens taken from the tiers.  ``failed``: loads that the worker gave up."""

    loaded: int
    failed: int


class FakeEngine:
    """One request at a time.  ``extra``: kv_connector_extra_config."""

    def __init__(self, specs: Sequence[KVCacheSpec], extra: Mapping[str, Any], world: int = 1) -> None:
        self.config = cache_config(specs)
        self.layout = read_layout(self.config, world)
        named = {"model_digest": "fake", **extra}
        self.scheduler: SchedulerHalf = build_scheduler_half(engine_config(world), self.config, named, ("0.32",))
        self.workers = [WorkerHalf(self.layout, rank) for rank in range(world)]
        self.caches: list[dict[str, torch.Tensor]] = []
        for worker in self.workers:
            caches = {
                name: torch.zeros((self.config.num_blocks, group.kv_cache_spec.page_size_bytes), dtype=torch.uint8)
                for group in self.config.kv_cache_groups
                for name in group.layer_names
            }
            worker.register(caches)
            self.caches.append(caches)
        self.free = list(range(1, self.config.num_blocks))
        self.count = 0
        self.closed = False

    def run(self, tokens: list[int], chunk: int = 1000, local: int = 0) -> Ran:
        """``local``: tokens that vLLM's own cache has; they are simply there."""
        self.count += 1
        request = Request(f"r{self.count}", tokens, self.config.hash_block_size)
        rows: list[list[int]] = [[] for _ in self.layout.cache.groups]
        self._hold(rows, local, local)
        self._compute(request, rows, 0, local)
        loaded = failed = 0
        while True:
            found = self._ask(request, local)
            if not found:
                self.scheduler.allocated(request, rows, 0)
                break
            self._hold(rows, local + found, local + found)
            self.scheduler.allocated(request, rows, found)
            bad = self._step({})
            if not bad:
                loaded = found
                self._check(request, rows, local, local + found)
                self.scheduler.allocated(request, rows, 0)
                break
            failed += 1
            self._release(rows)
            rows = [[] for _ in self.layout.cache.groups]
            self._hold(rows, local, local)
            self._compute(request, rows, 0, local)
        request.num_computed_tokens = local + loaded
        while request.num_computed_tokens < len(tokens):
            end = min(len(tokens), request.num_computed_tokens + chunk)
            self._hold(rows, end, request.num_computed_tokens)
            self._compute(request, rows, request.num_computed_tokens, end)
            self._step({request: (rows, end)})
            request.num_computed_tokens = end
        self.scheduler.finished(request, len(tokens) - 1)
        self._release(rows)
        return Ran(loaded, failed)

    def drain(self) -> None:
        """Until tiers below have what they wanted."""
        for _ in range(PATIENCE):
            self._step({})
            if not self.scheduler.below.busy:
                return
            time.sleep(0.005)
        raise AssertionError("stores did not end")

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.scheduler.close()

    def _ask(self, request: Request, local: int) -> int:
        for _ in range(PATIENCE):
            found = self.scheduler.match(request, local)
            if found is not None:
                assert found == self.scheduler.match(request, local), "a question has no effects"
                return found
            self._step({})
            time.sleep(0.002)
        raise AssertionError("the plug-in never answers")

    def _step(self, scheduled: Mapping[Any, tuple[list[list[int]], int]]) -> set[str]:
        by_id = {request.request_id: (request, rows, end) for request, (rows, end) in scheduled.items()}
        state = SimpleNamespace(
            boundary_state_offloads={}, get_block_ids=lambda name: tuple(list(row) for row in by_id[name][1])
        )
        output = SimpleNamespace(
            kv_connector_block_state=state,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(by_id), num_computed_tokens=[one[0].num_computed_tokens for one in by_id.values()]
            ),
            scheduled_new_reqs=[],
            scheduled_spec_decode_tokens={},
            num_scheduled_tokens={name: end - one.num_computed_tokens for name, (one, _, end) in by_id.items()},
        )
        orders = self.scheduler.plan(view_step(output))
        failed: set[str] = set()
        for worker in self.workers:
            worker.load(orders)
            worker.save(orders)
            failed |= worker.take_loaded()[1]
            self.scheduler.reported(worker.take_reports())
        return failed

    def _hold(self, rows: list[list[int]], end: int, cut: int) -> None:
        """Blocks for tokens up to ``end``; those that nothing needs from ``cut`` on are given back."""
        for spec, row in zip(self.layout.cache.groups, rows, strict=True):
            needed = spec.kind.required(cut, spec.hash_unit)
            for ordinal in range(max(len(row), -(-end // spec.hash_unit))):
                beyond = ordinal >= cut // spec.hash_unit
                wanted = contains(needed, ordinal) or beyond
                if keeps_checkpoints(spec.kind) and beyond:
                    wanted = ordinal == -(-end // spec.hash_unit) - 1  # the working state only
                if ordinal == len(row):
                    row.append(self.free.pop() if wanted else 0)
                elif row[ordinal] and not wanted:
                    self.free.append(row[ordinal])
                    row[ordinal] = 0

    def _release(self, rows: list[list[int]]) -> None:
        for row in rows:
            self.free.extend(block for block in row if block)

    def _compute(self, request: Request, rows: list[list[int]], start: int, end: int) -> None:
        for group, spec in enumerate(self.layout.cache.groups):
            for ordinal in range(start // spec.hash_unit, -(-end // spec.hash_unit)):
                if rows[group][ordinal]:
                    self._write(request, group, ordinal, rows[group][ordinal], min(end, (ordinal + 1) * spec.hash_unit))

    def _write(self, request: Request, group: int, ordinal: int, block: int, end: int) -> None:
        for rank, caches in enumerate(self.caches):
            for name in self.layout.layers[group]:
                caches[name][block] = content(request.tokens, end, name, rank, caches[name].shape[1])

    def _check(self, request: Request, rows: list[list[int]], start: int, end: int) -> None:
        """Everything that resuming at ``end`` needs beyond ``start`` is what computing it would have left."""
        for group, spec in enumerate(self.layout.cache.groups):
            for low, high in spec.kind.required(end, spec.hash_unit):
                for ordinal in range(max(low, start // spec.hash_unit), high):
                    for rank, caches in enumerate(self.caches):
                        for name in self.layout.layers[group]:
                            size = caches[name].shape[1]
                            wanted = content(request.tokens, (ordinal + 1) * spec.hash_unit, name, rank, size)
                            assert torch.equal(caches[name][rows[group][ordinal]], wanted), (group, ordinal)


def content(tokens: Sequence[int], end: int, name: str, rank: int, size: int) -> torch.Tensor:
    seed = hashlib.sha256(prefix_digest(tokens, end) + f"{name} {rank}".encode()).digest()
    return torch.frombuffer(bytearray((seed * (size // 32 + 1))[:size]), dtype=torch.uint8)


def disk(folder: Path, size: str = "64MiB") -> str:
    return f"disk:{folder}:{size}"
