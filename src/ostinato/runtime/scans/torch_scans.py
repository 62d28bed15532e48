"""The scans in plain torch: one token after the other.  The reference for the tests, and what runs without a compiler.

Owns: the reference of each recurrence.  Does not own: speed.

Invariants: every operation is on one token of one sequence, in fresh float32 memory.  Shapes, strides and alignment
never depend on the batch, so neither do the bits, whatever torch does with the last few elements of a range.  A bad
batch raises before anything is written.

Thread: the engine's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ostinato.errors import AuditError
from ostinato.runtime.scans.base import (
    Convolution,
    GatedDelta,
    SelectiveScan,
    StateIndex,
    StateSpace,
    has_silu,
)

_EPSILON = 1e-6


class TorchScans:
    """The reference backend."""

    name = "torch_scans"
    invariant = True

    def convolve(self, call: Convolution, states: Tensor, index: StateIndex) -> Tensor:
        """See :class:`ScanBackend`.

        Raises:
            AuditError: shapes, dtypes or the index do not fit; nothing was written.
        """
        out = torch.empty(call.inputs.shape, dtype=call.inputs.dtype)
        rows, channels = call.inputs.shape
        walks = _walks(index, rows, states)
        _expect(call.weight.dim() == 2 and call.weight.shape[0] == channels, "weight must be [channels, kernel]")
        _expect(states.shape[1:] == (channels, call.weight.shape[1] - 1), "states must be [pages, channels, taps]")
        _expect(states.dtype == call.inputs.dtype, "states must have the dtype of inputs")
        silu = has_silu(call.activation)
        weight, bias = _fresh(call.weight), None if call.bias is None else _fresh(call.bias)
        for walk in walks:
            state = walk.start(states)
            for row in walk.rows:
                window = torch.cat((state, _fresh(call.inputs[row])[:, None]), dim=1)
                total = (window * weight).sum(dim=1)
                total = total if bias is None else total + bias
                out[row] = functional.silu(total) if silu else total
                state = window[:, 1:]
                walk.keep(states, row, state)
        return out

    def gated_delta(self, call: GatedDelta, states: Tensor, index: StateIndex) -> Tensor:
        """See :class:`ScanBackend`.

        Raises:
            AuditError: shapes, dtypes or the index do not fit; nothing was written.
        """
        out = torch.empty(call.value.shape, dtype=call.value.dtype)
        rows, heads, value_dim = call.value.shape
        key_heads, key_dim = call.key.shape[1:]
        walks = _walks(index, rows, states)
        _expect(call.key.shape == call.query.shape == (rows, key_heads, key_dim), "query and key differ in shape")
        _expect(heads % key_heads == 0, "heads must be a multiple of key heads")
        _expect(call.beta.shape == (rows, heads), "beta must be [rows, heads]")
        _expect(call.decay.shape in ((rows, heads), (rows, heads, key_dim)), "decay must be [rows, heads(, Dk)]")
        _expect(states.shape[1:] == (heads, key_dim, value_dim), "states must be [pages, heads, Dk, Dv]")
        _expect(states.dtype == torch.float32, "states must be float32")
        for walk in walks:
            state = walk.start(states)
            for row in walk.rows:
                key = _key_row(call.key[row], heads, call.normalize)
                query = _key_row(call.query[row], heads, call.normalize) * key_dim**-0.5
                decay = _fresh(call.decay[row]).exp().view(heads, -1, 1)
                state = state * decay
                recall = (state * key[:, :, None]).sum(dim=1)
                delta = (_fresh(call.value[row]) - recall) * _fresh(call.beta[row])[:, None]
                state = state + key[:, :, None] * delta[:, None, :]
                out[row] = (state * query[:, :, None]).sum(dim=1)
                walk.keep(states, row, state)
        return out

    def state_space(self, call: StateSpace, states: Tensor, index: StateIndex) -> Tensor:
        """See :class:`ScanBackend`.

        Raises:
            AuditError: shapes, dtypes or the index do not fit; nothing was written.
        """
        out = torch.empty(call.inputs.shape, dtype=torch.float32)
        rows, heads, head_dim = call.inputs.shape
        groups, state_dim = call.b.shape[1:]
        walks = _walks(index, rows, states)
        _expect(call.b.shape == call.c.shape == (rows, groups, state_dim), "b and c must be [rows, groups, N]")
        _expect(heads % groups == 0, "heads must be a multiple of groups")
        _expect(call.dt.shape == (rows, heads) and call.a.shape == (heads,), "dt must be [rows, heads], a [heads]")
        _expect(_fits(call.d, heads) and _fits(call.dt_bias, heads), "d and dt_bias must be [heads]")
        _expect(states.shape[1:] == (heads, head_dim, state_dim), "states must be [pages, heads, P, N]")
        _expect(states.dtype == torch.float32, "states must be float32")
        for walk in walks:
            state = walk.start(states)
            for row in walk.rows:
                step = _step(call.dt[row], call.dt_bias, call.softplus).clamp(*call.dt_limit)
                decay = (step * _fresh(call.a)).exp()[:, None, None]
                inputs = _fresh(call.inputs[row])
                b = _fresh(call.b[row]).repeat_interleave(heads // groups, dim=0)
                c = _fresh(call.c[row]).repeat_interleave(heads // groups, dim=0)
                state = state * decay + (inputs * step[:, None])[:, :, None] * b[:, None, :]
                read = (state * c[:, None, :]).sum(dim=2)
                out[row] = read if call.d is None else read + _fresh(call.d)[:, None] * inputs
                walk.keep(states, row, state)
        return out

    def selective(self, call: SelectiveScan, states: Tensor, index: StateIndex) -> Tensor:
        """See :class:`ScanBackend`.

        Raises:
            AuditError: shapes, dtypes or the index do not fit; nothing was written.
        """
        out = torch.empty(call.inputs.shape, dtype=call.inputs.dtype)
        rows, channels = call.inputs.shape
        walks = _walks(index, rows, states)
        state_dim = call.a.shape[-1]
        _expect(call.a.shape == (channels, state_dim), "a must be [channels, N]")
        _expect(call.b.shape == call.c.shape == (rows, state_dim), "b and c must be [rows, N]")
        _expect(call.dt.shape == (rows, channels), "dt must be [rows, channels]")
        _expect(call.gate is None or call.gate.shape == (rows, channels), "gate must be [rows, channels]")
        _expect(_fits(call.d, channels) and _fits(call.dt_bias, channels), "d and dt_bias must be [channels]")
        _expect(states.shape[1:] == (channels, state_dim), "states must be [pages, channels, N]")
        _expect(states.dtype == torch.float32, "states must be float32")
        for walk in walks:
            state = walk.start(states)
            for row in walk.rows:
                step = _step(call.dt[row], call.dt_bias, call.softplus)[:, None]
                inputs = _fresh(call.inputs[row])
                gain = step * inputs[:, None] * _fresh(call.b[row])
                state = state * (step * _fresh(call.a)).exp() + gain
                read = (state * _fresh(call.c[row])).sum(dim=1)
                read = read if call.d is None else read + _fresh(call.d) * inputs
                out[row] = read if call.gate is None else read * functional.silu(_fresh(call.gate[row]))
                walk.keep(states, row, state)
        return out


@dataclass(frozen=True, slots=True)
class _Walk:
    """One sequence: its rows, the page it starts from, and the page that takes the state after a row."""

    rows: range
    read: int
    pages: dict[int, int]

    def start(self, states: Tensor) -> Tensor:
        """A float32 copy of the state in ``read``, or zeros."""
        if self.read < 0:
            return torch.zeros(states.shape[1:], dtype=torch.float32)
        return _fresh(states[self.read])

    def keep(self, states: Tensor, row: int, state: Tensor) -> None:
        """Write the state where the plan wants it after ``row``."""
        if row in self.pages:
            states[self.pages[row]] = state


def _walks(index: StateIndex, rows: int, states: Tensor) -> list[_Walk]:
    """The sequences of a batch.

    Raises:
        AuditError: rows are left out, a sequence keeps no state at its end, a page does not exist, or two sequences
            touch one page of which either writes.
    """
    starts, first_stops = index.cu_q.tolist(), index.cu_stops.tolist()
    stops, pages, reads = index.stops.tolist(), index.pages.tolist(), index.read.tolist()
    _expect(len(starts) == len(first_stops) == len(reads) + 1, "index tensors differ in sequences")
    _expect(len(pages) == len(stops), "stops and pages differ in length")
    _expect(starts[0] == 0 and starts[-1] == rows and starts == sorted(starts), "cu_q must rise from 0 to the rows")
    rising = first_stops == sorted(first_stops)
    _expect(rising and first_stops[0] == 0 and first_stops[-1] == len(stops), "cu_stops must rise from 0 to the stops")
    _expect(all(0 <= page < states.shape[0] for page in pages), "a stop writes a page that is not in the pool")
    _expect(all(page < states.shape[0] for page in reads), "a sequence reads a page that is not in the pool")
    _expect(len(set(pages)) == len(pages), "a page is written twice")
    walks = list(_each_walk(index))
    for walk in walks:
        own = set(walk.pages.values())
        _expect(walk.read in own or walk.read not in set(pages), "a sequence reads a page that another one writes")
    return walks


def _each_walk(index: StateIndex) -> Iterator[_Walk]:
    starts, first_stops = index.cu_q.tolist(), index.cu_stops.tolist()
    stops, pages = index.stops.tolist(), index.pages.tolist()
    for sequence, read in enumerate(index.read.tolist()):
        inside = slice(first_stops[sequence], first_stops[sequence + 1])
        start, end = starts[sequence], starts[sequence + 1]
        cuts = [start, *stops[inside]]
        rising = all(low < high for low, high in itertools.pairwise(cuts))
        _expect(rising and cuts[-1] == end, f"the stops of sequence {sequence} do not rise to its last row")
        after = {stop - 1: page for stop, page in zip(stops[inside], pages[inside], strict=True)}
        yield _Walk(range(start, end), read, after)


def _fresh(values: Tensor) -> Tensor:
    """A contiguous float32 copy."""
    return values.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _key_row(row: Tensor, heads: int, normalize: bool) -> Tensor:
    """[key heads, Dk] to [heads, Dk], of length 1 if asked for."""
    row = _fresh(row).repeat_interleave(heads // row.shape[0], dim=0)
    return row * torch.rsqrt((row * row).sum(dim=1, keepdim=True) + _EPSILON) if normalize else row


def _step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    step = _fresh(dt)
    step = step if bias is None else step + _fresh(bias)
    return functional.softplus(step) if softplus else step


def _fits(parameter: Tensor | None, size: int) -> bool:
    return parameter is None or parameter.shape == (size,)


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise AuditError(f"scan refused: {what}")
