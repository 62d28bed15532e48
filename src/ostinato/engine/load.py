"""What an engine is busy with, as plain values: for metrics and the dashboard.

Owns: reading it together, on the engine's thread, without a walk over the pool.  Does not own: counting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

from ostinato.connectors.api import Connector
from ostinato.connectors.breaker import Breaker, Breakers
from ostinato.connectors.forwarding import ForwardingConnector
from ostinato.engine.llm import LLM
from ostinato.hierarchy.tiers import Core, OwnedTier
from ostinato.ids import DEVICE, SlotId
from ostinato.observe.counts import AnswerCounts, FlowCounts
from ostinato.scheduler.request import Phase
from ostinato.transfer.job import JobKind


@dataclass(frozen=True, slots=True)
class TierUse:
    """Blocks of an owned tier; ``free + idle + used + quarantine`` is all of them.

    Idle ones are hittable and may be evicted.  ``read`` and ``written``: blocks that transfers read and write now, used
    ones all.  ``units``: cached hash units by group.
    """

    tier: str
    blocks: int
    block_bytes: int
    free: int
    idle: int
    quarantine: int
    evictions: int
    read: int
    written: int
    units: tuple[int, ...]

    @property
    def used(self) -> int:
        return self.blocks - self.free - self.idle - self.quarantine


@dataclass(frozen=True, slots=True)
class Flow:
    """Transfers of one tier in one direction (``load`` or ``store``); ``open``: jobs now."""

    tier: str
    direction: str
    open: int
    counts: FlowCounts


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine is busy with; completions count one by one, transfers since start.

    ``states``: completions that are running, waiting, waiting for a tier's answer or for a load.  ``breakers``: calls
    that are held back, by tier and kind of call, 1 or 0.
    """

    running: int
    waiting: int
    states: Mapping[str, int]
    tiers: tuple[TierUse, ...]
    flows: tuple[Flow, ...]
    answers: Mapping[str, AnswerCounts]
    breakers: Mapping[tuple[str, str], bool]
    open_transfers: int
    bytes_loaded: int
    bytes_stored: int
    failed_moves: int
    in_doubt: int
    revoked: int
    late_reports: int


def look(llm: LLM) -> Load:
    """The engine's thread, between two steps."""
    states = _states(llm)
    core = llm.built.hierarchy.core
    book = core.book.stats
    return Load(
        running=states["running"],
        waiting=sum(states.values()) - states["running"],
        states=states,
        tiers=tuple(_tier(core, tier) for tier in (core.device, *core.lower.values())),
        flows=_flows(core),
        answers={str(tier): deepcopy(core.answers[tier]) for tier in core.asked},
        breakers=_breakers(llm),
        open_transfers=len(core.book),
        bytes_loaded=book.bytes_loaded,
        bytes_stored=book.bytes_stored,
        failed_moves=book.failed_moves,
        in_doubt=book.in_doubt,
        revoked=book.revoked,
        late_reports=book.late_reports,
    )


def _states(llm: LLM) -> dict[str, int]:
    states = {"running": 0, "waiting": 0, "waiting_lookup": 0, "waiting_load": 0}
    residencies = llm.built.hierarchy.requests
    for request in llm.built.engine.scheduler.requests.values():
        if request.phase in (Phase.RUNNING, Phase.READY):
            states["running"] += 1
        elif residencies[request.request_id].probing_until is not None:
            states["waiting_lookup"] += 1
        elif request.phase is Phase.PARKED:
            states["waiting_load"] += 1
        else:
            states["waiting"] += 1
    return states


def _tier(core: Core, tier: OwnedTier) -> TierUse:
    pool, free = tier.pool, len(tier.pool.free_slots)
    read, written = set[SlotId](), set[SlotId]()
    for job in core.book:
        for lease, reads in ((job.device_lease, JobKind.STORE), (job.tier_lease, JobKind.LOAD)):
            ours = lease is not None and (tier is core.device) == (lease is job.device_lease)
            if lease is not None and ours and (tier is core.device or job.order.tier == tier.tier):
                (read if job.order.kind is reads else written).update(lease.slots)
    return TierUse(
        tier.tier,
        pool.capacity,
        core.layout.page_bytes,
        free,
        pool.available - free,
        pool.capacity - pool.reachable,
        tier.retention.evictions,
        len(read),
        len(written),
        tuple(core.directory.units[tier.tier, spec.group] for spec in core.layout.groups),
    )


def _flows(core: Core) -> tuple[Flow, ...]:
    opened = Counter((job.order.kind, job.order.tier) for job in core.book)
    return tuple(
        Flow(str(tier), kind.value, opened[kind, tier], deepcopy(core.book.flows[kind, tier]))
        for tier in core.order
        if tier != DEVICE
        for kind in JobKind
    )


def _breakers(llm: LLM) -> dict[tuple[str, str], bool]:
    return {
        (str(connector.tier), call): breaker.is_open
        for connector in llm.built.connectors
        for call, breaker in _breakers_of(connector)
    }


def _breakers_of(connector: Connector) -> list[tuple[str, Breaker]]:
    """Of stores, also of one that faults are put around."""
    while isinstance(connector, ForwardingConnector):
        connector = connector.inner
    found = getattr(connector, "breakers", None)
    if not isinstance(found, Breakers):
        return []
    return [("lookup", found.lookup), ("load", found.load), ("store", found.store)]
