"""Attention on the CPU by the C++ kernels: bitwise invariant to chunking, batch, threads and block size.

Owns: the calls of ``torch.ops.ostinato``.  Does not own: building the library (``native``) or the kernels (``csrc``).

Invariants: every argument is checked by the operator before any work starts, so a bad batch raises and writes nothing.

Thread: the engine's; the operators use torch's thread pool and release the GIL.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from ostinato.errors import AuditError
from ostinato.runtime.attention.base import AttentionParams, BatchMetadata, KVPages
from ostinato.runtime.native import Isa

DTYPES = (torch.float32, torch.bfloat16)
_PANEL: Final = 32
"""Columns of a packed panel, ``kPanelColumns`` of ``csrc/absorb.h``."""


class CpuNative:
    """The C++ backend, on one instruction set."""

    name = "cpu_native"
    invariant = True

    def __init__(self, isa: Isa = Isa.AUTO) -> None:
        """The library must be loaded, and the machine must have ``isa``."""
        self.isa = isa

    def supports(self, head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
        """Any head size, in float32 and bfloat16."""
        if dtype not in DTYPES:
            return f"cpu_native has no kernel for {dtype}"
        if head_dim < 1 or value_dim < 1:
            return "head dimensions must be positive"
        return None

    def write(self, key: Tensor, value: Tensor, pages: KVPages, slots: Tensor) -> None:
        """See :class:`AttentionBackend`."""
        try:
            torch.ops.ostinato.write_kv(_dense(key), _dense(value), pages.k, pages.v, slots)
        except RuntimeError as error:
            raise AuditError(f"write to KV pages refused: {error}") from error

    def attend(self, query: Tensor, pages: KVPages, params: AttentionParams, metadata: BatchMetadata) -> Tensor:
        """See :class:`AttentionBackend`."""
        out = query.new_empty(query.shape[0], query.shape[1], pages.v.shape[3])
        try:
            torch.ops.ostinato.paged_attention(
                _dense(query),
                pages.k,
                pages.v,
                metadata.block_table,
                metadata.cu_q,
                metadata.seq_lens,
                out,
                params.scale,
                params.window,
                params.chunk,
                params.softcap,
                params.sinks,
                int(self.isa),
            )
        except RuntimeError as error:
            raise AuditError(f"attention refused: {error}") from error
        return out

    def pack_heads(self, weight: Tensor) -> Tensor:
        """``[heads, panels, steps, panel]``, see ``csrc/absorb.h``; the same for every instruction set."""
        heads, inner, columns = weight.shape
        per_step = 1 if weight.dtype == torch.float32 else 2
        padded = functional.pad(weight, (0, -columns % _PANEL, 0, -inner % per_step))
        steps, panels = padded.shape[1] // per_step, padded.shape[2] // _PANEL
        cut = padded.view(heads, steps, per_step, panels, _PANEL).permute(0, 3, 1, 4, 2)
        return cut.reshape(heads, panels, steps, _PANEL * per_step).contiguous()

    def head_product(self, rows: Tensor, packed: Tensor, out: Tensor) -> None:
        """See :class:`AttentionBackend`."""
        try:
            torch.ops.ostinato.absorb(_dense(rows), packed, out, int(self.isa))
        except RuntimeError as error:
            raise AuditError(f"product per head refused: {error}") from error


def _dense(rows: Tensor) -> Tensor:
    """The kernels take any strides but in the last dimension."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()
