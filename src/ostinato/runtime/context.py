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

from ostinato.ids import HOLE
from ostinato.runtime.attention import AttentionBackend, BatchMetadata
from ostinato.runtime.arena import Arena
from ostinato.runtime.specs import LayerGeometry

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class GroupIndex:
    """One group's part of a step: where to write the new rows, and what each sequence may read."""

    slots: torch.Tensor
    metadata: BatchMetadata


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The step as one layer's attention sees it.  ``tokens`` are real rows; a batch may carry padding behind them."""

    tokens: int
    groups: tuple[GroupIndex, ...]
    arena: Arena
    backend: AttentionBackend
    geometry: tuple[LayerGeometry, ...]


ACTIVE: Final[ContextVar[ForwardContext]] = ContextVar("ostinato_forward")
"""Set around a forward pass, per thread: several engines may run one model at once."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's share of a step: ``count`` new rows from position ``start``; ``rows[g]`` = its blocks in group g."""

    start: int
    count: int
    rows: tuple[Int32s, ...]

    @property
    def end(self) -> int:
        return self.start + self.count


def build_groups(spans: Sequence[Span], units: Sequence[int]) -> tuple[GroupIndex, ...]:
    """Index arrays of every group; ``units[g]`` = tokens per block of group g."""
    cu_q = _int32([0, *np.cumsum([span.count for span in spans])])
    seq_lens = _int32([span.end for span in spans])
    longest_query = max(span.count for span in spans)
    groups = []
    for group, unit in enumerate(units):
        table = torch.from_numpy(_block_table([span.rows[group] for span in spans]))
        slots = torch.from_numpy(np.concatenate([_slots(span, span.rows[group], unit) for span in spans]))
        groups.append(GroupIndex(slots, BatchMetadata(table, cu_q, seq_lens)))
    del longest_query
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
