"""A real Redis server: every request is answered, and equal to the cold one, whatever happens to the server.

Bytes that another client puts in the place of ours are found; another engine of the same model uses what is stored.
"""

from __future__ import annotations

import random
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from connectors.memory_store import IDENTITY
from e2e.support import assert_at_rest, greedy, make_llm, same, settle
from field.rig import Rig, expected_tokens, fake_rig, layout_of
from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import Full, Window
from ostinato.connectors.answers import Answers
from ostinato.connectors.api import Site
from ostinato.connectors.records import Record, record_name
from ostinato.connectors.redis import RedisConnector, RedisStore
from ostinato.connectors.redis_wire import RedisAddress, RedisError, RedisWire
from ostinato.connectors.registry import make_connector
from ostinato.connectors.store import StoreConnector
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.ids import GroupId
from stores.conftest import Subject
from stores.redis_server import RedisServer, free_port, redis_server

pytestmark = pytest.mark.stores
LENGTH = 105
WHOLE = 96
"""Tokens of whole units in a prompt of LENGTH, less the last token."""


def tokens(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, 256) for _ in range(count)]


def connector_of(llm: LLM) -> StoreConnector:
    found = llm.built.connectors[0]
    assert isinstance(found, StoreConnector)
    return found


def ask(llm: LLM, prompt: Sequence[int], count: int = 4) -> RequestOutput:
    output = llm.generate(list(prompt), greedy(count))[0]
    settle(llm)
    return output


def forget(llm: LLM) -> None:
    """Empty the device, and the memory of answers."""
    llm.reset_prefix_cache(device_only=True)
    connector_of(llm)._answers = Answers(time.monotonic)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@contextmanager
def engine(subject: Subject, url: str, **options: Any) -> Iterator[LLM]:
    with make_llm(subject.runtime, kv=[url], max_num_batched_tokens=43, **options) as llm:
        yield llm
        settle(llm)
        assert_at_rest(llm)


# ----------------------------------------------------------------------------------------------- one connection


def batch_of(count: int, size: int) -> tuple[list[Record], bytearray]:
    memory = bytearray(random.Random(1).randbytes(count * size))
    view = memoryview(memory)
    records = []
    for index in range(count):
        key = BlockKey(GroupId(1), index.to_bytes(32, "big"))
        trailer = bytearray(random.Random(index).randbytes(192))
        records.append(Record(record_name(key), key, view[index * size : (index + 1) * size], trailer))
    return records, memory


def address(server: RedisServer, **options: Any) -> RedisAddress:
    return RedisAddress(port=server.port, **options)


@pytest.mark.parametrize("size", [0, 1, 4000, 1 << 20])
@pytest.mark.parametrize("unix", [False, True])
def test_records_come_back(redis: RedisServer, size: int, unix: bool) -> None:
    where = RedisAddress(path=str(redis.socket)) if unix else address(redis)
    store = RedisStore(RedisWire(where, 10.0))
    batch, memory = batch_of(7, size)
    before, trailers = bytes(memory), [bytes(record.trailer) for record in batch]
    names = [record.name for record in batch]
    assert store.contains(names) == [False] * 7
    assert store.load(batch) == [False] * 7
    assert bytes(memory) == before
    assert store.store(batch[:6]) == [True] * 6
    memory[:] = bytes(len(memory))
    for record in batch:
        record.trailer[:] = bytes(192)
    assert store.contains(names) == [True] * 6 + [False]
    assert store.load(batch) == [True] * 6 + [False]
    assert bytes(memory) == before[: 6 * size] + bytes(size)
    assert [bytes(record.trailer) for record in batch[:6]] == trailers[:6]
    store.close()


def test_prefix_and_time_to_live(redis: RedisServer) -> None:
    batch, _ = batch_of(2, 10)
    store = RedisStore(RedisWire(address(redis), 5.0), "mine:", 90)
    assert store.store(batch) == [True, True]
    key = b"mine:" + batch[1].name.encode()
    assert key in redis.names()
    assert 80 < int(redis.ask("TTL", key)[1:]) <= 90
    other = RedisStore(RedisWire(address(redis), 5.0))
    assert other.contains([batch[1].name]) == [False]
    assert other.store(batch[:1]) == [True]
    assert redis.ask("TTL", batch[0].name) == b":-1\r\n"
    for one in (store, other):
        one.close()


def test_databases_are_apart(redis: RedisServer) -> None:
    batch, _ = batch_of(1, 10)
    stores = [RedisStore(RedisWire(address(redis, db=db), 5.0)) for db in (0, 5)]
    assert stores[1].store(batch) == [True]
    assert [store.contains([batch[0].name]) for store in stores] == [[False], [True]]
    for store in stores:
        store.close()
    with pytest.raises(RedisError, match="ERR"):
        RedisWire(address(redis, db=10_000), 5.0)


