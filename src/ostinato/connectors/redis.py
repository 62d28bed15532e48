"""A Redis or Valkey server as a shared tier.

Owns: the specification, the names of keys, what the server's answers mean.  Does not own: the protocol
(``redis_wire``), threads and checks (``store``, ``store_mover``).  No client library is needed.

``redis://[user:password@]host[:port][/db]``, ``rediss://`` (TLS), ``redis+unix:///path/to/socket``, ``valkey://``;
options ``ttl`` (seconds; none = for ever), ``prefix``, ``timeout`` (seconds per batch), ``db``, ``ca`` (``rediss``).
One string value per unit: its bytes, then the trailer.  The server may drop any of them at any time.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote, urlsplit

from ostinato.connectors.api import Capabilities, Ownership, Site
from ostinato.connectors.records import Record
from ostinato.connectors.redis_wire import Buffer, RedisAddress, RedisError, RedisWire, command
from ostinato.connectors.registry import TierSpec
from ostinato.connectors.store import StoreConnector
from ostinato.errors import ConfigError
from ostinato.ids import TierId

PASSWORD_VARIABLE: Final = "OSTINATO_REDIS_PASSWORD"
TIMEOUT_S: Final = 2.0
OPTIONS: Final = ("ttl", "prefix", "timeout", "db", "ca")
NOT_STORED: Final = "OOM"
"""The server's limit of memory is reached, and its policy evicts nothing."""
NOT_A_RECORD: Final = "WRONGTYPE"


class RedisConnector(StoreConnector):
    """``ttl``: seconds for which the server keeps a record after it was stored; None = until it is evicted."""

    def __init__(
        self,
        address: RedisAddress,
        prefix: str = "",
        ttl: int | None = None,
        timeout_s: float = TIMEOUT_S,
        tier: TierId = TierId("redis"),  # noqa: B008 (a name)
    ) -> None:
        super().__init__(Capabilities(tier, Ownership.SHARED))
        self.address = address
        self._prefix = prefix
        self._ttl_s = ttl
        self._timeout = timeout_s

    def open_directory(self, site: Site) -> RedisStore:  # noqa: ARG002
        return self._connect()

    def open_records(self, site: Site) -> RedisStore:  # noqa: ARG002
        return self._connect()

    def _connect(self) -> RedisStore:
        try:
            return RedisStore(RedisWire(self.address, self._timeout), self._prefix, self._ttl_s)
        except (OSError, RedisError) as error:
            raise RedisError(f"{self.address}: {error}") from error


class RedisStore:
    """One connection's directory and records.  Each call is one pipeline; anything unexpected raises."""

    def __init__(self, wire: RedisWire, prefix: str = "", ttl: int | None = None) -> None:
        self._wire = wire
        self._prefix = prefix.encode()
        self._tail, self._words = b"\r\n", 3
        if ttl is not None:
            seconds = b"%d" % ttl
            self._tail += b"$2\r\nEX\r\n$%d\r\n%s\r\n" % (len(seconds), seconds)
            self._words = 5

    def contains(self, names: Sequence[str]) -> Sequence[bool]:
        self._wire.send([b"".join(command(b"EXISTS", self._key(name)) for name in names)])
        return [self._wire.number() > 0 for _ in names]

    def load(self, batch: Sequence[Record]) -> Sequence[bool]:
        self._wire.send([b"".join(command(b"GET", self._key(record.name)) for record in batch)])
        return [
            _is_true(self._wire.value_into([record.payload, memoryview(record.trailer)]), NOT_A_RECORD)
            for record in batch
        ]

    def store(self, batch: Sequence[Record]) -> Sequence[bool]:
        pieces: list[Buffer] = []
        tail = b""
        for record in batch:
            key, length = self._key(record.name), len(record.payload) + len(record.trailer)
            head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (self._words, len(key), key, length)
            pieces += (tail + head, record.payload, record.trailer)
            tail = self._tail
        self._wire.send([*pieces, tail])
        return [_is_true(self._wire.status() or True, NOT_STORED) for _ in batch]

    def close(self) -> None:
        self._wire.close()

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()


def _is_true(answer: bool | RedisError, tolerated: str) -> bool:
    """``answer``, where an error of the code ``tolerated`` means no; any other is raised."""
    match answer:
        case bool():
            return answer
        case RedisError(code=code) if code == tolerated:
            return False
        case _:
            raise answer


def make_connector(spec: TierSpec) -> RedisConnector:
    if unknown := set(spec.options) - set(OPTIONS):
        raise ConfigError(f"tier {spec.text!r}: unknown option {min(unknown)!r}; known: {', '.join(OPTIONS)}")
    options = spec.options
    ttl = _number(spec, "ttl", 1, 10 * 365 * 86400)
    timeout = _number(spec, "timeout", 0.05, 60, whole=False)
    prefix = options.get("prefix", "")
    if not re.fullmatch(r"[!-~]{0,64}", prefix):
        raise ConfigError(f"tier {spec.text!r}: prefix is up to 64 printable ASCII characters without spaces")
    return RedisConnector(
        _address(spec),
        prefix,
        None if ttl is None else int(ttl),
        TIMEOUT_S if timeout is None else timeout,
        TierId("valkey" if spec.name.startswith("valkey") else "redis"),
    )


def _address(spec: TierSpec) -> RedisAddress:
    """Errors show the redacted text only: what was split wrongly may be part of a password."""
    wrong = ConfigError(
        f"tier {spec.text!r}: expected for example redis://127.0.0.1:6379/0 or redis+unix:///run/redis.sock"
    )
    try:
        url = urlsplit(f"redis:{spec.argument or '//127.0.0.1'}")
        host, port = url.hostname or "", url.port
    except ValueError:
        raise wrong from None
    unix, tls = spec.name.endswith("+unix"), spec.name.startswith("rediss")
    database = "" if unix else url.path.strip("/")
    given = _number(spec, "db", 0, 1 << 20)
    if url.fragment or not re.fullmatch("[0-9]{0,6}", database) or (database and given is not None):
        raise wrong
    if (unix and (host or not url.path.startswith("/") or url.path == "/")) or (not unix and not host):
        raise wrong
    if "ca" in spec.options and not tls:
        raise ConfigError(f"tier {spec.text!r}: ca is an option of rediss:// only")
    return RedisAddress(
        host=host,
        port=port if port is not None else 6379,
        path=unquote(url.path) if unix else "",
        tls=tls,
        ca=spec.options.get("ca", ""),
        db=int(given or 0) if not database else int(database),
        user=unquote(url.username or ""),
        password=unquote(url.password or "") or os.environ.get(PASSWORD_VARIABLE, ""),
    )


def _number(spec: TierSpec, name: str, low: float, high: float, whole: bool = True) -> float | None:
    """An option's number; None where it is not given."""
    text = spec.options.get(name)
    if text is None:
        return None
    try:
        value = float(int(text) if whole else float(text))
    except (ValueError, OverflowError):
        value = math.nan
    if not low <= value <= high:
        what = "a whole number" if whole else "a number"
        raise ConfigError(f"tier {spec.text!r}: {name} must be {what} from {low} to {high}")
    return value
