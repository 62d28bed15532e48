"""One client of a Mooncake store, as both halves of the tier use it.

Owns: the environment that the library reads, connecting, staging memory, what return codes mean.  Does not own: threads
(``store``, ``store_mover``), which records are moved.  All methods but :meth:`MooncakeClient.start` may block for as
long as the time-outs below say.  Any thread.

The library's ``setup`` holds the interpreter for as long as it takes: seconds when the store is away, thirty when it
hangs.  So a process of its own rehearses it first, and only what worked there is done here (some hundredths of a
second).  Once set up, a client finds its store again by itself, and is never closed before the end: its segment, with
all records in it, would go too.

Bytes pass through staging memory, also on the way in: a peer that hung may still write into a buffer after the call for
it has failed, and device pages belong to others by then.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from ostinato.errors import ConnectorError
from ostinato.memory import check_memory

log: Final = logging.getLogger(__name__)
ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "MC_LOG_LEVEL": "ERROR",
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_RPC_CONNECT_TIMEOUT_MS": "500",
        "MC_RPC_TIMEOUT_MS": "2000",
        "MC_TRANSFER_TIMEOUT": "3",
        "MC_TCP_STATUS_TIMEOUT_SEC": "3",
        # With the defaults, some keys of a batch of many pieces fail for nothing.
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "16384",
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "MC_TCP_SLICE_SIZE": "1048576",
    }
)
"""Read by the library when it is imported; what the user has set stays.  Seconds and milliseconds as named."""
CONNECT_S: Final = 1.0
REHEARSAL_S: Final = 8.0
FULL_PAUSE_S: Final = 0.02
"""A store that has no room evicts at once, but a little later: that long, so often, on the store thread."""
FULL_TRIES: Final = 3
KNOWN_S: Final = 30.0
"""Seconds for which what was stored or read here is not stored again."""
MAX_KNOWN: Final = 1 << 16
POOL_SLACK: Final = 4 << 20

NOT_FOUND: Final = -704
NO_ROOM: Final = -200
BAD_BUFFER: Final = -600
TROUBLE: Final = frozenset({-1, -800, -900, -901})
"""Of the store, not of a record: transfer failed, call failed, call timed out; -1 from a ``mooncake_client``."""

REHEARSAL: Final = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store, mode, address, host = MooncakeDistributedStore(), *sys.argv[1:]
if mode == "shm":
    code = store.setup_dummy(1 << 20, 0, address)
else:
    code = store.setup(host, "P2PHANDSHAKE", 0, 0, "tcp", "", address)
os._exit(0 if code == 0 else 3)
"""


class MooncakeError(ConnectorError):
    """The store cannot be reached, or does not answer."""


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """``address``: of the master, or with ``shared_memory`` of the ``mooncake_client`` on this host.

    ``segment``: bytes of this process's memory lent to the store.  ``host``: this host's name for peers.
    """

    address: str
    shared_memory: bool = False
    segment: int = 0
    host: str = "127.0.0.1"


@dataclass(slots=True)
class Staging:
    """Registered memory that the store reads and writes; used by one thread at a time."""

    address: int
    size: int
    memory: Any = field(default=None, repr=False)
    """Keeps the memory alive."""

    def put(self, offset: int, piece: memoryview | bytearray) -> None:
        if piece:
            ctypes.memmove(self.address + offset, _address(piece), len(piece))

    def get(self, offset: int, piece: memoryview | bytearray) -> None:
        if piece:
            ctypes.memmove(_address(piece), self.address + offset, len(piece))


def _address(piece: memoryview | bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(piece))


@dataclass(frozen=True, slots=True)
class Span:
    """One record in staging memory; ``group``: records of one group are evicted together."""

    name: str
    address: int
    size: int
    group: str = ""


def _is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S):
            return True
    except OSError:
        return False


