"""Scans over recurrent state to test with: calls of every kind and size, batches of parts of them, pages of states.

States lie as the engine lays them out: strided views into one arena, with other layers between two pages.  Everything
that no sequence may read is NaN, so a read of a wrong page shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from ostinato.runtime.scans import Convolution, GatedDelta, ScanBackend, SelectiveScan, StateIndex, StateSpace

Call = Convolution | GatedDelta | StateSpace | SelectiveScan
ROW_FIELDS: Final[Mapping[type, tuple[str, ...]]] = MappingProxyType(
    {
        Convolution: ("inputs",),
        GatedDelta: ("query", "key", "value", "decay", "beta"),
        StateSpace: ("inputs", "dt", "b", "c"),
        SelectiveScan: ("inputs", "dt", "b", "c", "gate"),
    }
)
HOLE = -1


def convolution(rows: int, dtype: torch.dtype, channels: int, kernel: int, activation: str | None) -> Convolution:
    weight = torch.randn(channels, kernel).to(dtype)
    bias = torch.randn(channels).to(dtype) if activation else None
    return Convolution(torch.randn(rows, channels).to(dtype), weight, bias, activation)


def gated_delta(rows: int, dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], kda: bool) -> GatedDelta:
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    decay = -torch.rand((rows, value_heads, key_dim) if kda else (rows, value_heads))
    query, key = torch.randn(2, rows, key_heads, key_dim).to(dtype)
    value = torch.randn(rows, value_heads, value_dim).to(dtype)
    return GatedDelta(query, key, value, decay, torch.rand(rows, value_heads).to(dtype), normalize=True)


def state_space(rows: int, dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int]) -> StateSpace:
    (groups, count), (head_dim, state_dim) = heads, dims
    b, c = torch.randn(2, rows, groups, state_dim).to(dtype)
    inputs, dt = torch.randn(rows, count, head_dim).to(dtype), torch.randn(rows, count).to(dtype)
    a, d, bias = -torch.rand(count), torch.randn(count).to(dtype), torch.randn(count).to(dtype)
    return StateSpace(inputs, dt, a, b, c, d, bias, softplus=True, dt_limit=(0.0, float("inf")))


def selective(rows: int, dtype: torch.dtype, channels: int, state_dim: int) -> SelectiveScan:
    b, c = torch.randn(2, rows, state_dim).to(dtype)
    inputs, dt, gate = torch.randn(3, rows, channels).to(dtype)
    d, bias = torch.randn(channels), torch.randn(channels)
    return SelectiveScan(inputs, dt, -torch.rand(channels, state_dim), b, c, d, gate, bias, softplus=True)


@dataclass(frozen=True, slots=True)
class Case:
    """A scan of some size; ``state`` is the shape of one state."""

    make: Callable[[int, torch.dtype], Call]
    state: tuple[int, ...]


CASES: Final[Mapping[str, Case]] = MappingProxyType(
    {
        "conv": Case(lambda rows, dtype: convolution(rows, dtype, 70, 4, "silu"), (70, 3)),
        "conv-odd": Case(lambda rows, dtype: convolution(rows, dtype, 5, 2, None), (5, 1)),
        "conv-3": Case(lambda rows, dtype: convolution(rows, dtype, 129, 3, "swish"), (129, 2)),
        "delta": Case(lambda rows, dtype: gated_delta(rows, dtype, (2, 4), (32, 40), False), (4, 32, 40)),
        "delta-odd": Case(lambda rows, dtype: gated_delta(rows, dtype, (1, 1), (3, 5), False), (1, 3, 5)),
        "kda": Case(lambda rows, dtype: gated_delta(rows, dtype, (3, 3), (17, 33), True), (3, 17, 33)),
        "ssd": Case(lambda rows, dtype: state_space(rows, dtype, (2, 4), (24, 32)), (4, 24, 32)),
        "ssd-odd": Case(lambda rows, dtype: state_space(rows, dtype, (1, 1), (5, 3)), (1, 5, 3)),
        "selective": Case(lambda rows, dtype: selective(rows, dtype, 70, 16), (70, 16)),
        "selective-odd": Case(lambda rows, dtype: selective(rows, dtype, 5, 3), (5, 3)),
    }
)
KINDS: Final[Mapping[str, Case]] = MappingProxyType({name: case for name, case in CASES.items() if "-" not in name})


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of one sequence as one step of a batch; ``stops``: (rows into the part, page)."""

    call: Call
    read: int
    stops: tuple[tuple[int, int], ...]


def cut(call: Call, start: int, end: int) -> Call:
    rows = {name: getattr(call, name) for name in ROW_FIELDS[type(call)]}
    return changed(call, {name: tensor[start:end] for name, tensor in rows.items() if tensor is not None})


def changed(call: Call, values: Mapping[str, Any]) -> Call:
    """``dataclasses.replace`` for whichever call it is."""
    return type(call)(**{field.name: getattr(call, field.name) for field in fields(call)} | dict(values))


def rows_of(call: Call) -> int:
    return int(getattr(call, ROW_FIELDS[type(call)][0]).shape[0])


def index_of(parts: list[Part]) -> StateIndex:
    starts = [0, *itertools.accumulate(rows_of(part.call) for part in parts)]
    stops = [start + row for start, part in zip(starts, parts, strict=False) for row, _ in part.stops]
    int32 = torch.int32
    return StateIndex(
        cu_q=torch.tensor(starts, dtype=int32),
        read=torch.tensor([part.read for part in parts], dtype=int32),
        cu_stops=torch.tensor([0, *itertools.accumulate(len(part.stops) for part in parts)], dtype=int32),
        stops=torch.tensor(stops, dtype=int32),
        pages=torch.tensor([page for part in parts for _, page in part.stops], dtype=int32),
    )


def run(backend: ScanBackend, call: Call, states: Tensor, index: StateIndex) -> Tensor:
    match call:
        case Convolution():
            return backend.convolve(call, states, index)
        case GatedDelta():
            return backend.gated_delta(call, states, index)
        case StateSpace():
            return backend.state_space(call, states, index)
        case SelectiveScan():
            return backend.selective(call, states, index)


def scan(backend: ScanBackend, parts: list[Part], states: Tensor) -> list[Tensor]:
    """The outputs of each part, scanned as one batch."""
    names = ROW_FIELDS[type(parts[0].call)]
    joined = {name: torch.cat([getattr(part.call, name) for part in parts]) for name in names}
    out = run(backend, changed(parts[0].call, joined), states, index_of(parts))
    return list(torch.split(out, [rows_of(part.call) for part in parts]))


def empty_states(shape: tuple[int, ...], pages: int, dtype: torch.dtype) -> Tensor:
    """NaN-filled pages with padding of other layers before and after each."""
    size = torch.Size(shape).numel()
    arena = torch.full((pages, 16 + size + 48), float("nan"), dtype=dtype)
    return arena[:, 16 : 16 + size].view(pages, *shape)


def fresh_states(case: Case, call: Call, pages: int) -> Tensor:
    """Page 0 holds a state, the others NaN."""
    dtype = call.inputs.dtype if isinstance(call, Convolution) else torch.float32
    states = empty_states(case.state, pages, dtype)
    states[0] = torch.randn(case.state).to(dtype)
    return states


def parameters(call: Call) -> dict[str, object]:
    """What is not one per row."""
    return {field.name: getattr(call, field.name) for field in fields(call) if field.name not in ROW_FIELDS[type(call)]}
