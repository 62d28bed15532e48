"""Where connectors and the hierarchy meet: what each may see of the other.

Owns: the wiring of ports.  Does not own: the parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.cache.keys import KeyChain
from ostinato.cache.table import BlockTable
from ostinato.connectors.api import Connector, Ownership
from ostinato.connectors.context import BoundaryState, KVConnectorSchedulerContext, Source
from ostinato.connectors.hooks import GuardedProbe, HookCaller
from ostinato.hierarchy.emission import Emitter
from ostinato.hierarchy.hierarchy import CacheHierarchy
from ostinato.ids import DEVICE, RequestId


def bind_connectors(connectors: Sequence[Connector], hierarchy: CacheHierarchy) -> KVConnectorSchedulerContext:
    """Let the connectors see the scheduler's blocks, and the hierarchy ask those that must be asked."""
    core = hierarchy.core
    context = make_context(hierarchy)
    for connector in connectors:
        if connector.capabilities.ownership is not Ownership.OWNED:
            core.asked[connector.tier] = GuardedProbe(connector, context.expire)
    caller = HookCaller(connectors, context)
    if caller.has_listeners:
        hierarchy.observers = (*hierarchy.observers, caller)
    return context


def make_context(hierarchy: CacheHierarchy) -> KVConnectorSchedulerContext:
    """The context of a hierarchy's connectors; one is enough for all of them."""
    core = hierarchy.core
    emitter = Emitter(core, hierarchy.requests, lambda: hierarchy.computed_step)

    def table(request_id: RequestId) -> BlockTable | None:
        request = hierarchy.requests.get(request_id)
        return request.table if request is not None else None

    def chain(request_id: RequestId) -> KeyChain | None:
        request = hierarchy.requests.get(request_id)
        return request.chain if request is not None else None

    def states() -> tuple[BoundaryState, ...]:
        found = []
        for request_id, entry in hierarchy.handed_over:
            place = entry.places.get(DEVICE)
            if place is not None and place.ready:
                unit = core.layout.groups[entry.key.group].hash_unit
                found.append(BoundaryState(request_id, entry.key.group, (entry.ordinal + 1) * unit, place.slot))
        return tuple(found)

    return KVConnectorSchedulerContext(
        Source(table, states, emitter.emit, chain),
        core.device.pool,
        core.device.retention,
        core.directory,
        core.book.world_size,
    )