def set_environment() -> None:
    """Before the library is imported, here or in a child."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def rehearse_setup(options: MooncakeOptions) -> None:
    """Set up a client in a process of its own, where it holds up nobody.  Raises when that does not work."""
    set_environment()
    mode = "shm" if options.shared_memory else "direct"
    command = [sys.executable, "-c", REHEARSAL, mode, options.address, options.host]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=REHEARSAL_S, check=False)
    except subprocess.TimeoutExpired:
        raise MooncakeError(f"{options.address}: setup hangs") from None
    if ended.returncode:
        reason = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise MooncakeError(f"{options.address}: setup does not work ({reason[0] if reason else ended.returncode})")


def _import_store() -> Any:
    set_environment()
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConnectorError(
            f"the Mooncake client cannot be loaded ({error}); install ostinato[mooncake] and the system's libibverbs1"
        ) from error
    return MooncakeDistributedStore()


def _replicate_config() -> Any:
    from mooncake.store import ReplicateConfig

    return ReplicateConfig()


@dataclass(frozen=True, slots=True)
class Library:
    """What is used of the package ``mooncake`` and of the network (tests bring their own)."""

    make_store: Callable[[], Any] = _import_store
    make_config: Callable[[], Any] = _replicate_config
    rehearse: Callable[[MooncakeOptions], None] = rehearse_setup
    is_listening: Callable[[str], bool] = _is_listening


class Known:
    """Records that were stored or read here not long ago, so that they need not be stored again.  Any thread."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def note(self, names: Sequence[str]) -> None:
        if len(self._until) > MAX_KNOWN:
            self._until = {}
        self._until.update(dict.fromkeys(names, time.monotonic() + KNOWN_S))

    def doubt(self, missing: Sequence[str]) -> None:
        """Where one of the known records is gone, others may be: evicted with it, or lost with the master."""
        if any(name in self._until for name in missing):
            self._until = {}

    def names(self) -> set[str]:
        return set(self._until)

    def __contains__(self, name: str) -> bool:
        return self._until.get(name, 0.0) > time.monotonic()