def test_passwords(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "s3cr3t") as server:
        with pytest.raises(RedisError, match=r"NOAUTH.*OSTINATO_REDIS_PASSWORD"):
            RedisStore(RedisWire(address(server), 5.0)).contains(["x"])
        with pytest.raises(RedisError, match="WRONGPASS"):
            RedisWire(address(server, password="wr0ng"), 5.0)
        for user in ("", "default"):
            store = RedisStore(RedisWire(address(server, user=user, password="s3cr3t"), 5.0))
            assert store.contains(["x"]) == [False]
            store.close()


def test_other_types_and_lengths_are_misses(redis: RedisServer) -> None:
    batch, memory = batch_of(4, 50)
    store = RedisStore(RedisWire(address(redis), 5.0))
    assert store.store(batch) == [True] * 4
    before = bytes(memory)
    redis.ask("DEL", batch[0].name)
    redis.ask("LPUSH", batch[0].name, "a", "list")
    redis.ask("SET", batch[1].name, "short")
    redis.ask("SET", batch[2].name, b"x" * 3_000_000)
    assert store.contains([record.name for record in batch]) == [True] * 4
    assert store.load(batch) == [False, False, False, True]
    assert bytes(memory) == before
    assert store.store(batch) == [True] * 4
    assert store.load(batch) == [True] * 4
    store.close()


def test_a_full_server_takes_nothing_and_still_delivers(redis: RedisServer) -> None:
    batch, _ = batch_of(8, 1 << 20)
    store = RedisStore(RedisWire(address(redis), 10.0))
    assert store.store(batch[:2]) == [True, True]
    redis.ask("CONFIG", "SET", "maxmemory", "1mb")
    assert store.store(batch[2:]) == [False] * 6
    assert store.load(batch[:3]) == [True, True, False]
    store.close()


def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl in PATH")
    certificate, private, port = tmp_path / "tls.crt", tmp_path / "tls.key", free_port()
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=DNS:localhost", "-out", str(certificate), "-keyout", str(private)]
    subprocess.run(words, check=True, capture_output=True)
    options = ["--tls-port", str(port), "--tls-auth-clients", "no", "--tls-cert-file", str(certificate)]
    options += ["--tls-key-file", str(private), "--tls-ca-cert-file", str(certificate)]
    with redis_server(tmp_path, *options):
        connector = make_connector(f"rediss://localhost:{port}?ca={certificate}")
        assert isinstance(connector, RedisConnector)
        store = RedisStore(RedisWire(connector.address, 10.0))
        batch, memory = batch_of(3, 1 << 20)
        before = bytes(memory)
        assert store.store(batch) == [True] * 3
        memory[:] = bytes(len(memory))
        assert store.load(batch) == [True] * 3
        assert bytes(memory) == before
        store.close()
        with pytest.raises(ssl.SSLError, match="verify"):
            RedisWire(RedisAddress("localhost", port, tls=True), 5.0)


# ------------------------------------------------------------------------------------------------------- end to end


@pytest.mark.parametrize("unix", [False, True])
def test_what_the_device_forgot_comes_back(subject: Subject, redis: RedisServer, unix: bool) -> None:
    prompt = tokens(LENGTH)
    with engine(subject, redis.unix_url if unix else redis.url) as llm:
        assert same(ask(llm, prompt), subject.cold(prompt))
        assert redis.names()
        for _ in range(3):
            forget(llm)
            output = ask(llm, prompt)
            assert same(output, subject.cold(prompt))
            assert output.cached_tokens == WHOLE
            assert set(output.cached_by_tier) == {"redis"}
            assert output.bytes_loaded > 0
        device = ask(llm, prompt)
        assert set(device.cached_by_tier) == {"device"}
        longer = prompt + tokens(40, seed=1)
        forget(llm)
        output = ask(llm, longer)
        assert same(output, subject.cold(longer))
        assert output.cached_by_tier["redis"] >= WHOLE


def test_a_chat_continues_on_another_engine(subject: Subject, redis: RedisServer) -> None:
    """The second engine hits what the first one stored, and the other way round."""
    turn = tokens(60)
    with engine(subject, redis.url) as first, engine(subject, redis.url) as second:
        for number in range(4):
            llm = (first, second)[number % 2]
            output = ask(llm, turn, 20)
            assert same(output, subject.cold(turn, 20))
            if number:
                assert output.cached_by_tier.get("redis", 0) > 0
                assert output.cached_tokens >= (len(turn) - 10) // 16 * 16 - 16
            turn = turn + list(output.outputs[0].token_ids) + tokens(9, seed=number)


