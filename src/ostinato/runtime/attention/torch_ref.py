"""Attention in plain torch: gather the pages of each sequence, then a masked softmax.

Owns: the meaning of attention over pages, written as plainly as possible; the oracle of the other backends' tests, and
what runs where there is no C++ compiler or no kernel for a dtype.  Does not own: speed.

Invariants: reads only positions that some query of the sequence can see, never a hole.  Results agree with other
backends within rounding, not bitwise, and may depend on chunking: ``invariant`` is False.

Thread: the engine's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ostinato.errors import AuditError
from ostinato.runtime.attention.base import AttentionParams, BatchMetadata, KVPages, first_visible


class TorchRef:
    """The reference backend."""

    name = "torch_ref"
    invariant = False

    def supports(self, head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
        """Every floating-point dtype and head size."""
        if head_dim < 1 or value_dim < 1:
            return "head dimensions must be positive"
        return None if dtype.is_floating_point else f"torch_ref needs a floating-point dtype, not {dtype}"

    def write(self, key: Tensor, value: Tensor, pages: KVPages, slots: Tensor) -> None:
        """See :class:`AttentionBackend`."""
        num_blocks, _, block_size, _ = pages.k.shape
        kept = torch.nonzero(slots >= 0).flatten()
        wanted = slots.index_select(0, kept).long()
        if wanted.numel() > 0 and int(wanted.max()) >= num_blocks * block_size:
            raise AuditError(f"slot {int(wanted.max())} is beyond the pool of {num_blocks * block_size}")
        block, offset = wanted // block_size, wanted % block_size
        pages.k[block, :, offset] = key.index_select(0, kept)
        pages.v[block, :, offset] = value.index_select(0, kept)

    def attend(self, query: Tensor, pages: KVPages, params: AttentionParams, metadata: BatchMetadata) -> Tensor:
        """See :class:`AttentionBackend`."""
        out = query.new_empty(query.shape[0], query.shape[1], pages.v.shape[3])
        start = 0
        for sequence, (query_len, context_len) in enumerate(
            zip(metadata.query_lens, metadata.context_lens, strict=True)
        ):
            if query_len > 0:
                table = metadata.block_table[sequence]
                rows = slice(start, start + query_len)
                out[rows] = _attend_sequence(query[rows], pages, params, table, context_len)
            start += query_len
        return out

    def pack_heads(self, weight: Tensor) -> Tensor:
        """As it is."""
        return weight.contiguous()

    def head_product(self, rows: Tensor, packed: Tensor, out: Tensor) -> None:
        """See :class:`AttentionBackend`."""
        if rows.shape[1:] != packed.shape[:2] or out.shape != (*rows.shape[:2], packed.shape[2]):
            raise AuditError(f"product per head refused: {rows.shape} by {packed.shape} is not {out.shape}")
        out.copy_(torch.einsum("rha,hab->rhb", rows, packed))


def _attend_sequence(query: Tensor, pages: KVPages, params: AttentionParams, table: Tensor, context_len: int) -> Tensor:
    """One sequence: ``query`` ``[q, query_heads, dim]`` to ``[q, query_heads, value_dim]``."""
    end = context_len + query.shape[0]
    first = first_visible(params, context_len)
    key = gather_positions(pages.k, table, first, end).to(query.dtype)
    value = gather_positions(pages.v, table, first, end).to(query.dtype)
    mask = visibility(params, context_len, first, end, query.device)
    heads_first = query.transpose(0, 1)
    if params.softcap > 0 or params.sinks is not None:
        return _softmax_attention(heads_first, key, value, mask, params).transpose(0, 1)
    out = functional.scaled_dot_product_attention(
        heads_first[None], key[None], value[None], attn_mask=mask, scale=params.scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def gather_positions(pages: Tensor, table: Tensor, first: int, end: int) -> Tensor:
    """Rows ``[kv_heads, end - first, dim]`` of the positions from ``first`` to before ``end``.

    Raises:
        AuditError: one of them lies in a hole, or beyond the table or the pool.
    """
    block_size = pages.shape[2]
    first_block, end_block = first // block_size, -(-end // block_size)
    if end_block > table.shape[0]:
        raise AuditError(f"the block table has {table.shape[0]} entries, position {end - 1} needs {end_block}")
    blocks = table[first_block:end_block].long()
    if bool(((blocks < 0) | (blocks >= pages.shape[0])).any()):
        raise AuditError(f"positions {first} to {end - 1} read a hole of the block table: {blocks.tolist()}")
    heads_first = pages.index_select(0, blocks).transpose(0, 1).flatten(1, 2)
    return heads_first[:, first - first_block * block_size : end - first_block * block_size]


def visibility(params: AttentionParams, context_len: int, first: int, end: int, device: torch.device) -> Tensor:
    """Boolean ``[queries, keys]``: which keys from ``first`` on each query attends to."""
    query = torch.arange(context_len, end, device=device)[:, None]
    key = torch.arange(first, end, device=device)[None, :]
    mask = key <= query
    if params.window > 0:
        mask &= key > query - params.window
    if params.chunk > 0:
        mask &= key // params.chunk == query // params.chunk
    return mask


def _softmax_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, params: AttentionParams) -> Tensor:
    """Attention with a soft cap or sinks, softmax in float32; all tensors with heads first."""
    group = query.shape[0] // key.shape[0]
    logits = (query @ key.repeat_interleave(group, 0).transpose(1, 2)).float() * params.scale
    if params.softcap > 0:
        logits = torch.tanh(logits / params.softcap) * params.softcap
    logits = logits.masked_fill(~mask, float("-inf"))
    if params.sinks is not None:
        column = params.sinks.float()[:, None, None].expand(-1, logits.shape[1], 1)
        weights = torch.softmax(torch.cat([logits, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(logits, -1)
    return weights.to(value.dtype) @ value.repeat_interleave(group, 0)
