"""Runs attention calls and whole models over pages laid out by hand, without specs, arena or scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ostinato.ids import SlotId
from ostinato.runtime.arena import LayerPages
from ostinato.runtime.attention import AttentionBackend, KVPages
from ostinato.runtime.context import ACTIVE, BlockRow, Span, build_groups
from ostinato.runtime.geometry import LayerGeometry
from ostinato.runtime.paged_cache import PagedCache

UNIT = 16


class Pool:
    """NaN-filled pages of every layer in one group; sequences take blocks in a random order."""

    def __init__(self, geometry: Sequence[LayerGeometry | None], dtype: torch.dtype, blocks: int = 64) -> None:
        self.geometry = tuple(geometry)
        self.layers = {
            shape.layer: LayerPages(0, _pages(shape, blocks, dtype))
            for shape in self.geometry
            if shape is not None and shape.source == shape.layer
        }
        self._free = iter(torch.randperm(blocks).tolist())
        self._rows: dict[str, BlockRow] = {}
        self._ends: dict[str, int] = {}

    def extend(self, name: str, count: int) -> Span:
        """Room for ``count`` more tokens of a sequence."""
        row = self._rows.setdefault(name, BlockRow())
        start = self._ends.get(name, 0)
        self._ends[name] = end = start + count
        row.append([SlotId(next(self._free)) for _ in range(-(-end // UNIT) - row.blocks.size)], 1)
        return Span(start, count, (row.blocks,))

    def context(self, spans: Sequence[Span], backend: AttentionBackend, latents: Any = None) -> Any:
        return SimpleNamespace(
            tokens=sum(span.count for span in spans),
            groups=build_groups(spans, [UNIT]),
            arena=SimpleNamespace(layers=self.layers),
            backend=backend,
            geometry=self.geometry,
            latents=latents or {},
        )

    def cached(self, name: str) -> list[Tensor]:
        """Per layer a sequence's cached keys, and its cached values: ``[tokens, numbers]`` each."""
        blocks, end = torch.from_numpy(self._rows[name].blocks).long(), self._ends[name]
        parts = [part for place in self.layers.values() for part in (place.pages.k, place.pages.v)]
        return [part[blocks].transpose(1, 2).flatten(0, 1).flatten(1)[:end] for part in parts]


def _pages(shape: LayerGeometry, blocks: int, dtype: torch.dtype) -> KVPages:
    def new(dim: int) -> Tensor:
        return torch.full((blocks, shape.kv_heads, UNIT, dim), float("nan"), dtype=dtype)

    if shape.latent:
        row = new(shape.key_dim + shape.value_dim)
        return KVPages(row, row[..., : shape.key_dim])
    return KVPages(new(shape.key_dim), new(shape.value_dim))


class PagedForward:
    """A model whose attention was replaced, over a pool; ``pad`` gives the rows of a batch of so many tokens."""

    def __init__(self, model: Any, pool: Pool, backend: AttentionBackend, latents: Any, pad: Any = None) -> None:
        self.model, self.pool, self.backend, self.latents = model, pool, backend, latents
        self._pad = pad or (lambda rows: rows + 3)
        self._cache = PagedCache(len(pool.geometry))

    def step(self, *parts: tuple[str, Sequence[int]]) -> list[Tensor]:
        """Logits ``[tokens, V]`` of each part, which is the next tokens of a sequence."""
        spans = [self.pool.extend(name, len(tokens)) for name, tokens in parts]
        counts = [span.count for span in spans]
        rows = self._pad(sum(counts))
        ids = torch.zeros(1, rows, dtype=torch.long)
        positions = torch.zeros(1, rows, dtype=torch.long)
        ids[0, : sum(counts)] = torch.tensor([token for _, tokens in parts for token in tokens])
        positions[0, : sum(counts)] = torch.cat([torch.arange(span.start, span.end) for span in spans])
        active = ACTIVE.set(self.pool.context(spans, self.backend, self.latents))
        try:
            with torch.inference_mode():
                logits = self.model(input_ids=ids, position_ids=positions, use_cache=True, cache=self._cache).logits[0]
        finally:
            ACTIVE.reset(active)
        return list(logits[: sum(counts)].split(counts))