class MooncakeClient:
    """``staging_bytes``: size of one piece of staging memory; a load and a store thread have one each."""

    def __init__(self, options: MooncakeOptions, staging_bytes: int, library: Library | None = None) -> None:
        self.options = options
        self._staging_bytes = staging_bytes
        self._library = library or Library()
        self._lock = threading.Lock()
        self._store: Any = None
        self._spare: list[Staging] = []
        self.known = Known()
        self._closed = False

    def start(self) -> None:
        """Begin to connect; whoever needs the store first waits for it, on a thread of its own."""

        def connect() -> None:
            try:
                self.store()
            except Exception as error:
                log.warning("mooncake: %s; the tier is empty until it can be reached", error)

        threading.Thread(target=connect, name="ostinato-mooncake-connect", daemon=True).start()

    def store(self) -> Any:
        """The library's client, set up.  Raises MooncakeError, within seconds, when that cannot be had."""
        with self._lock:
            if self._closed:
                raise MooncakeError("the tier is closed")
            if self._store is None:
                self._store = self._connect()
            return self._store

    # Calls.  Each raises MooncakeError when the store is in trouble.

    def contains(self, names: Sequence[str]) -> list[bool]:
        """A yes protects the record from eviction for the master's lease: only what may be loaded is asked about."""
        codes = self.store().batch_is_exist(list(names))
        if len(codes) != len(names) or any(code not in (0, 1) for code in codes):
            raise MooncakeError(f"{self.options.address}: existence is not known ({min(codes, default=0)})")
        self.known.doubt([name for name, code in zip(names, codes, strict=True) if not code])
        return [code == 1 for code in codes]

    def put(self, spans: Sequence[Span]) -> list[bool]:
        """Which are in the store now.  A record that is there already keeps its value, and counts."""
        store, left, good = self.store(), list(range(len(spans))), [False] * len(spans)
        for attempt in range(FULL_TRIES + 1):
            some = [spans[index] for index in left]
            config = self._groups(some)
            codes = store.batch_put_from(*_columns(some), *([config] if config is not None else []))
            self._check(codes, len(left))
            for index, code in zip(left, codes, strict=True):
                good[index] = code == 0
            left = [index for index, code in zip(left, codes, strict=True) if code == NO_ROOM]
            if not left or attempt == FULL_TRIES:
                break
            time.sleep(FULL_PAUSE_S)
        return good

    def get(self, spans: Sequence[Span]) -> list[bool]:
        """Which were read in full.  A record of another size is of no use to anybody, and is removed."""
        codes = self.store().batch_get_into(*_columns(spans))
        self._check(codes, len(spans))
        good = [code == span.size for span, code in zip(spans, codes, strict=True)]
        odd = [
            span.name
            for span, code in zip(spans, codes, strict=True)
            if code != span.size and (code > 0 or (code == BAD_BUFFER and self.store().get_size(span.name) > span.size))
        ]
        self.remove(odd)
        self.known.doubt([span.name for span, there in zip(spans, good, strict=True) if not there])
        return good

    def remove(self, names: Sequence[str]) -> None:
        """Damaged records: the store keeps the first value of a name, so nobody could ever store a good one."""
        self.known.doubt(names)
        for name in names:
            code = self.store().remove(name, True)
            log.warning("mooncake: removed the unusable record %s (%d)", name, code)

    # Memory.

    def take_staging(self) -> Staging:
        store = self.store()
        with self._lock:
            if self._spare:
                return self._spare.pop()
        size = self._staging_bytes
        if self.options.shared_memory:
            staging = Staging(store.alloc_from_mem_pool(size), size)
        else:
            memory = mmap.mmap(-1, size)
            staging = Staging(ctypes.addressof(ctypes.c_char.from_buffer(memory)), size, memory)
        code = store.register_buffer(staging.address, size) if staging.address else BAD_BUFFER
        if code:
            raise MooncakeError(f"{self.options.address}: no staging memory of {size} bytes ({code})")
        return staging

    def give_staging(self, staging: Staging) -> None:
        """For the next user.  It is never freed: what hangs may still write to it."""
        with self._lock:
            self._spare.append(staging)

    def close(self) -> None:
        """Takes the segment's records along.  Without a master it would take long: the client is left behind then."""
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
        if store is None:
            return
        if self._library.is_listening(self.options.address):
            store.close()
        else:
            log.warning("mooncake: %s is away; its client is left to the end of the process", self.options.address)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))

    # Inside.

    def _connect(self) -> Any:
        options = self.options
        if not self._library.is_listening(options.address):
            raise MooncakeError(f"{options.address}: nothing listens there")
        self._library.rehearse(options)
        store = self._library.make_store()
        if options.shared_memory:
            code = store.setup_dummy(2 * self._staging_bytes + POOL_SLACK, 0, options.address)
        else:
            check_memory("the segment lent to Mooncake", options.segment)
            code = store.setup(options.host, "P2PHANDSHAKE", options.segment, 0, "tcp", "", options.address)
        if code:
            raise MooncakeError(f"{options.address}: setup failed ({code})")
        return store

    def _check(self, codes: Sequence[int], count: int) -> None:
        trouble = sorted({code for code in codes if code in TROUBLE})
        if trouble or len(codes) != count:
            raise MooncakeError(f"{self.options.address}: the store is in trouble ({trouble or len(codes)})")

    def _groups(self, spans: Sequence[Span]) -> Any:
        if not any(span.group for span in spans):
            return None
        config = self._library.make_config()
        config.group_ids = [span.group for span in spans]
        return config


def _columns(spans: Sequence[Span]) -> tuple[list[str], list[int], list[int]]:
    return [span.name for span in spans], [span.address for span in spans], [span.size for span in spans]
