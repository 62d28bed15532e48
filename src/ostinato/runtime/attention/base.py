"""What an attention backend is: the values that go in, and the protocol.

Owns: the types shared by the backends.  Does not own: page memory (the arena hands out views), block tables (the
scheduler fills them), or which layer belongs to which group.

One call attends a ragged batch of prefill chunks and decodes at once::

    query    [ sequence 0 ......... | sequence 1 | sequence 2 ... ]     tokens packed, no padding
    cu_q       0                      q0           q0 + q1      ...     int32, sequences + 1
    seq_lens   keys of each sequence once this step's tokens are written

Query token t of a sequence stands at position ``context_len + t`` and attends to the keys at positions j with
``j <= p``; with a window also ``j > p - window``; with a chunk also ``j // chunk == p // chunk``.

Thread: the engine's; backends keep no state between calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Entry of a block table, or slot, that names nothing.
HOLE = -1


@dataclass(frozen=True, slots=True)
class KVPages:
    """The pages of one layer: strided views ``[num_blocks, kv_heads, block_size, dim]`` into the arena.

    A kernel block holds one hash unit of ``block_size`` tokens.  Strides are free but for the last dimension::

        arena  | block 0: layer 0 K | layer 0 V | layer 1 K | ... | block 1: layer 0 K | ...
                         `-- [kv_heads, block_size, dim]           `-- + block stride
    """

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What distinguishes one layer's attention; 0 means none for ``window``, ``chunk`` and ``softcap``.

    ``softcap`` c turns a scaled logit s into ``c * tanh(s / c)``.  ``sinks`` is one float32 logit per query head that
    joins the softmax and attends to nothing.
    """

    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """One step's batch as one KV group sees it.

    Attributes:
        cu_q: int32 ``[sequences + 1]``, where each sequence's query tokens start.
        seq_lens: int32 ``[sequences]``, context plus query.
        query_lens: the same as Python numbers.
        context_lens: tokens before this step's.
        block_table: int32 ``[sequences, blocks]``; entries below 0 are holes, which must lie outside of what the
            queries can see.
        slots: int32 ``[tokens]``, ``block * block_size + offset`` of each query token's key; below 0: not written.
    """

    cu_q: Tensor
    seq_lens: Tensor
    query_lens: list[int]
    context_lens: list[int]
    block_table: Tensor
    slots: Tensor


def first_visible(params: AttentionParams, position: int) -> int:
    """Lowest key position that a query at ``position`` attends to."""
    first = 0
    if params.window > 0:
        first = max(first, position - params.window + 1)
    if params.chunk > 0:
        first = max(first, position // params.chunk * params.chunk)
    return first


class AttentionBackend(Protocol):
    """Writes new keys and values into pages, attends over them, and applies small matrices head by head."""

    @property
    def name(self) -> str:
        """Short name, for the start-up table and a tier's fingerprint."""

    @property
    def invariant(self) -> bool:
        """Whether results are bitwise independent of chunking, batch, threads and block size."""

    def supports(self, head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
        """None when a layer of this shape can run, else the reason why not."""

    def write(self, key: Tensor, value: Tensor, pages: KVPages, slots: Tensor) -> None:
        """Store ``key`` and ``value`` ``[tokens, kv_heads, dim]`` at their slots.

        Raises:
            AuditError: a slot lies beyond the pool, or shapes disagree.
        """

    def attend(self, query: Tensor, pages: KVPages, params: AttentionParams, metadata: BatchMetadata) -> Tensor:
        """Attention of ``query`` ``[tokens, query_heads, head_dim]``.

        Returns:
            ``[tokens, query_heads, value_dim]``, contiguous, in the query's dtype.

        Raises:
            AuditError: a query could see a hole of the block table, or shapes disagree.
        """

    def pack_heads(self, weight: Tensor) -> Tensor:
        """One matrix per head, ``[heads, inner, columns]``, in the form that :meth:`head_product` takes."""

    def head_product(self, rows: Tensor, packed: Tensor, out: Tensor) -> None:
        """``out[r, h] = rows[r, h] @ weight[h]``: ``[tokens, heads, inner]`` to ``[tokens, heads, columns]``.

        ``out`` may be strided but for its last dimension.  An invariant backend gives a row the same bits whatever
        other rows there are.

        Raises:
            AuditError: shapes disagree.
        """
