"""Calls the hooks that connectors declare, and ends their borrows.

Owns: the translation from the hierarchy's observer port to connectors.  A connector without hooks is not in any list.
An exception in a hook is the connector's fault: it is logged once, and that connector gets no further hooks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from ostinato.connectors.api import Connector, Hook
from ostinato.connectors.context import KVConnectorSchedulerContext
from ostinato.ids import RequestId, Step

log = logging.getLogger(__name__)


class HookCaller:
    """The hierarchy's observer."""

    def __init__(self, connectors: Iterable[Connector], context: KVConnectorSchedulerContext) -> None:
        self._context = context
        self._listeners: dict[Hook, list[Connector]] = {hook: [] for hook in Hook}
        for connector in connectors:
            connector.bind(context)
            for hook in connector.capabilities.hooks:
                self._listeners[hook].append(connector)

    @property
    def has_listeners(self) -> bool:
        return any(self._listeners.values())

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        self._call(Hook.COMMIT, lambda connector: connector.on_commit(request_id, computed))

    def on_release(self, request_id: RequestId) -> None:
        self._call(Hook.RELEASE, lambda connector: connector.on_release(request_id))

    def on_step_end(self, step: Step) -> None:
        self._call(Hook.STEP_END, lambda connector: connector.on_step_end(step))

    def _call(self, hook: Hook, call: Callable[[Connector], None]) -> None:
        for connector in list(self._listeners[hook]):
            try:
                call(connector)
            except Exception:
                log.exception("connector %s failed in its %s hook; its hooks are off now", connector.tier, hook.value)
                for listeners in self._listeners.values():
                    if connector in listeners:
                        listeners.remove(connector)
            finally:
                self._context.expire()
