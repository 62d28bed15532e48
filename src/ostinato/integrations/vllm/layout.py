"""Our layout from vLLM's KV cache configuration.

Owns: the translation of its specs into kinds, and the sizes of pages.  Does not own: tensors (``worker``).

One vLLM block of one group is one page of one unit: key, page, hit and transfer unit are all the block.  With several
worker ranks a page has one part for each, rank after rank::

    page   | rank 0: layer a | layer b | ... padding | rank 1: layer a | layer b | ... padding |

Specs are told apart by the names of their classes, so that vLLM need not be imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ostinato.cache.kinds import Chunked, Full, Kind, State, Window
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.errors import ConfigError
from ostinato.ids import GroupId

_REFUSED: Final = frozenset({"RSWASpec", "SinkFullAttentionSpec", "HiddenStateCacheSpec"})
"""They look like full attention and keep something else."""


class CacheGroup(Protocol):
    """vLLM's KVCacheGroupSpec."""

    layer_names: Sequence[str]
    kv_cache_spec: Any


class CacheTensor(Protocol):
    """vLLM's KVCacheTensor: ``size`` bytes back all groups."""

    size: int


class CacheConfig(Protocol):
    """vLLM's KVCacheConfig."""

    num_blocks: int
    kv_cache_groups: Sequence[CacheGroup]
    kv_cache_tensors: Sequence[CacheTensor]


@dataclass(frozen=True, slots=True)
class VllmLayout:
    """``layers``: names by group, in their order in a page.  ``rank_bytes``: a rank's part of a page."""

    cache: CacheLayout
    layers: tuple[tuple[str, ...], ...]
    rank_bytes: int


def read_layout(config: CacheConfig, world_size: int = 1) -> VllmLayout:
    """Raises ConfigError for a model whose cache cannot be stored."""
    groups = config.kv_cache_groups
    if not groups:
        raise ConfigError("this model caches nothing: run vLLM without a KV connector")
    whole = max((tensor.size for tensor in config.kv_cache_tensors), default=0) // max(config.num_blocks, 1)
    # What the scheduler is told of a group of unequal layers is one of them; a block of a lone group is everything.
    sizes = [whole] if len(groups) == 1 else [_block_bytes(group, whole) for group in groups]
    rank_bytes = max(sizes)
    page_bytes = rank_bytes * world_size
    specs, layers, number = [], [], 0
    for index, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        names = tuple(group.layer_names)
        block = int(group.kv_cache_spec.block_size)
        unit_bytes = page_bytes if world_size > 1 else size
        specs.append(
            GroupSpec(
                group=GroupId(index),
                kind=read_kind(group.kv_cache_spec),
                layers=tuple(range(number, number + len(names))),
                hash_unit=block,
                page_units=1,
                hit_granularity=block,
                unit_bytes=unit_bytes,
                unit_stride=page_bytes,
            )
        )
        layers.append(names)
        number += len(names)
    return VllmLayout(CacheLayout(tuple(specs), page_bytes), tuple(layers), rank_bytes)


def read_kind(spec: Any) -> Kind:
    """What must exist to resume, from a spec's class."""
    names = {cls.__name__ for cls in type(spec).__mro__}
    name = type(spec).__name__
    inner: Mapping[str, Any] | None = getattr(spec, "kv_cache_specs", None)
    if inner is not None:
        kinds = {read_kind(one) for one in inner.values()}
        if len(kinds) != 1:
            raise ConfigError(f"a group of this model mixes layers of {len(kinds)} kinds, which cannot be stored")
        return kinds.pop()
    if not getattr(spec, "prefix_cacheable", True) or names & _REFUSED:
        raise ConfigError(f"vLLM's {name} cannot be stored: run this model without OstinatoConnector")
    if "MambaSpec" in names:
        if spec.mamba_cache_mode != "align":
            raise ConfigError(
                "recurrent states can only be stored with --enable-prefix-caching (mamba_cache_mode align)"
            )
        return State()
    if "SlidingWindowSpec" in names:
        return Window(int(spec.sliding_window))
    if "ChunkedLocalAttentionSpec" in names:
        return Chunked(int(spec.attention_chunk_size))
    if "FullAttentionSpec" in names:
        return Full()
    raise ConfigError(f"vLLM's {name} cannot be stored: run this model without OstinatoConnector")


def _block_bytes(group: CacheGroup, whole: int) -> int:
    """Bytes of one block of the group on one rank; at most ``whole``, which every block has."""
    size = int(group.kv_cache_spec.page_size_bytes) * len(group.layer_names)
    return min(size, whole) if whole else size
