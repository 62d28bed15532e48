"""Real stores that die, hang, come back empty and fill up under 300 requests: nobody notices but by the time it takes.

Every request is answered, with the cold run's logits; the connector's share of a step stays small; memory stays.

``OSTINATO_CHAOS_HANG_SECONDS`` (5): how long a store hangs, e.g. ``20``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from e2e.support import assert_at_rest, greedy, make_llm, same, settle
from ostinato.engine.llm import LLM
from stores.conftest import Subject
from stores.redis_server import redis_server

pytestmark = pytest.mark.stores

HANG_S = float(os.environ.get("OSTINATO_CHAOS_HANG_SECONDS", "5"))
REQUESTS, SETTLED = 300, 100
"""Memory after all requests is compared with memory after the first of them."""
PROMPTS, LENGTHS = 24, (53, 85, 105)
P99_S, MOST_S = 0.002, 0.020
BLOCKED_S = 0.5
"""Time on the clock that tells a call that waits for the store (they have 1 s) from a busy machine."""
CONNECTOR = ("probe", "offer", "refuted", "on_admit", "on_commit", "on_release", "on_step_end")
MOVER = ("submit", "poll", "cancel")


@dataclass
class Store:
    """A server and what can be done to it.  ``fill`` and ``empty`` get the engine: some stores are filled through it.

    ``lend`` has this process touch the memory that it lends to the store, so that it counts from the beginning.
    """

    tier: str
    url: str
    kill: Callable[[], Any]
    start: Callable[[], Any]
    pause: Callable[[], Any]
    resume: Callable[[], Any]
    fill: Callable[[LLM], Any] = lambda llm: None
    empty: Callable[[LLM], Any] = lambda llm: None
    lend: Callable[[LLM], Any] = lambda llm: None


@dataclass
class Meter:
    """Seconds in the connector's code of each step: of this thread's processor, and on the clock."""

    processor: list[float] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)
    by_call: dict[str, float] = field(default_factory=dict)
    """The longest call of each name (processor)."""
    _now: tuple[float, float] = (0.0, 0.0)

    def wrap(self, owner: Any, names: tuple[str, ...]) -> None:
        for name in names:
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    def step(self, step: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> Any:
            self._now = (0.0, 0.0)
            try:
                return step()
            finally:
                self.processor.append(self._now[0])
                self.clock.append(self._now[1])

        return timed

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start, clock = time.thread_time(), time.perf_counter()
            try:
                return call(*arguments)
            finally:
                took, passed = time.thread_time() - start, time.perf_counter() - clock
                self._now = (self._now[0] + took, self._now[1] + passed)
                self.by_call[name] = max(took, self.by_call.get(name, 0.0))

        return timed


@contextmanager
def redis(folder: Path) -> Iterator[Store]:
    with redis_server(folder) as server:
        yield Store(
            "redis",
            server.url + "?timeout=1",
            server.kill,
            server.start,
            server.pause,
            server.resume,
            lambda llm: server.ask("CONFIG", "SET", "maxmemory", "1"),
            lambda llm: server.ask("CONFIG", "SET", "maxmemory", "0"),
        )


@contextmanager
def mooncake(folder: Path) -> Iterator[Store]:
    pytest.importorskip("mooncake", reason="pip install ostinato[mooncake]")
    from stores.mooncake_server import master, private_network

    def fill(llm: LLM) -> None:
        client: Any = llm.built.connectors[0]._opened()  # type: ignore[attr-defined]
        staging = client.take_staging()
        for number in range(64):
            client.store().put_from(f"filler{number}", staging.address, 1 << 20)
        client.give_staging(staging)

    def empty(llm: LLM) -> None:
        client: Any = llm.built.connectors[0]._opened()  # type: ignore[attr-defined]
        for number in range(64):
            client.store().remove(f"filler{number}")

    def lend(llm: LLM) -> None:
        fill(llm)
        empty(llm)

    with private_network(), master() as program:
        url = f"mooncake://{program.address}?segment=32MiB"
        yield Store("mooncake", url, program.kill, program.start, program.hang, program.resume, fill, empty, lend)


@contextmanager
def lmcache(folder: Path) -> Iterator[Store]:
    if importlib.util.find_spec("lmcache") is None:
        pytest.skip("lmcache is not installed (docs/stores/lmcache.md says how)")
    from stores.lmcache_server import LMCacheServer

    server = LMCacheServer(folder)
    try:
        yield Store("lmcache", server.url + "?timeout=1", server.kill, server.start, server.pause, server.resume)
    finally:
        server.kill()


STORES = {"redis": redis, "mooncake": mooncake, "lmcache": lmcache}


def tokens(count: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, 250) for _ in range(count)]


class Traffic:
    """Requests one after the other; the device is emptied between them, so that each asks the store."""

    def __init__(self, llm: LLM, subject: Subject, tier: str) -> None:
        self.done = 0
        self.reused = 0
        self.memory: dict[int, int] = {}
        self._llm = llm
        self._subject = subject
        self._tier = tier
        self._random = random.Random(11)

    def serve(self, count: int, over_s: float = 0.0) -> int:
        """``count`` requests, spread over ``over_s`` seconds at least; tokens that came from the store."""
        before, start = self.reused, time.monotonic()
        for number in range(count):
            prompt = tokens(self._random.choice(LENGTHS), self._random.randrange(PROMPTS))
            # A third of them nobody has asked before: the store is written to all the time.
            salt = f"salt {self.done}" if self._random.random() < 1 / 3 else ""
            output = self._llm.generate(prompt, greedy(4), cache_salt=salt)[0]
            assert same(output, self._subject.cold(prompt)), f"request {self.done}"
            self.reused += output.cached_by_tier.get(self._tier, 0)
            self._llm.built.hierarchy.core.drop_idle(device_only=True)
            self.done += 1
            if self.done in (SETTLED, REQUESTS):
                gc.collect()
                self.memory[self.done] = psutil.Process().memory_info().rss
            time.sleep(max(0.0, start + over_s * (number + 1) / count - time.monotonic()))
        return self.reused - before

    def until_hits(self, seconds: float = 75) -> None:
        """A store that failed again and again is left alone for up to 30 s, and hits need one that takes blocks."""
        until = time.monotonic() + seconds
        while not self.serve(1):
            assert time.monotonic() < until, f"hits do not return: {self._state()}"
            time.sleep(0.05)

    def _state(self) -> str:
        connector: Any = self._llm.built.connectors[0]
        held = {kind: getattr(connector.breakers, kind).is_open for kind in ("lookup", "load", "store")}
        jobs = [
            (job.order.kind.value, job.state.value, len(job.order.moves)) for job in self._llm.built.hierarchy.core.book
        ]
        return f"held back {held}, {connector._traffic.backlog_bytes} bytes on their way, jobs {jobs}"


def engine(subject: Subject, store: Store) -> LLM:
    return make_llm(subject.runtime, pages=120, kv=[store.url], max_num_batched_tokens=43)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """What the test runner consists of is not walked in the middle of a step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("subject", ["windowed"], indirect=True)
