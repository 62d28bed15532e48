"""KV events: what came into a tier and what left it, in the form that routers of vLLM read.

Owns: the values and their encoding (msgpack; field order and names are those of vLLM 0.32).  Does not own: when
something happens (``hierarchy.kv_events``), sending it (``events``).  Pure values; any thread.

A block here is one hash unit of one group.  Its hash is the 32-byte digest of the key chain at the unit's end, so two
groups share hashes and are told apart by ``group_idx``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec

MEDIUM_DEVICE: Final = "GPU"
"""vLLM's word for the pool that attention reads, on a CPU too."""
MEDIUM_HOST: Final = "CPU"


class _Event(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag=True):
    """vLLM's events are maps with the type under ``type``; absent fields have their defaults."""


class BlockStored(_Event, frozen=True):
    """Consecutive blocks of one group that one tier holds from now on.

    ``parent_block_hash``: of the unit before the first; None at a prompt's start.  ``token_ids``: of all blocks.
    ``extra_keys``: one entry for each block when the cache is not everybody's, so that nobody takes a tenant's block
    for one of the same tokens; it names the key space and nothing else.  ``ownership``: a lower tier's name.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(_Event, frozen=True):
    """Blocks that a tier does not hold any more."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(_Event, frozen=True):
    """Nothing is held: what is, is told anew in the events that follow."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What one step changed, in order.  ``ts``: seconds since the epoch."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def encode(ts: float, events: Sequence[KvEvent]) -> bytes:
    return msgspec.msgpack.encode(KvEventBatch(ts, list(events), 0))


def decode(payload: bytes) -> KvEventBatch:
    """Raises msgspec.MsgspecError when ``payload`` is no batch."""
    return msgspec.msgpack.decode(payload, type=KvEventBatch)
