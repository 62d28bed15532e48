"""The fake engine over real asked tiers: a store in this process behind the real threads, records and breakers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from connectors.memory_store import IDENTITY, MemoryConnector, MemoryStore, eventually
from field.rig import FakeWorker, Rig, fake_rig
from ostinato.cache.layout import CacheLayout
from ostinato.connectors.api import Connector, Site
from ostinato.engine.outputs import RequestOutput


@contextmanager
def real_rig(layout: CacheLayout, pages: int, tiers: Sequence[Connector], **options: Any) -> Iterator[Rig]:
    """Tiers with threads of their own; the engine waits for them in real time, its deadlines are in virtual time."""
    for tier in tiers:
        tier.open(Site(layout, IDENTITY))
    rig = fake_rig(layout, pages, tiers, **options)  # type: ignore[arg-type]
    worker: Any = rig.engine.executor
    assert isinstance(worker, FakeWorker)
    worker.wait = lambda timeout: bool(time.sleep(0.0005))  # type: ignore[method-assign, func-returns-value]
    try:
        yield rig
    finally:
        for tier in tiers:
            open_gates(tier)
        worker.close()
        for tier in tiers:
            tier.close()


def open_gates(tier: Connector) -> None:
    store = getattr(tier, "memory", None)
    for gate in store.gates.values() if isinstance(store, MemoryStore) else ():
        gate.set()


def settle(rig: Rig) -> None:
    """Every transfer ends."""

    def is_over() -> bool:
        rig.step()
        return not len(rig.cache.core.book)

    eventually(is_over)


def ask(rig: Rig, tokens: Sequence[int], count: int = 1, salt: str = "") -> RequestOutput:
    """One request from start to end, and every transfer that it caused."""
    name = rig.add(tokens, count, salt=salt)
    rig.run(patience=20_000)
    settle(rig)
    return rig.outputs[name]


def evict_device(rig: Rig) -> None:
    rig.step()
    settle(rig)
    rig.cache.core.drop_idle(device_only=True)


__all__ = ["MemoryConnector", "MemoryStore", "ask", "evict_device", "real_rig", "settle"]