def test_chaos(subject: Subject, name: str, tmp_path: Path) -> None:
    for seed in range(PROMPTS):
        for length in LENGTHS:
            subject.cold(tokens(length, seed))
    meter = Meter()
    with STORES[name](tmp_path) as store, quiet_collector(), engine(subject, store) as llm:
        meter.wrap(llm.built.connectors[0], CONNECTOR)
        meter.wrap(llm.built.worker._movers[store.tier], MOVER)  # type: ignore[index]
        llm.built.engine.step = meter.step(llm.built.engine.step)  # type: ignore[method-assign]
        traffic = Traffic(llm, subject, store.tier)
        with contextlib.ExitStack() as repairs:
            repairs.callback(store.resume)
            hurt(store, llm, traffic)
        settle(llm)
        assert_at_rest(llm)
    report(name, traffic, meter)
    assert quantile(meter.processor, 0.99) <= P99_S, meter.by_call
    assert max(meter.processor) <= MOST_S, meter.by_call
    assert max(meter.clock) <= BLOCKED_S
    assert traffic.memory[REQUESTS] <= 1.02 * traffic.memory[SETTLED], traffic.memory


def hurt(store: Store, llm: LLM, traffic: Traffic) -> None:
    """At least REQUESTS requests; between the blows the store is used again, or the next one would hit nobody."""
    store.lend(llm)
    traffic.serve(SETTLED)
    assert traffic.reused > 0
    store.kill()
    traffic.serve(40, over_s=2)
    store.start()  # empty
    traffic.serve(10)
    traffic.until_hits()
    store.pause()
    traffic.serve(60, over_s=HANG_S)
    store.resume()
    traffic.until_hits()
    store.fill(llm)
    traffic.serve(40)
    store.empty(llm)
    store.kill()
    store.start()
    traffic.until_hits()
    traffic.serve(max(1, REQUESTS - traffic.done))


def report(name: str, traffic: Traffic, meter: Meter) -> None:
    p99, most, clock = quantile(meter.processor, 0.99), max(meter.processor), max(meter.clock)
    grown = traffic.memory[REQUESTS] / traffic.memory[SETTLED] - 1
    calls = ", ".join(f"{call} {seconds * 1e3:.2f}" for call, seconds in sorted(meter.by_call.items()))
    print(
        f"\n{name}: {traffic.done} requests, {traffic.reused} tokens from the store; connector code per step: "
        f"p99 {p99 * 1e3:.2f} ms, most {most * 1e3:.2f} ms ({clock * 1e3:.1f} ms on the clock); longest calls in ms: "
        f"{calls}; memory {grown:+.2%}"
    )
