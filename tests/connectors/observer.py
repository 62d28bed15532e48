"""A connector that looks at everything it is allowed to see, in every hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from core.builders import make_pool
from field.rig import Rig, fake_rig, layout_of
from field.scripted import ScriptedTier
from ostinato.cache.kinds import Full, Window
from ostinato.connectors.api import Hook
from ostinato.connectors.context import KVConnectorSchedulerContext, Source
from ostinato.ids import RequestId, SlotId, Step

LAYOUT = layout_of(Full(), Window(32))
NAMES = [RequestId(f"r{number}") for number in range(8)]


def session(number: int, length: int) -> list[int]:
    return [number * 10_000 + position for position in range(length)]


class Observer(ScriptedTier):
    """Notes every call with what it sees of some requests, and runs ``act`` inside each."""

    def __init__(self, hooks: Sequence[Hook] = tuple(Hook), slots: int = 256) -> None:
        super().__init__(hooks=hooks, slots=slots)
        self.calls: list[tuple[str, Any]] = []
        self.seen: list[tuple[str, Any, dict[RequestId, list[list[SlotId]] | None]]] = []
        self.act: Callable[[str, Any], None] = lambda hook, subject: None

    def _note(self, hook: str, subject: Any) -> None:
        assert self.context is not None
        blocks = {name: self.context.blocks(name) for name in NAMES}
        rows = {name: None if views is None else [list(view) for view in views] for name, views in blocks.items()}
        self.calls.append((hook, subject))
        self.seen.append((hook, subject, rows))
        self.act(hook, subject)

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        self._note("commit", (request_id, computed))

    def on_release(self, request_id: RequestId) -> None:
        self._note("release", request_id)

    def on_step_end(self, step: Step) -> None:
        self._note("step_end", step)


def observed(slots: int = 100, **options: Any) -> tuple[Observer, Rig]:
    tier = Observer()
    return tier, fake_rig(LAYOUT, slots, [tier], **options)


def bare_context(slots: int = 8, ranks: int = 1) -> tuple[KVConnectorSchedulerContext, Any, Any]:
    pool, retention, directory = make_pool(slots)
    return KVConnectorSchedulerContext(Source({}.get), pool, retention, directory, ranks), pool, directory
