"""What attention needs to know about one step: who the rows are, and where their keys and values lie.

Owns: the step's index arrays and how they are built.  Does not own: the tables they are built from (``runner``), the
memory (``arena``), the kernels (``attention``).

Index arrays are int32 and built with numpy; Python loops run over sequences and groups, never over tokens of context.

::

    batch of T rows   | seq 0: 5 rows | seq 1: 1 row | seq 2: 7 rows |    cu_q     = [0, 5, 6, 13]
    after the step    | 21 tokens     | 40 tokens    | 7 tokens      |    seq_lens = [21, 40, 7]
    group g           block_table [3, blocks], -1 where there is no block;  slots [13] = block * 16 + place in block

Values: made per step, never changed; read by the attention hook on the worker's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ostinato.ids import HOLE, SlotId
from ostinato.runtime.arena import Arena
from ostinato.runtime.attention import AttentionBackend, BatchMetadata
from ostinato.runtime.specs import LayerGeometry

Int32s = npt.NDArray[np.int32]


_FIRST_CAPACITY: Final = 64


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The step as one layer's attention sees it.  ``tokens`` are real rows; a batch may carry padding behind them.

    ``groups[g]`` says of KV group g where its new rows go and what each sequence may read.
    """

    tokens: int
    groups: tuple[BatchMetadata, ...]
    arena: Arena
    backend: AttentionBackend
    geometry: tuple[LayerGeometry, ...]


ACTIVE: Final[ContextVar[ForwardContext]] = ContextVar("ostinato_forward")
"""Set around a forward pass, per thread: several engines may run one model at once."""


class BlockRow:
    """One sequence's kernel blocks in one group, in order of position; grows by doubling."""

    def __init__(self) -> None:
        self._memory: Int32s = np.empty(_FIRST_CAPACITY, dtype=np.int32)
        self._size = 0

    @property
    def blocks(self) -> Int32s:
        """A view of what was appended so far."""
        return self._memory[: self._size]

    def append(self, pages: Sequence[SlotId], page_units: int) -> None:
        """Append each page's units; a HOLE is as many holes."""
        if not pages:
            return
        added = np.asarray(pages, dtype=np.int32)
        if page_units > 1:
            units = np.arange(page_units, dtype=np.int32)
            added = np.where(added[:, None] == HOLE, HOLE, added[:, None] * page_units + units).ravel()
        end = self._size + added.size
        if end > self._memory.size:
            grown = np.empty(max(end, 2 * self._memory.size), dtype=np.int32)
            grown[: self._size] = self.blocks
            self._memory = grown
        self._memory[self._size : end] = added
        self._size = end


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's share of a step: ``count`` new rows from ``start`` on; ``rows[g]`` = its blocks in group g."""

    start: int
    count: int
    rows: tuple[Int32s, ...]

    @property
    def end(self) -> int:
        return self.start + self.count


def build_groups(spans: Sequence[Span], units: Sequence[int]) -> tuple[BatchMetadata, ...]:
    """The index arrays of every group; ``units[g]`` = tokens per block of group g."""
    query_lens = [span.count for span in spans]
    context_lens = [span.start for span in spans]
    cu_q = _int32([0, *np.cumsum(query_lens)])
    seq_lens = _int32([span.end for span in spans])
    groups = []
    for group, unit in enumerate(units):
        table = torch.from_numpy(_block_table([span.rows[group] for span in spans]))
        slots = torch.from_numpy(np.concatenate([_slots(span, span.rows[group], unit) for span in spans]))
        groups.append(BatchMetadata(cu_q, seq_lens, query_lens, context_lens, table, slots))
    return tuple(groups)


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32))


def _block_table(rows: Sequence[Int32s]) -> Int32s:
    table = np.full((len(rows), max(1, max(row.size for row in rows))), HOLE, dtype=np.int32)
    for line, row in zip(table, rows, strict=True):
        line[: row.size] = row
    return table


def _slots(span: Span, row: Int32s, unit: int) -> Int32s:
    """Where the new rows of ``span`` go; each must have a block."""
    positions = np.arange(span.start, span.end, dtype=np.int32)
    blocks = row[positions // unit]
    assert blocks.size == 0 or blocks.min() >= 0, "a row to be computed has no block"
    slots: Int32s = blocks * np.int32(unit) + positions % np.int32(unit)
    return slots