def test_another_models_records_are_never_used(windowed: Subject, redis: RedisServer) -> None:
    from dataclasses import replace

    identity = replace(windowed.runtime.identity, weights=b"w" * 32)
    other = replace(windowed.runtime, identity=identity)
    prompt = tokens(LENGTH)
    with engine(windowed, redis.url) as llm:
        ask(llm, prompt)
    with engine(Subject("other", other, windowed.cold), redis.url) as llm:
        output = ask(llm, prompt)
        assert output.cached_tokens == 0
        assert not connector_of(llm).faults


def test_records_under_wrong_names_are_never_used(windowed: Subject, redis: RedisServer) -> None:
    """Even if all names were those of another model's records: the trailer says whose they are."""
    prompt = tokens(LENGTH)
    with engine(windowed, redis.url) as llm:
        ask(llm, prompt)
        ours = sorted(redis.names())
        values = [redis.value(key) for key in ours]
        for key, value in zip(ours, values[1:] + values[:1], strict=True):
            redis.ask("SET", key, value)
        forget(llm)
        output = ask(llm, prompt)
        assert same(output, windowed.cold(prompt))
        assert output.cached_tokens == 0
        assert sum(connector_of(llm).faults.values()) > 0


@pytest.mark.parametrize("place", ["payload", "trailer", "truncated", "extended", "type"])
def test_changed_bytes_are_found_and_counted(subject: Subject, redis: RedisServer, place: str) -> None:
    prompt = tokens(LENGTH)
    with engine(subject, redis.url) as llm:
        ask(llm, prompt)
        for key in redis.names():
            value = bytearray(redis.value(key))
            if place == "payload":
                value[len(value) // 3] ^= 0x10
            elif place == "trailer":
                value[-100] ^= 0x10
            elif place == "truncated":
                value = value[:-1]
            elif place == "extended":
                value += b"\0"
            redis.ask("DEL", key)
            redis.ask("LPUSH", key, "x") if place == "type" else redis.ask("SET", key, bytes(value))
        forget(llm)
        output = ask(llm, prompt)
        assert same(output, subject.cold(prompt))
        assert output.cached_tokens == 0
        if place in ("payload", "trailer"):
            assert sum(connector_of(llm).faults.values()) > 0
        # What was computed again replaced what was wrong.
        forget(llm)
        output = ask(llm, prompt)
        assert same(output, subject.cold(prompt))
        assert output.cached_tokens == WHOLE


def test_holes_shorten_the_hit(subject: Subject, redis: RedisServer) -> None:
    """As allkeys-lru drops: any record of the chain."""
    prompt = tokens(LENGTH)
    source = random.Random(3)
    with engine(subject, redis.url) as llm:
        reused = set()
        for _ in range(6):
            ask(llm, prompt)
            for key in source.sample(redis.names(), 2):
                redis.ask("DEL", key)
            forget(llm)
            output = ask(llm, prompt)
            assert same(output, subject.cold(prompt))
            reused.add(output.cached_tokens)
        assert len(reused) > 1
        assert not connector_of(llm).faults


# ------------------------------------------------------------------------------------------------- a failing server


def serve_for(llm: LLM, subject: Subject, seconds: float, seeds: int = 5) -> tuple[float, int]:
    """Requests one after the other, the device emptied between them: the longest one's time, and tokens from Redis."""
    until, longest, reused = time.monotonic() + seconds, 0.0, 0
    source = random.Random(5)
    while time.monotonic() < until:
        prompt = tokens(LENGTH, source.randrange(seeds))
        start = time.monotonic()
        output = llm.generate(list(prompt), greedy(4))[0]
        longest = max(longest, time.monotonic() - start)
        assert same(output, subject.cold(prompt))
        reused += output.cached_by_tier.get("redis", 0)
        llm.built.hierarchy.core.drop_idle(device_only=True)
    return longest, reused


def warm(subject: Subject, seeds: int = 5) -> None:
    for seed in range(seeds):
        subject.cold(tokens(LENGTH, seed))


def restart_empty(server: RedisServer) -> None:
    server.kill()
    server.start()


EVENTS: dict[str, Callable[[RedisServer], Any]] = {
    "killed": RedisServer.kill,
    "paused": RedisServer.pause,
    "restarted": restart_empty,
    "flushed": lambda server: server.ask("FLUSHALL"),
    "full": lambda server: server.ask("CONFIG", "SET", "maxmemory", "1"),
    "evicting": lambda server: [
        server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"),
        server.ask("CONFIG", "SET", "maxmemory", "2mb"),
    ],
    "replica": lambda server: server.ask("REPLICAOF", "127.0.0.1", "1"),
}
REPAIRS: dict[str, Callable[[RedisServer], Any]] = {
    "killed": RedisServer.start,
    "paused": RedisServer.resume,
    "full": lambda server: server.ask("CONFIG", "SET", "maxmemory", "0"),
    "evicting": lambda server: server.ask("CONFIG", "SET", "maxmemory", "0"),
    "replica": lambda server: server.ask("REPLICAOF", "NO", "ONE"),
}
TRACES = {"killed": "Connection refused", "paused": "timed out", "full": "it is full", "replica": "READONLY"}
"""What the log says when the event came to pass."""


@pytest.mark.parametrize("event", EVENTS)
def test_every_request_is_answered_whatever_happens(
    windowed: Subject, redis: RedisServer, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    warm(windowed, 12)
    with engine(windowed, redis.url + "?timeout=1") as llm:
        serve_for(llm, windowed, 1.0)
        assert serve_for(llm, windowed, 1.0)[1] > 0
        timer = threading.Timer(0.3, EVENTS[event], (redis,))
        timer.start()
        longest, _ = serve_for(llm, windowed, 5.0, seeds=12)
        timer.join()
        assert TRACES.get(event, "") in caplog.text
        assert longest < 4.0
        REPAIRS.get(event, lambda server: None)(redis)
        deadline = time.monotonic() + 30
        while not serve_for(llm, windowed, 1.0)[1]:
            assert time.monotonic() < deadline, "hits do not return"


def test_a_server_that_is_down_from_the_start(windowed: Subject, redis: RedisServer) -> None:
    warm(windowed)
    redis.kill()
    with engine(windowed, redis.url) as llm:
        longest, reused = serve_for(llm, windowed, 2.0)
        assert longest < 1.0
        assert not reused
        assert connector_of(llm).breakers.lookup.trips > 0
        redis.start()
        deadline = time.monotonic() + 30
        while not serve_for(llm, windowed, 1.0)[1]:
            assert time.monotonic() < deadline, "hits do not come"


def test_closing_while_the_server_hangs(windowed: Subject, redis: RedisServer) -> None:
    with make_llm(windowed.runtime, kv=[redis.url + "?timeout=1"]) as llm:
        ask(llm, tokens(LENGTH))
        redis.pause()
        llm.generate(tokens(LENGTH, 1), greedy(4))
        start = time.monotonic()
        llm.close()
        assert time.monotonic() - start < 3.0


# ------------------------------------------------------------------- the checked fake worker, many requests at once


def rig_over(connector: RedisConnector, pages: int = 60) -> Rig:
    layout = layout_of(Full(), Window(40))
    connector.open(Site(layout, IDENTITY))
    return fake_rig(layout, pages, [connector])  # type: ignore[list-item]


def drive(rig: Rig, seconds: float = 60) -> None:
    """Step in real time until no request is alive and no transfer open."""
    until = time.monotonic() + seconds
    while rig.engine.has_work or len(rig.cache.core.book):
        rig.clock.now = time.monotonic()
        rig.step()
        time.sleep(0.0005)
        assert time.monotonic() < until, rig.dump()


@pytest.mark.parametrize("seed", range(3))
def test_much_traffic_while_others_drop_and_change_records(redis: RedisServer, seed: int) -> None:
    """Every unit that is read is checked by the worker; here also against two engines that share the server."""
    source = random.Random(seed)
    connectors = [make_connector(redis.url + "?timeout=5") for _ in range(2)]
    rigs = [rig_over(connector) for connector in connectors]  # type: ignore[arg-type]
    stems = [tokens(200, 100 + stem) for stem in range(4)]
    expected: dict[tuple[int, str], tuple[int, ...]] = {}
    for _ in range(12):
        for which, rig in enumerate(rigs):
            for _ in range(6):
                prompt = source.choice(stems)[: source.randrange(20, 200)] + tokens(source.randrange(1, 30))
                expected[which, rig.add(prompt, 3)] = expected_tokens(prompt, 3)
        for rig in rigs:
            drive(rig)
            rig.cache.core.drop_idle(device_only=True)
        for key in source.sample(redis.names(), 6):
            value = bytearray(redis.value(key))
            value[source.randrange(len(value))] ^= 1 << source.randrange(8)
            redis.ask(*source.choice([("DEL", key), ("SET", key, bytes(value)), ("SET", key, "x")]))
    for (which, name), answer in expected.items():
        assert rigs[which].outputs[name].outputs[0].token_ids == answer
    hits = sum(output.cached_by_tier.get("redis", 0) for rig in rigs for output in rig.outputs.values())
    assert hits > 1000
    assert sum(sum(connector.faults.values()) for connector in connectors) > 0  # type: ignore[attr-defined]
    for rig, connector in zip(rigs, connectors, strict=True):
        rig.cache.audit()
        rig.engine.close()
        connector.close()
