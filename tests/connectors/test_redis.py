"""Redis without a server: specifications, and a peer that says whatever the test wants, cut as the test wants."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ostinato.cache.keys import BlockKey
from ostinato.connectors.records import Record
from ostinato.connectors.redis import PASSWORD_VARIABLE, RedisConnector, RedisStore
from ostinato.connectors.redis_wire import BUFFER_BYTES, RedisAddress, RedisError, RedisWire
from ostinato.connectors.registry import make_connector
from ostinato.errors import ConfigError
from ostinato.ids import GroupId

# ------------------------------------------------------------------------------------------------------ specifications


def address_of(text: str) -> RedisAddress:
    connector = make_connector(text)
    assert isinstance(connector, RedisConnector)
    return connector.address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("redis", RedisAddress()),
        ("redis://10.0.0.1", RedisAddress("10.0.0.1")),
        ("redis://h:7000/3?ttl=60&prefix=a:&timeout=0.5", RedisAddress("h", 7000, db=3)),
        ("redis://h/?db=4", RedisAddress("h", db=4)),
        ("redis://[::1]:7000", RedisAddress("::1", 7000)),
        ("redis://u:p%40%2F@h", RedisAddress("h", user="u", password="p@/")),
        ("redis://:p@h", RedisAddress("h", password="p")),
        ("valkey://h", RedisAddress("h")),
        ("rediss://h:1?ca=/ca.pem", RedisAddress("h", 1, tls=True, ca="/ca.pem")),
        ("redis+unix:///run/r.sock?db=2", RedisAddress("", path="/run/r.sock", db=2)),
        ("redis+unix://:p@/run/r.sock", RedisAddress("", path="/run/r.sock", password="p")),
    ],
)
def test_addresses(text: str, address: RedisAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    assert address_of(text) == address


def test_the_password_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "s3cr3t")
    address = address_of("redis://user@h")
    assert (address.user, address.password) == ("user", "s3cr3t")
    assert "s3cr3t" not in f"{address} {address!r}"
    assert address_of("redis://:other@h").password == "other"


def test_the_tier_is_called_what_was_asked_for() -> None:
    assert make_connector("redis+unix:///r.sock").tier == make_connector("rediss://h").tier == "redis"
    assert make_connector("valkey://h").tier == "valkey"


@pytest.mark.parametrize(
    "text",
    [
        *("redis://", "redis:h", "redis://h:x", "redis://h:99999", "redis://h/a", "redis://h/1/2", "redis://h/1?db=2"),
        *("redis://h#x", "redis+unix://h/p", "redis+unix://", "redis+unix:///", "redis://h?ca=/x", "redis://h?tls=1"),
        *("redis://h?ttl=0", "redis://h?ttl=1.5", "redis://h?ttl=", "redis://h?timeout=0", "redis://h?timeout=nan"),
        *("redis://h?timeout=inf", "redis://h?prefix=a%20b", "redis://h?prefix=" + "x" * 65, "redis://h?db=-1"),
    ],
)
def test_mistakes_are_told(text: str) -> None:
    with pytest.raises(ConfigError, match="redis"):
        make_connector(text)


# ----------------------------------------------------------------------------------------------------------- the peer


class Peer:
    """Answers what it hears first with ``script``, ``cut`` bytes at a time, and then says nothing more, or hangs up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard = b""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._end = threading.Event()
        self._threads: list[threading.Thread] = []

    def wire(self, script: bytes, cut: int = 0, hang_up: bool = False, timeout_s: float = 5.0) -> RedisWire:
        thread = threading.Thread(target=self._serve, args=(script, cut, hang_up))
        thread.start()
        self._threads.append(thread)
        return RedisWire(RedisAddress(path=str(self.path)), timeout_s)

    def _serve(self, script: bytes, cut: int, hang_up: bool) -> None:
        link, _ = self._listener.accept()
        with link:
            self.heard = link.recv(1 << 20)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for start in range(0, len(script), cut or len(script) or 1):
                    link.sendall(script[start : start + (cut or len(script))])
                    time.sleep(0.0005 if cut else 0)
            if not hang_up:
                self._end.wait(10)

    def close(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    made = Peer(tmp_path / "peer")
    yield made
    made.close()


def records(*sizes: int) -> tuple[list[Record], bytearray]:
    """Records whose payloads lie in one memory with 8 bytes of guard around each."""
    memory = bytearray(b"\xee" * (8 + sum(size + 8 for size in sizes)))
    made, place = [], 8
    for index, size in enumerate(sizes):
        key = BlockKey(GroupId(0), bytes([index]) * 32)
        made.append(Record(f"n{index}", key, memoryview(memory)[place : place + size], bytearray(192)))
        place += size + 8
    return made, memory


def untouched(memory: bytearray, sizes: Sequence[int]) -> bool:
    """Whether all guards are what they were."""
    place, guards = 0, []
    for size in sizes:
        guards.append(memory[place : place + 8])
        place += 8 + size
    return all(guard == b"\xee" * 8 for guard in [*guards, memory[place:]])


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


def value(size: int, letter: bytes = b"v") -> bytes:
    return letter * size + b"t" * 192


@pytest.mark.parametrize("cut", [0, 1, 7, 1000])
def test_values_arrive_however_they_are_cut(peer: Peer, cut: int) -> None:
    sizes = (100, 0, 500, 3) if cut in (1, 7) else (100, BUFFER_BYTES - 192, BUFFER_BYTES, 3 * BUFFER_BYTES + 1, 5)
    batch, memory = records(*sizes)
    wire = peer.wire(b"".join(bulk(value(size)) for size in sizes), cut)
    assert RedisStore(wire).load(batch) == [True] * len(sizes)
    assert all(bytes(record.payload) == b"v" * size for record, size in zip(batch, sizes, strict=True))
    assert all(record.trailer == b"t" * 192 for record in batch)
    assert untouched(memory, sizes)
    assert peer.heard.startswith(b"*2\r\n$3\r\nGET\r\n$2\r\nn0\r\n*2")
    wire.close()


def test_what_is_not_a_record_is_a_miss_and_the_next_one_is_not_harmed(peer: Peer) -> None:
    sizes = (10,) * 7
    batch, memory = records(*sizes)
    script = bulk(value(10)) + b"$-1\r\n" + bulk(b"") + bulk(value(9)) + bulk(value(100_000))
    script += b"-WRONGTYPE Operation against a key\r\n" + bulk(value(10, b"w"))
    wire = peer.wire(script)
    assert RedisStore(wire).load(batch) == [True, False, False, False, False, False, True]
    assert bytes(batch[6].payload) == b"w" * 10
    assert all(bytes(record.payload) == b"\xee" * 10 for record in batch[1:6])
    assert untouched(memory, sizes)
    wire.close()


GARBAGE = [
    *(
        b"garbage\r\n",
        b"\r\n",
        b"$\r\n",
        b"$x\r\n",
        b"$-2\r\n",
        b"$1e3\r\n",
        b":1\r\n",
        b"+OK\r\n",
        b"*1\r\n$1\r\nx\r\n",
    ),
    *(b"$99999999999999999999\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"x" * 3 * BUFFER_BYTES, b"\0" * 100),
    bulk(value(10))[:-2] + b"more than announced\r\n",
    *(b"-LOADING Redis is loading\r\n", b"-NOAUTH Authentication required.\r\n", b"-MOVED 3999 127.0.0.1:6381\r\n"),
    *(b"-OOM not for a read\r\n", b"-\r\n", b"-lower case\r\n"),
]


@pytest.mark.parametrize("script", GARBAGE)
def test_garbage_raises_and_writes_nowhere_else(peer: Peer, script: bytes) -> None:
    batch, memory = records(10, 10)
    wire = peer.wire(script + bulk(value(10)), hang_up=True)
    with pytest.raises((RedisError, OSError)):
        RedisStore(wire).load(batch)
    assert untouched(memory, (10, 10))
    wire.close()


@pytest.mark.parametrize("script", [b"+PONG\r\n", b"$1\r\nx\r\n", b":-1\r\n", b":x\r\n", b"-ERR no\r\n"])
def test_garbage_answers_to_questions_raise(peer: Peer, script: bytes) -> None:
    wire = peer.wire(b":1\r\n" + script)
    with pytest.raises(RedisError):
        RedisStore(wire).contains(["a", "b"])
    wire.close()


@pytest.mark.parametrize("hang_up", [True, False])
@pytest.mark.parametrize("length", [0, 3, 8, 60, 209])
def test_a_peer_that_stops_in_the_middle_ends_the_batch_in_time(peer: Peer, length: int, hang_up: bool) -> None:
    batch, memory = records(10)
    wire = peer.wire(bulk(value(10))[:length], hang_up=hang_up, timeout_s=0.2)
    start = time.monotonic()
    with pytest.raises(OSError if not hang_up else (RedisError, OSError)):
        RedisStore(wire).load(batch)
    assert time.monotonic() - start < 2
    assert untouched(memory, (10,))
    wire.close()


def test_a_trickle_does_not_prolong_the_time(peer: Peer) -> None:
    """The time-out is for the batch, not for each byte."""
    batch, _ = records(10_000)
    wire = peer.wire(bulk(value(10_000)), cut=1, timeout_s=0.2, hang_up=True)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        RedisStore(wire).load(batch)
    assert time.monotonic() - start < 2
    wire.close()


def test_a_peer_that_takes_nothing_ends_a_store_in_time(peer: Peer) -> None:
    batch, _ = records(8 << 20)
    wire = peer.wire(b"", timeout_s=0.2)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        RedisStore(wire).store(batch)
    assert time.monotonic() - start < 2
    wire.close()


def test_what_is_stored_is_framed_with_and_without_a_time_to_live(peer: Peer) -> None:
    batch, _ = records(3, 2)
    wire = peer.wire(b"+OK\r\n-OOM command not allowed\r\n")
    assert RedisStore(wire, "p:", 90).store(batch) == [True, False]
    frame = b"*5\r\n$3\r\nSET\r\n$4\r\np:n%d\r\n$%d\r\n%s\r\n$2\r\nEX\r\n$2\r\n90\r\n"
    zeros = bytes(192)
    assert peer.heard == frame % (0, 195, b"\xee" * 3 + zeros) + frame % (1, 194, b"\xee" * 2 + zeros)
    wire.close()
    wire = peer.wire(b"+OK\r\n")
    assert RedisStore(wire).store(batch[:1]) == [True]
    assert peer.heard == b"*3\r\n$3\r\nSET\r\n$2\r\nn0\r\n$195\r\n" + b"\xee" * 3 + zeros + b"\r\n"
    wire.close()


@pytest.mark.parametrize("code", ["READONLY", "MISCONF", "MOVED", "NOPERM", "ERR"])
def test_a_server_that_refuses_writes_raises(peer: Peer, code: str) -> None:
    batch, _ = records(3)
    wire = peer.wire(f"-{code} because\r\n".encode())
    with pytest.raises(RedisError, match=code):
        RedisStore(wire).store(batch)
    wire.close()


@pytest.mark.parametrize("text", ["-WRONGPASS {}\r\n", "-ERR unknown command 'AUTH', with args: '{}'\r\n", "{}\r\n"])
def test_a_refused_password_is_not_repeated(peer: Peer, text: str) -> None:
    with pytest.raises(RedisError) as caught:
        _with_password(peer, text.format("s3cr3t").encode())
    assert "s3cr3t" not in str(caught.value) + repr(caught.value)
    assert b"$6\r\ns3cr3t\r\n" in peer.heard


def _with_password(peer: Peer, script: bytes) -> None:
    thread = threading.Thread(target=peer._serve, args=(script, 0, True))
    thread.start()
    try:
        RedisWire(RedisAddress(path=str(peer.path), user="u", password="s3cr3t"), 2.0)
    finally:
        thread.join()


def test_nobody_is_there(tmp_path: Path) -> None:
    connector = RedisConnector(RedisAddress(path=str(tmp_path / "none")))
    with pytest.raises(RedisError, match="none, database 0"):
        connector.open_directory(None)  # type: ignore[arg-type]
