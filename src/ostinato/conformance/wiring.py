"""An engine over workers of bytes, wired as ``engine.build`` wires one over a model.

Owns: the wiring, and pools that mark and poison their slots.  Does not own: the parts; driving them (``bench``).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ostinato.cache.directory import Directory
from ostinato.cache.layout import CacheLayout
from ostinato.cache.pool import Lease, SlotPool
from ostinato.conformance.kept import LiveSlot
from ostinato.conformance.model import HYBRID
from ostinato.conformance.worker import FakeWorkers
from ostinato.connectors.api import Connector, Ownership, Site
from ostinato.connectors.faults import Faults
from ostinato.connectors.record import RecordIdentity
from ostinato.engine.binding import bind_connectors
from ostinato.engine.build import NoTokenizer
from ostinato.engine.loop import Engine, Limits
from ostinato.engine.text import Vocabulary
from ostinato.hierarchy.hierarchy import CacheHierarchy
from ostinato.hierarchy.tiers import Core, CoreConfig, OwnedTier, StoreMode
from ostinato.ids import DEVICE, SlotId
from ostinato.scheduler.scheduler import Scheduler, SchedulerConfig
from ostinato.transfer.book import Book

STEP_TOKENS: Final = 64
LOWER_SLOTS: Final = 160
"""Pages of an owned tier that are used, however many it has: so few that it evicts."""


@dataclass(frozen=True, slots=True)
class Setup:
    """``namespace``: whose records they are; engines with the same one share them.  ``looks``: see ``Watch``."""

    layout: CacheLayout = HYBRID
    pages: int = 64
    ranks: int = 1
    faults: Faults | None = None
    deadline_s: float = 20.0
    namespace: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    looks: bool = False
    max_running: int = 16


class _Pool(SlotPool):
    """Slots that are poisoned when taken."""

    poison: Callable[[SlotId], None] = staticmethod(lambda _: None)

    def take(self, count: int, owner: str) -> Lease | None:
        lease = super().take(count, owner)
        for slot in lease.slots if lease is not None else ():
            self.poison(slot)
        return lease


@dataclass(frozen=True, slots=True)
class Wired:
    """The parts that a bench drives and looks into."""

    workers: FakeWorkers
    cache: CacheHierarchy
    engine: Engine


def wire(connectors: Sequence[Connector], setup: Setup) -> Wired:
    """Open the connectors and build an engine around them; when that fails they are closed again."""
    layout = setup.layout
    identity = RecordIdentity(layout.fingerprint(), hashlib.sha256(setup.namespace).digest())
    owned = [each for each in connectors if each.capabilities.ownership is Ownership.OWNED]
    # A store has one record for each key: only the memory of a rank itself can hold that rank's own share.
    workers = FakeWorkers(layout, setup.pages, setup.ranks, distinct=len(owned) == len(connectors))
    try:
        for connector in connectors:
            connector.open(Site(layout, identity, setup.ranks))
        core = _core(connectors, owned, setup, workers)
        for rank, memory in enumerate(workers.ranks):
            for connector in connectors:
                workers.attach(rank, connector.tier, connector.make_mover(memory.device, workers.notify))
        cache = CacheHierarchy(core, lambda salt: hashlib.sha256(setup.namespace + salt.encode()).digest())
        bind_connectors(connectors, cache)
    except BaseException:
        workers.close()
        for connector in connectors:
            connector.close()
        raise
    scheduler = Scheduler(cache, SchedulerConfig(STEP_TOKENS, setup.max_running))
    workers.requests = scheduler.requests.get
    limits = Limits(1 << 20, setup.pages, layout.page_bytes)
    engine = Engine(scheduler, workers, Vocabulary(NoTokenizer()), frozenset(), limits, cache.audit)
    return Wired(workers, cache, engine)


def _core(connectors: Sequence[Connector], owned: Sequence[Connector], setup: Setup, workers: FakeWorkers) -> Core:
    directory = Directory()
    device = OwnedTier(DEVICE, setup.pages, directory)
    pool = device.pool = _Pool(DEVICE, setup.pages, device.retention)
    pool.poison = workers.poison
    pool.free_slots.clear()
    pool.free_slots.extend(SlotId(LiveSlot(slot)) for slot in range(setup.pages))
    lower = {}
    for each in owned:
        slots = min(LOWER_SLOTS, each.slots(setup.layout.page_bytes))
        mode = StoreMode.EAGER if each.capabilities.eager else StoreMode.LAZY
        lower[each.tier] = OwnedTier(each.tier, slots, directory, mode)
    deadline = setup.deadline_s
    config = CoreConfig(step_tokens=STEP_TOKENS, load_deadline_s=deadline, store_deadline_s=deadline)
    order = (DEVICE, *(connector.tier for connector in connectors))
    return Core(setup.layout, config, directory, device, lower, {}, Book(setup.ranks), order)


def describe(engine: Engine) -> str:
    """What is alive, for the text of a failure."""
    book, requests = engine.scheduler.cache.core.book, engine.scheduler.requests
    jobs = [f"job {job.job_id}: {job.order.kind.value} {job.order.tier}, {job.state.value}" for job in book]
    names = [f"{name}: {each.phase.value}" for name, each in requests.items()]
    return "\n".join([*names[:5], *jobs[:5]])
