"""Reports about stores that are down, slow, full or absent, and about their end."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from typing import Any

import pytest

from connectors.memory_store import LOAD, LOOKUP, STORE, MemoryConnector, MemoryStore, eventually, timed
from field.rig import expected_tokens, layout_of, pins
from field.stores import ask, evict_device, real_rig, settle
from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import Full, Window
from ostinato.connectors import store, store_mover
from ostinato.connectors.hooks import close_all
from ostinato.connectors.host import HostConnector
from ostinato.connectors.registry import make_connector
from ostinato.errors import ConfigError, ConnectorError

FULL = layout_of(Full())
SMALL = layout_of(Full(), Window(32))


def session(number: int, length: int) -> list[int]:
    return [number * 10_000 + position for position in range(length)]


def memory() -> MemoryConnector:
    return MemoryConnector(MemoryStore())


def host() -> HostConnector:
    return HostConnector(128 << 10)


# ------------------------------------------------------------------------------------------------- stores in trouble


def test_f06_a_store_that_is_down_for_thirty_requests() -> None:
    """F06, LMCache#1491: the store is down, the engine is stuck or dies.

    Right: all are answered; the breaker opens after some errors, tries again by one call, and hits return.
    """
    breakers, clock = timed()
    tier = MemoryConnector(MemoryStore(), breakers=breakers)
    with real_rig(FULL, 60, [tier], audited=False) as rig:
        ask(rig, session(1, 64))
        evict_device(rig)
        tier.memory.broken = {LOOKUP, LOAD, STORE}
        calls = len(tier.memory.calls)
        for number in range(30):
            tokens = [*session(1 + number % 3, 64), number]
            assert ask(rig, tokens).outputs[0].token_ids == expected_tokens(tokens, 1)
            evict_device(rig)
            tier._answers._known.clear()
            clock.now += 0.1
        assert len(tier.memory.calls) - calls <= 2 * (3 + 3), "three failures of each kind, then a trial per pause"
        assert breakers.lookup.is_open
        tier.memory.broken = set()
        clock.now += 31.0
        ask(rig, session(9, 64))  # the trials
        evict_device(rig)
        assert ask(rig, [*session(1, 64), 5]).cached_tokens == 64
        rig.check_quiet()


def test_f12_one_tier_fails_to_close(caplog: pytest.LogCaptureFixture) -> None:
    """F12, vllm PR#52290: one tier's error at shutdown leaves the others using freed memory.

    Right: the others are closed, and it is told once.
    """

    class Bad(MemoryConnector):
        def close(self) -> None:
            super().close()
            raise RuntimeError("it broke")

    tiers = [Bad(MemoryStore()), memory(), host()]
    with real_rig(FULL, 60, tiers[:2]) as rig:
        ask(rig, session(1, 64))
        worker: Any = rig.engine.executor
        worker.close()
        close_all(tiers)
        told = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(told) == 1
        assert "close" in told[0].getMessage()
        tiers[0].close = lambda: None  # type: ignore[method-assign]
        for tier in tiers[:2]:
            assert isinstance(tier, MemoryConnector)
            assert tier.memory.opened == tier.memory.closed


def test_l06_an_abort_while_the_store_is_asked() -> None:
    """L06, vllm#44100: the state of a look-up leaks when the request is aborted before it got blocks.

    Right: no locks, no request state left.
    """
    tier = memory()
    with real_rig(FULL, 60, [tier]) as rig:
        ask(rig, session(1, 64))
        evict_device(rig)
        tier.memory.gates[LOOKUP].clear()
        tier.refuted([BlockKey(entry.key.group, entry.key.digest) for entry in rig.cache.core.directory])
        tier._answers._known.clear()
        names = [rig.add([*session(1, 64), number]) for number in range(5)]
        rig.step(3)
        assert "running" not in {rig.phase(name) for name in names}
        for name in names:
            rig.engine.abort(name)
        assert pins(rig) == 0
        tier.memory.gates[LOOKUP].set()
        eventually(lambda: not tier._answers._asked)
        rig.step()
        rig.check_quiet()
        assert not rig.engine.scheduler.requests
        assert ask(rig, [*session(1, 64), 5]).cached_tokens == 64


def test_l12_twenty_load_errors_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """L12, sglang PR#38352: each failed load leaves memory behind (tracebacks), and unarrived KV is answered with.

    Right: memory stays as it is, all requests are answered, nothing is held.
    """

    class LostError(ConnectionError):
        pass

    errors: list[weakref.ref[LostError]] = []

    def lose(kind: str, reply: Any) -> Any:
        if kind != LOAD:
            return reply
        error = LostError(bytearray(1 << 20))
        errors.append(weakref.ref(error))
        raise error

    breakers, clock = timed()
    tier = MemoryConnector(MemoryStore(), breakers=breakers)
    for module in (store, store_mover):
        monkeypatch.setattr(module.log, "disabled", True)  # a test's log keeps what it is given
    with real_rig(SMALL, 60, [tier], audited=False) as rig:
        ask(rig, session(1, 64))
        tier.memory.edit = lose
        for number in range(60):
            evict_device(rig)
            tokens = [*session(1, 64), number]
            assert ask(rig, tokens).outputs[0].token_ids == expected_tokens(tokens, 1)
            tier._answers._known.clear()
            clock.now += 31.0
            if len(errors) >= 20:
                break
        assert len(errors) >= 20
        gc.collect()
        assert not any(error() for error in errors)
        tier.memory.edit = lambda kind, reply: reply
        settle(rig)
        rig.check_quiet()
        assert tier.memory.opened["records"] - tier.memory.closed["records"] <= 2


def test_d12_a_store_that_takes_long_and_a_new_request() -> None:
    """D12, vllm PR#45595: the engine blocks when its last request ends.  Right: a new one is computed at once."""
    tier = memory()
    with real_rig(FULL, 60, [tier]) as rig:
        tier.memory.gates[STORE].clear()
        rig.add(session(1, 64))
        rig.run(patience=100)
        rig.step()
        eventually(lambda: tier.memory.count(STORE))
        name, start = rig.add(session(2, 40)), time.perf_counter()
        rig.run(until=lambda: name in rig.outputs, patience=20_000)
        assert time.perf_counter() - start < 0.2
        assert len(rig.cache.core.book) >= 1


def test_d10_a_store_that_is_not_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """D10, dynamo#6032: a back end is not available, and transfers hang.

    Right: an error at start (what is missing is named), or to go on without it, with a warning.
    """
    for name, package in (("lmcache:tcp://127.0.0.1:5555", "lmcache"), ("mooncake:?master=127.0.0.1:1", "mooncake")):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises((ConfigError, ConnectorError), match=package):
            make_connector(name)

    class Absent(MemoryConnector):
        def open_directory(self, site: Any) -> Any:
            raise ConnectionRefusedError("nobody is there")

        open_records = open_directory

    with real_rig(FULL, 60, [Absent(MemoryStore())]) as rig:
        for _ in range(3):
            output = ask(rig, session(1, 64))
            assert output.outputs[0].token_ids == expected_tokens(session(1, 64), 1)
            evict_device(rig)
        assert "nobody is there" in caplog.text
