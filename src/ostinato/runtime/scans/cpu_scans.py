"""Scans on the CPU by the C++ kernels: bitwise invariant to chunking, batch, threads and number of stops.

Owns: the calls of ``torch.ops.ostinato.scan_*``.  Does not own: building the library (``native``) or the kernels
(``csrc``).

Invariants: every argument is checked by the operator before any work starts, so a bad batch raises and writes nothing.

Thread: the engine's; the operators use torch's thread pool and release the GIL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.errors import AuditError
from ostinato.runtime.native import Isa
from ostinato.runtime.scans.base import (
    Convolution,
    GatedDelta,
    SelectiveScan,
    StateIndex,
    StateSpace,
    has_silu,
)


class CpuScans:
    """The C++ backend, on one instruction set."""

    name = "cpu_scans"
    invariant = True

    def __init__(self, isa: Isa = Isa.AUTO) -> None:
        """The library must be loaded, and the machine must have ``isa``."""
        self.isa = isa

    def convolve(self, call: Convolution, states: Tensor, index: StateIndex) -> Tensor:
        """See :class:`ScanBackend`.

        Raises:
            AuditError: shapes, dtypes or the index do not fit; nothing was written.
        """
        out = torch.empty(call.inputs.shape, dtype=call.inputs.dtype)
        silu = has_silu(call.activation)
        try:
            torch.ops.ostinato.scan_convolve(
                _dense(call.inputs), call.weight, call.bias, silu, states, *_fields(index), out, int(self.isa)
            )
        except RuntimeError as error:
            raise AuditError(f"convolution refused: {error}") from error
        return out

    def gated_delta(self, call: GatedDelta, states: Tensor, index: StateIndex) -> Tensor:
        """See :class:`ScanBackend`.

        Raises:
            AuditError: shapes, dtypes or the index do not fit; nothing was written.
        """
        out = torch.empty(call.value.shape, dtype=call.value.dtype)
        decay = _dense(call.decay) if call.decay.dim() == 3 else call.decay
        try:
            torch.ops.ostinato.scan_gated_delta(
                _dense(call.query),
                _dense(call.key),
                _dense(call.value),
                decay,
                call.beta,
                call.normalize,
                states,
                *_fields(index),
                out,
                int(self.isa),
            )
        except RuntimeError as error:
            raise AuditError(f"gated delta scan refused: {error}") from error
        return out

    def state_space(self, call: StateSpace, states: Tensor, index: StateIndex) -> Tensor:
        """See :class:`ScanBackend`.

        Raises:
            AuditError: shapes, dtypes or the index do not fit; nothing was written.
        """
        out = torch.empty(call.inputs.shape, dtype=torch.float32)
        try:
            torch.ops.ostinato.scan_state_space(
                _dense(call.inputs),
                call.dt,
                call.a,
                _dense(call.b),
                _dense(call.c),
                call.d,
                call.dt_bias,
                call.softplus,
                *call.dt_limit,
                states,
                *_fields(index),
                out,
                int(self.isa),
            )
        except RuntimeError as error:
            raise AuditError(f"state space scan refused: {error}") from error
        return out

    def selective(self, call: SelectiveScan, states: Tensor, index: StateIndex) -> Tensor:
        """See :class:`ScanBackend`.

        Raises:
            AuditError: shapes, dtypes or the index do not fit; nothing was written.
        """
        out = torch.empty(call.inputs.shape, dtype=call.inputs.dtype)
        try:
            torch.ops.ostinato.scan_selective(
                _dense(call.inputs),
                _dense(call.dt),
                call.a,
                _dense(call.b),
                _dense(call.c),
                call.d,
                None if call.gate is None else _dense(call.gate),
                call.dt_bias,
                call.softplus,
                states,
                *_fields(index),
                out,
                int(self.isa),
            )
        except RuntimeError as error:
            raise AuditError(f"selective scan refused: {error}") from error
        return out


def _dense(rows: Tensor) -> Tensor:
    """The kernels take any strides but in the last dimension."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _fields(index: StateIndex) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return index.cu_q, index.read, index.cu_stops, index.stops, index.pages
