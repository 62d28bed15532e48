"""What a model's layers need to know about one step: who the rows are, and where their keys, values and states lie.

Owns: the step's index arrays and how they are built.  Does not own: the tables they are built from (``runner``), the
memory (``arena``), the kernels (``attention``, ``scans``).

Index arrays are int32 and built with numpy; Python loops run over sequences, groups and stops, never over tokens.

::

    batch of T rows   | seq 0: 5 rows | seq 1: 1 row | seq 2: 7 rows |    cu_q     = [0, 5, 6, 13]
    after the step    | 21 tokens     | 40 tokens    | 7 tokens      |    seq_lens = [21, 40, 7]
    group g           block_table [3, blocks], -1 where there is no block;  slots [13] = block * 16 + place in block
    state group g     read [3], -1 for zeros;  stops: rows after which the state is kept;  pages: where

Values: made per step, never changed; read by attention and mixers on the worker's thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ostinato.ids import HOLE, SlotId
from ostinato.runtime.arena import Arena
from ostinato.runtime.attention import AttentionBackend, BatchMetadata
from ostinato.runtime.geometry import LayerGeometry
from ostinato.runtime.latent import LatentWeights
from ostinato.runtime.scans.base import ScanBackend, StateIndex
from ostinato.scheduler.plan import StatePlan

Int32s = npt.NDArray[np.int32]

_FIRST_CAPACITY: Final = 64


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The step as one layer sees it.  ``tokens`` are real rows; a batch may carry padding behind them.

    ``groups[g]`` says of group g where its new rows go and what each sequence may read; a group that keeps recurrent
    state has no rows and reads nothing there.  ``states[g]`` says of such a group which pages hold whose state, and is
    None for the others.  ``geometry`` and ``latents`` (absorption weights) go by layer.
    """

    tokens: int
    groups: tuple[BatchMetadata, ...]
    states: tuple[StateIndex | None, ...]
    arena: Arena
    backend: AttentionBackend
    scans: ScanBackend
    geometry: tuple[LayerGeometry | None, ...]
    latents: Mapping[int, LatentWeights]


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
    """One sequence's share of a step: ``count`` new rows from ``start`` on.

    ``rows[g]`` = its blocks in group g; ``state`` says where its recurrent state is, None where there is none.
    """

    start: int
    count: int
    rows: tuple[Int32s, ...]
    state: StatePlan | None = None

    @property
    def end(self) -> int:
        return self.start + self.count


def build_groups(
    spans: Sequence[Span], units: Sequence[int], stateful: Collection[int] = ()
) -> tuple[BatchMetadata, ...]:
    """The index arrays of every group; ``units[g]`` = tokens per block of group g.

    The ``stateful`` groups keep recurrent state: their arrays name no block.
    """
    query_lens = [span.count for span in spans]
    context_lens = [span.start for span in spans]
    cu_q = _int32([0, *np.cumsum(query_lens)])
    seq_lens = _int32([span.end for span in spans])
    groups = []
    for group, unit in enumerate(units):
        if group in stateful:
            table, slots = _block_table([span.rows[group][:0] for span in spans]), np.empty(0, dtype=np.int32)
        else:
            table = _block_table([span.rows[group] for span in spans])
            slots = np.concatenate([_slots(span, span.rows[group], unit) for span in spans])
        groups.append(
            BatchMetadata(cu_q, seq_lens, query_lens, context_lens, torch.from_numpy(table), torch.from_numpy(slots))
        )
    return tuple(groups)


def build_states(spans: Sequence[Span], groups: int, stateful: Collection[int]) -> tuple[StateIndex | None, ...]:
    """The state index of each of ``groups`` groups: None for those that are not ``stateful``."""
    if not stateful:
        return (None,) * groups
    cu_q = _int32([0, *np.cumsum([span.count for span in spans])])
    plans = [_checked(span) for span in spans]
    cu_stops = _int32([0, *np.cumsum([len(plan.stops) for plan in plans])])
    stops = _int32(
        [
            int(begin) + tokens - span.start
            for begin, span, plan in zip(cu_q, spans, plans, strict=False)
            for tokens, _ in plan.stops
        ]
    )
    read = np.array([plan.read for plan in plans], dtype=np.int32)
    pages = np.array([kept for plan in plans for _, kept in plan.stops], dtype=np.int32)
    assert pages[:, list(stateful)].min() >= 0, "a state that is to be kept has no page"
    return tuple(
        StateIndex(cu_q, _column(read, group), cu_stops, stops, _column(pages, group)) if group in stateful else None
        for group in range(groups)
    )


def _checked(span: Span) -> StatePlan:
    """The span's plan, which must begin where the span begins and keep the state at the span's end."""
    plan = span.state
    assert plan is not None, "a model with recurrent state needs a state plan for each sequence"
    ends = [tokens for tokens, _ in plan.stops]
    assert ends and ends[-1] == span.end and all(a < b for a, b in zip([span.start, *ends], ends, strict=False)), span
    return plan


def _column(table: Int32s, group: int) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(table[:, group]))


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
