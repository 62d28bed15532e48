"""Putting an engine together: the only place where connectors meet the hierarchy.

Owns: the wiring and the checks that need several parts at once.  Does not own: any of the parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ostinato.cache.directory import Directory
from ostinato.cache.keys import Namespace
from ostinato.cache.layout import CacheLayout
from ostinato.config import EngineConfig
from ostinato.connectors.api import Connector, Ownership, Site
from ostinato.connectors.multi import expand
from ostinato.connectors.record import RecordIdentity
from ostinato.connectors.registry import parse_bytes
from ostinato.connectors.tiers import make_tiers
from ostinato.engine.binding import bind_connectors
from ostinato.engine.intake import Limits
from ostinato.engine.loop import Engine
from ostinato.engine.startup import StartupReport, TierRow, group_rows
from ostinato.engine.text import AddedToken, Vocabulary
from ostinato.errors import CapacityError, ConfigError, RequestError
from ostinato.events.config import parse_events_config
from ostinato.events.publisher import ZmqPublisher
from ostinato.hierarchy.hierarchy import CacheHierarchy
from ostinato.hierarchy.kv_events import KvEventSource
from ostinato.hierarchy.tiers import Core, CoreConfig, OwnedTier, StoreMode
from ostinato.ids import DEVICE, TierId
from ostinato.memory import check_memory
from ostinato.runtime.device_pages import ArenaPages
from ostinato.runtime.grammars import Grammars
from ostinato.runtime.load import Runtime, make_worker
from ostinato.runtime.worker import Worker
from ostinato.scheduler.policy import Policy
from ostinato.scheduler.scheduler import Scheduler, SchedulerConfig
from ostinato.transfer.book import Book


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine with the parts that tests and tools look into."""

    engine: Engine
    hierarchy: CacheHierarchy
    worker: Worker
    connectors: tuple[Connector, ...]
    report: StartupReport
    grammars: Grammars
    events: ZmqPublisher | None = None


