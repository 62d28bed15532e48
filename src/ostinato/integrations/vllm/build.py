"""Putting the scheduler half together.

Owns: the wiring, and the checks that need several parts at once.  Does not own: any of the parts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ostinato.connectors.api import Site
from ostinato.connectors.host import HostConnector
from ostinato.connectors.record import RecordIdentity
from ostinato.connectors.registry import make_connector
from ostinato.errors import ConfigError
from ostinato.integrations.vllm.arena import Arena
from ostinato.integrations.vllm.below import Below, open_below
from ostinato.integrations.vllm.config import parse_config
from ostinato.integrations.vllm.host_cache import HostCache
from ostinato.integrations.vllm.identity import make_namespace
from ostinato.integrations.vllm.layout import read_layout
from ostinato.integrations.vllm.scheduler import SchedulerHalf
from ostinato.integrations.vllm.worker import ArenaPages

log: Final = logging.getLogger(__name__)


def build_scheduler_half(config: Any, caches: Any, extra: Mapping[str, Any], versions: Sequence[str]) -> SchedulerHalf:
    """``config``, ``caches``: vLLM's VllmConfig and KVCacheConfig.  Raises ConfigError before anything is started."""
    wanted = parse_config(extra)
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError("OstinatoConnector does not work with pipeline parallelism; use tensor parallelism")
    world = int(parallel.world_size)
    layout = read_layout(caches, world)
    namespace = make_namespace(config, layout, str(caches.kv_cache_layout), wanted.model_digest, versions)
    host_tier = make_connector(wanted.host)
    assert isinstance(host_tier, HostConnector)
    host = HostCache(layout.cache, host_tier.slots(layout.cache.page_bytes), world)
    identity = RecordIdentity(layout.cache.fingerprint(), namespace.seed())
    below = open_below(wanted.below, Site(layout.cache, identity, model=str(config.model_config.model)))
    arena = Arena(host.pool.capacity, layout.cache.page_bytes)
    pages = ArenaPages(arena.memory, host.pool.capacity, layout.cache.page_bytes)
    log.info(
        "OstinatoConnector: %d groups, pages of %d bytes, %d of them in host memory; below it: %s",
        len(layout.cache.groups),
        layout.cache.page_bytes,
        host.pool.capacity,
        ", ".join(wanted.below) or "nothing",
    )
    hash_block = int(caches.hash_block_size or layout.cache.base_unit)
    return SchedulerHalf(arena, host, Below(below, host, pages, wanted.load_deadline_s), namespace.seed(), hash_block)
