"""Between the core's ports and connectors: nothing that a connector does may hurt the engine.

Owns: the translation of the hierarchy's ports into calls of connectors, and the end of their borrows after each call.
A connector without hooks is not in any list.  An exception is the connector's fault: it is logged, a hook's connector
gets no further hooks, and a question that raised or was answered wrongly counts as *holds nothing*.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ostinato.cache.keys import BlockKey
from ostinato.connectors.api import Connector, Hook
from ostinato.connectors.context import KVConnectorSchedulerContext
from ostinato.ids import RequestId, Step, TierId

log: Final = logging.getLogger(__name__)


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

    def on_admit(self, request_id: RequestId, tokens: int) -> None:
        self._call(Hook.ADMIT, lambda connector: connector.on_admit(request_id, tokens))

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


class GuardedProbe:
    """An asked connector as the hierarchy's :class:`~ostinato.cache.ports.Probe`."""

    def __init__(self, connector: Connector, expire: Callable[[], None]) -> None:
        self._connector = connector
        self._expire = expire

    @property
    def tier(self) -> TierId:
        return self._connector.tier

    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        return self._ask("probe", self._connector.probe, keys)

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        answer = self._ask("offer", self._connector.offer, keys)
        return [False] * len(keys) if answer is None else answer

    def refuted(self, keys: Sequence[BlockKey]) -> None:
        try:
            self._connector.refuted(keys)
        except Exception:
            log.exception("connector %s failed in refuted()", self.tier)
        finally:
            self._expire()

    def remove(self, keys: Sequence[BlockKey]) -> bool | None:
        try:
            return self._connector.remove(keys)
        except Exception:
            log.exception("connector %s failed in remove(); counted as unable to delete", self.tier)
            return False
        finally:
            self._expire()

    def _ask(
        self, what: str, call: Callable[[Sequence[BlockKey]], Sequence[bool] | None], keys: Sequence[BlockKey]
    ) -> Sequence[bool] | None:
        try:
            answer = call(keys)
            if answer is None or len(answer) == len(keys):
                return answer
            log.error("connector %s answered %s() of %d keys with %d", self.tier, what, len(keys), len(answer))
        except Exception:
            log.exception("connector %s failed in %s(); counted as holding nothing", self.tier, what)
        finally:
            self._expire()
        return [False] * len(keys)


def close_all(connectors: Iterable[Connector]) -> None:
    """Stop connectors whose movers are closed."""
    for connector in connectors:
        try:
            connector.close()
        except Exception:
            log.exception("connector %s failed in close()", connector.tier)