def build_engine(
    runtime: Runtime,
    config: EngineConfig,
    connectors: Sequence[Connector] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> BuiltEngine:
    """An engine over a loaded model.  ``connectors`` replaces what ``config.kv`` names (tests)."""
    layout = runtime.layout
    pages, max_model_len = _sizes(runtime, config)
    tiers = make_tiers(config) if connectors is None else expand(connectors)
    identity = RecordIdentity(layout.fingerprint(), namespace_seed(runtime, ""))
    for connector in tiers:
        connector.open(Site(layout, identity, model=runtime.name))
    core = _core(layout, config, pages, tiers)
    hierarchy = CacheHierarchy(core, _seeder(runtime), clock)
    grammars = Grammars(runtime.tokenizer, vocabulary_size(runtime), eos_token_ids(runtime))
    worker = make_worker(runtime, pages, {}, config.check_invariants, grammars)
    device = ArenaPages(worker.arena)
    try:
        for connector in tiers:
            worker.attach(connector.tier, connector.make_mover(device, worker.notify))
        bind_connectors(tiers, hierarchy)
        events = _publisher(config, hierarchy, namespace_seed(runtime, ""))
    except BaseException:
        worker.close()  # the threads of those that were made
        raise
    scheduler = Scheduler(
        hierarchy,
        SchedulerConfig(config.max_num_batched_tokens, config.max_num_seqs, Policy(config.scheduling_policy)),
        clock,
    )
    engine = Engine(
        scheduler,
        worker,
        Vocabulary(runtime.tokenizer or NoTokenizer()),
        eos_token_ids(runtime),
        Limits(max_model_len, pages, layout.page_bytes, vocabulary_size(runtime), grammars.check),
        on_step=hierarchy.audit if config.check_invariants else None,
    )
    report = _report(runtime, config, core, max_model_len)
    return BuiltEngine(engine, hierarchy, worker, tiers, report, grammars, events)


def _publisher(config: EngineConfig, hierarchy: CacheHierarchy, everybody: bytes) -> ZmqPublisher | None:
    """Whoever publishes KV events; listens to the directory from now on."""
    if config.kv_events_config is None:
        return None
    wanted = parse_events_config(config.kv_events_config)
    if not wanted.enabled:
        return None
    publisher = ZmqPublisher(wanted)
    source = KvEventSource(hierarchy.core, hierarchy.requests, publisher, everybody)
    hierarchy.core.directory.listeners = (*hierarchy.core.directory.listeners, source)
    hierarchy.observers = (*hierarchy.observers, source)
    return publisher


def _sizes(runtime: Runtime, config: EngineConfig) -> tuple[int, int]:
    """Pages of the device pool, and the longest request that is allowed."""
    layout, step = runtime.layout, config.max_num_batched_tokens
    pages = config.num_gpu_blocks_override
    if pages is None:
        pages = device_bytes(config) // layout.page_bytes
    wanted = config.max_model_len or runtime.max_model_len
    if wanted > runtime.max_model_len:
        raise ConfigError(f"max_model_len={wanted}, but the model was made for {runtime.max_model_len} tokens at most")
    minimum = layout.peak_pages(config.max_model_len or layout.granularity + 1, step)
    if pages < minimum:
        what = f"one request of {wanted} tokens" if config.max_model_len else "even one request"
        raise CapacityError(
            f"the device pool of {pages} pages ({pages * layout.page_bytes / 2**20:.1f} MiB) has no room for {what}: "
            f"kv_cache_memory must be at least {minimum * layout.page_bytes / 2**20:.1f} MiB ({minimum} pages)"
        )
    check_memory("the device pool", pages * layout.page_bytes)
    return pages, wanted


def device_bytes(config: EngineConfig) -> int:
    """``kv_cache_memory`` as a number."""
    value: object = config.kv_cache_memory
    if isinstance(value, str):
        return parse_bytes(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"kv_cache_memory is a size such as 2GiB, or a number of bytes, not {value!r}")
    return value


def _core(layout: CacheLayout, config: EngineConfig, pages: int, connectors: Sequence[Connector]) -> Core:
    directory = Directory()
    lower: dict[TierId, OwnedTier] = {}
    # What our own tiers hold needs no question, so they come first, each kind in the order given.
    ours_first = sorted(connectors, key=lambda connector: connector.capabilities.ownership is not Ownership.OWNED)
    order = (DEVICE, *(connector.tier for connector in ours_first))
    for tier in order:
        if order.count(tier) > 1:
            raise ConfigError(f"two tiers are called {tier!r}; each may be given once")
    for connector in connectors:
        tier = connector.tier
        if connector.capabilities.ownership is Ownership.OWNED:
            mode = StoreMode.EAGER if connector.capabilities.eager else StoreMode.LAZY
            lower[tier] = OwnedTier(tier, connector.slots(layout.page_bytes), directory, mode)
    core_config = CoreConfig(
        reuse=config.enable_prefix_caching,
        step_tokens=config.max_num_batched_tokens,
        load_deadline_s=config.load_deadline_s,
        store_deadline_s=config.store_deadline_s,
    )
    device = OwnedTier(DEVICE, pages, directory)
    # Memory is given on its first use, so one after the other they would all seem to fit.
    slots = pages + sum(tier.pool.capacity for tier in lower.values())
    check_memory("the device pool and the tiers in memory", slots * layout.page_bytes)
    return Core(layout, core_config, directory, device, lower, {}, Book(), order)


def _seeder(runtime: Runtime) -> Callable[[str], bytes]:
    return lambda salt: namespace_seed(runtime, salt)


def namespace_seed(runtime: Runtime, salt: str) -> bytes:
    """The first link of the key chains of all prompts with ``salt``."""
    return _namespace(runtime, salt).seed()


def _namespace(runtime: Runtime, salt: str) -> Namespace:
    return Namespace(
        weights=runtime.identity.weights,
        layout=runtime.layout.fingerprint(),
        config=runtime.identity.config,
        dtype=runtime.identity.dtype,
        numerics=runtime.identity.numerics,
        salt=salt.encode("utf-8", "surrogatepass"),
    )


def _report(runtime: Runtime, config: EngineConfig, core: Core, max_model_len: int) -> StartupReport:
    page_bytes, pages = core.layout.page_bytes, core.device.pool.capacity
    tiers = [TierRow(DEVICE, pages, pages * page_bytes, "attention-ready pool")]
    for tier in core.lower.values():
        slots = tier.pool.capacity
        tiers.append(TierRow(tier.tier, slots, slots * page_bytes, f"owned, stores {tier.mode.value}"))
    tiers.extend(TierRow(tier, None, None, "asked per prompt") for tier in core.asked)
    off = []
    if not config.enable_prefix_caching:
        off.append("prefix caching: enable_prefix_caching is false")
    elif max_model_len <= core.layout.granularity:
        shortest = core.layout.granularity + 1
        off.append(
            f"prefix caching: a prompt must have {shortest} tokens to be reused, max_model_len is {max_model_len}"
        )
    if not core.lower and not core.asked and config.enable_prefix_caching:
        off.append("lower tiers: none given; evicted blocks are computed again (try --kv disk:DIR:20GiB)")
    return StartupReport(
        runtime.name,
        runtime.identity.dtype,
        runtime.kernels,
        max_model_len,
        group_rows(core.layout, pages),
        tuple(tiers),
        tuple(off),
    )


def vocabulary_size(runtime: Runtime) -> int:
    """Token ids of the model are below this."""
    size: int = runtime.prepared.model.config.get_text_config(decoder=True).vocab_size
    return size


def eos_token_ids(runtime: Runtime) -> frozenset[int]:
    """The tokens that end an answer, as the model's own generation config has them."""
    model = runtime.prepared.model
    found: set[int] = set()
    for source in (model.generation_config, model.config.get_text_config(decoder=True)):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    return frozenset(found)


class NoTokenizer:
    """For a model without a tokenizer: prompts are token ids, and outputs have no text."""

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return {}

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:  # noqa: ARG002
        return ""

    def convert_ids_to_tokens(self, ids: int) -> str:  # noqa: ARG002
        return ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        raise RequestError("this model has no tokenizer: give bad_words_ids instead of bad_words")
