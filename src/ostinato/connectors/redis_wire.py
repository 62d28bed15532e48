"""One connection to a server that speaks RESP (Redis, Valkey): bytes from and to device pages without a copy between.

Owns: the connection, its handshake, the framing of requests and answers, the time-out.  Does not own: what records are
called, what an answer means for a tier (``redis``).  A connection belongs to one thread.

Nothing is tried twice: after any error that is raised the connection is of no use.  Errors name the server's error code
only, never its text, which may repeat what was sent (a password).
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, TypeAlias

from ostinato.errors import ConnectorError

Buffer: TypeAlias = bytes | bytearray | memoryview

BUFFER_BYTES: Final = 16 << 10
"""Answers' lines and small values come through a buffer; the rest of a larger value goes straight to its place."""
MAX_PIECES: Final = 96
"""Buffers per ``sendmsg``: the kernel takes less than they hold anyway."""
HINTS: Final = MappingProxyType(
    {
        "NOAUTH": "give a password, in OSTINATO_REDIS_PASSWORD or in the address",
        "WRONGPASS": "user or password are wrong",
        "NOPERM": "the user may not do this: it needs GET, SET, EXISTS and SELECT",
        "LOADING": "the server reads its data set; it is asked again later",
        "MOVED": "the server is a node of a cluster, which is not supported: give a single server",
        "READONLY": "the server is a replica: give the primary",
        "MISCONF": "the server refuses writes since it cannot save its data set",
    }
)


class RedisError(ConnectorError):
    """The server cannot be used now; ``code`` is its error code, empty when it broke the protocol."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where the server is.  ``path``: of a Unix socket, for host and port.  ``ca``: a file, empty = the system's."""

    host: str = "127.0.0.1"
    port: int = 6379
    path: str = ""
    tls: bool = False
    ca: str = ""
    db: int = 0
    user: str = ""
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        where = self.path or f"{self.host}:{self.port}"
        return f"{where}, database {self.db}"


class RedisWire:
    """Connects; raises OSError or RedisError.  ``timeout_s`` is for connecting, and for each batch of commands."""

    def __init__(self, address: RedisAddress, timeout_s: float) -> None:
        self._timeout = timeout_s
        self._until = 0.0
        self._bytes = bytearray(BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._begin = self._end = 0
        self._socket = _connect(address, timeout_s)
        try:
            self._greet(address)
        except BaseException:
            self._socket.close()
            raise

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Begin a batch: send all of ``pieces``.  Its answers are read within ``timeout_s`` from now."""
        self._until = time.monotonic() + self._timeout
        if isinstance(self._socket, ssl.SSLSocket):
            for piece in pieces:
                self._arm()
                self._socket.sendall(piece)
            return
        first, rest = 0, [memoryview(piece) for piece in pieces]
        while first < len(rest):
            self._arm()
            sent = self._socket.sendmsg(rest[first : first + MAX_PIECES])
            while first < len(rest) and sent >= len(rest[first]):
                sent -= len(rest[first])
                first += 1
            if sent:
                rest[first] = rest[first][sent:]

    def status(self) -> RedisError | None:
        """The next answer must be ``+OK`` or an error, which is returned."""
        line = self._line()
        if line == b"+OK":
            return None
        return _failure(line)

    def number(self) -> int:
        line = self._line()
        if re.fullmatch(rb":[0-9]{1,18}", line):
            return int(line[1:])
        raise _failure(line)

    def value_into(self, places: Sequence[memoryview]) -> bool | RedisError:
        """Read a value into ``places``, one after the other; False when there is none, or one of another length.

        A value of another length is read past; nothing of it is written to ``places``.
        """
        line = self._line()
        if line == b"$-1":
            return False
        if not re.fullmatch(rb"\$[0-9]{1,18}", line):
            return _failure(line)
        length = int(line[1:])
        fits = length == sum(len(place) for place in places)
        if fits:
            for place in places:
                self._fill(place)
        else:
            self._skip(length)
        end = bytearray(2)
        self._fill(memoryview(end))
        if end != b"\r\n":
            raise RedisError("a value is longer than announced")
        return fits

    def close(self) -> None:
        self._socket.close()

    def _greet(self, address: RedisAddress) -> None:
        commands: list[tuple[str, ...]] = []
        if address.password:
            commands.append(("AUTH", *([address.user] if address.user else []), address.password))
        if address.db:
            commands.append(("SELECT", str(address.db)))
        for words in commands:
            self.send([command(*(word.encode() for word in words))])
            if (error := self.status()) is not None:
                raise error

    def _line(self) -> bytes:
        """The next line, without its end."""
        while (stop := self._bytes.find(b"\r\n", self._begin, self._end)) < 0:
            self._refill()
        line = bytes(self._buffer[self._begin : stop])
        self._begin = stop + 2
        return line

    def _fill(self, place: memoryview) -> None:
        while len(place):
            if self._begin < self._end:
                count = min(len(place), self._end - self._begin)
                place[:count] = self._buffer[self._begin : self._begin + count]
                self._begin += count
            elif len(place) < len(self._buffer):
                self._refill()
                continue
            else:
                count = self._receive(place)
            place = place[count:]

    def _skip(self, length: int) -> None:
        while length:
            if self._begin == self._end:
                self._refill()
            count = min(length, self._end - self._begin)
            self._begin += count
            length -= count

    def _refill(self) -> None:
        """Receive something behind what the buffer holds."""
        self._buffer[: self._end - self._begin] = self._buffer[self._begin : self._end]
        self._begin, self._end = 0, self._end - self._begin
        if self._end == len(self._buffer):
            raise RedisError("an answer's line has no end: this is no Redis server")
        self._end += self._receive(self._buffer[self._end :])

    def _receive(self, place: memoryview) -> int:
        self._arm()
        count = self._socket.recv_into(place)
        if not count:
            raise RedisError("the server closed the connection")
        return count

    def _arm(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no answer within {self._timeout:g} s")
        self._socket.settimeout(left)


def command(*words: bytes) -> bytes:
    """A command of short words, framed."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def _connect(address: RedisAddress, timeout_s: float) -> socket.socket:
    if address.path:
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.settimeout(timeout_s)
        try:
            raw.connect(address.path)
        except BaseException:
            raw.close()
            raise
        return raw
    raw = socket.create_connection((address.host, address.port), timeout_s)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not address.tls:
        return raw
    try:
        context = ssl.create_default_context(cafile=address.ca or None)
        return context.wrap_socket(raw, server_hostname=address.host)
    except BaseException:
        raw.close()
        raise


def _failure(line: bytes) -> RedisError:
    """What an error answer says; any other unexpected answer breaks the protocol, and is raised."""
    if not line.startswith(b"-"):
        raise RedisError("an answer of an unexpected kind: this is no Redis server")
    found = re.match(rb"-([A-Z]{1,32})(?: |$)", line)
    code = found[1].decode() if found else "ERR"
    hint = HINTS.get(code)
    return RedisError(f"the server answers {code}" + (f": {hint}" if hint else ""), code)
