"""A connector that passes every call on to another one: the base of wrappers.

Owns: nothing.  A wrapper overrides what it changes; the scheduler context reaches the inner connector unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ostinato.cache.keys import BlockKey
from ostinato.connectors.api import Connector, DevicePages, Mover, Site
from ostinato.connectors.context import KVConnectorSchedulerContext
from ostinato.ids import RequestId, Step


class ForwardingConnector(Connector):
    """``inner`` under the same name, with the same capabilities."""

    def __init__(self, inner: Connector) -> None:
        self.capabilities = inner.capabilities
        self.inner = inner

    def open(self, site: Site) -> None:
        self.inner.open(site)

    def make_mover(self, device: DevicePages, notify: Callable[[], None]) -> Mover:
        return self.inner.make_mover(device, notify)

    def slots(self, page_bytes: int) -> int:
        return self.inner.slots(page_bytes)

    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        return self.inner.probe(keys)

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return self.inner.offer(keys)

    def refuted(self, keys: Sequence[BlockKey]) -> None:
        self.inner.refuted(keys)

    def remove(self, keys: Sequence[BlockKey]) -> bool | None:
        return self.inner.remove(keys)

    def bind(self, context: KVConnectorSchedulerContext) -> None:
        self.inner.bind(context)

    def on_admit(self, request_id: RequestId, tokens: int) -> None:
        self.inner.on_admit(request_id, tokens)

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        self.inner.on_commit(request_id, computed)

    def on_release(self, request_id: RequestId) -> None:
        self.inner.on_release(request_id)

    def on_step_end(self, step: Step) -> None:
        self.inner.on_step_end(step)

    def close(self) -> None:
        self.inner.close()
