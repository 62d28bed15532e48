"""An LMCache server as a shared tier: this engine as a client of ``lmcache server`` on the same machine.

Owns: the specification, what is asked and what is stored, and when.  Does not own: answers (``lmcache_claims``), the
lookup thread (``lmcache_lookups``), the protocol and shared memory (``lmcache_mover``), checks of bytes
(``store_mover``).

``lmcache://127.0.0.1:5555``; options ``buffer`` (shared memory for each of loads and stores), ``timeout`` (seconds).

LMCache is asked about prompts, not keys: ``on_admit`` says which prompt the next questions are about.  Stores are not
offered but emitted, all groups of a run of units at once, as the units fill; checkpoints of recurrent state when they
become boundaries, and the last one when the request lets go of its blocks.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlsplit

from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import keeps_checkpoints
from ostinato.connectors.api import Capabilities, Connector, DevicePages, Hook, Mover, Ownership, Site
from ostinato.connectors.breaker import Breakers
from ostinato.connectors.context import KVConnectorSchedulerContext
from ostinato.connectors.lmcache_claims import DIGEST_TOKENS, Chain, Claims, Written
from ostinato.connectors.lmcache_lookups import Address, Desk, Lookups, make_names
from ostinato.connectors.records import StoreLink
from ostinato.connectors.registry import TierSpec, parse_bytes
from ostinato.connectors.store import MAX_BACKLOG, StoreTraffic
from ostinato.errors import ConfigError, ConnectorError
from ostinato.ids import HOLE, RequestId, TierId

TIER: Final = TierId("lmcache")
PORT: Final = 5555
ANSWER_S: Final = 3.0
"""Seconds for which an answer is believed, and its lookup held."""
EMIT_UNITS: Final = 64
"""Units of one order, at least: a long run is stored in several, so that one always finds room."""
ALL: Final = 1 << 62
HOOKS: Final = frozenset({Hook.ADMIT, Hook.COMMIT, Hook.RELEASE})
QUIET: Final = (
    ("LMCACHE_TRACK_USAGE", "false"),
    ("DO_NOT_TRACK", "1"),
    ("LMCACHE_DISABLE_BANNER", "1"),
    ("LMCACHE_LOG_LEVEL", "WARNING"),
)
"""Environment of the client library, where the user has not set it."""


@dataclass(slots=True)
class _Course:
    """How far a request is, in whole units: computed; emitted (-1 = not looked at yet); tried to emit."""

    full: int = 0
    sent: int = -1
    tried: int = 0


class Emission:
    """What is stored, and when.  ``has_room``: whether the server keeps up and may be bothered at all."""

    def __init__(self, desk: Desk, context: KVConnectorSchedulerContext, has_room: Callable[[], bool]) -> None:
        self._desk = desk
        self._context = context
        self._has_room = has_room
        self._unit = desk.layout.base_unit
        self._courses: dict[RequestId, _Course] = {}
        self._states = tuple(spec for spec in desk.layout.groups if keeps_checkpoints(spec.kind))
        self._others = tuple(spec for spec in desk.layout.groups if not keeps_checkpoints(spec.kind))
        self._step = math.lcm(*(spec.page_units for spec in self._others))
        """Pages of all groups begin together at multiples of so many units."""

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        course = self._courses.setdefault(request_id, _Course())
        course.full = computed // self._unit
        if course.full > course.tried:
            self._units(request_id, course)
        if self._states:
            states = self._context.boundary_states()
            for tokens in sorted({state.tokens for state in states if state.request_id == request_id}):
                self._state(request_id, tokens // self._unit)

    def on_release(self, request_id: RequestId) -> None:
        course = self._courses.pop(request_id, None)
        if course is not None and course.full:
            self._units(request_id, course)
            if self._states:
                self._state(request_id, course.full)

    def _units(self, request_id: RequestId, course: _Course) -> None:
        """Everything but recurrent state, of the units that were not emitted yet."""
        if course.sent < 0:
            course.sent = self._first_unwritten(self._context.digests(request_id, course.full))
        course.tried = course.full
        while self._others and course.sent < course.full and self._has_room():
            first = course.sent // self._step * self._step
            stop = first + -(-EMIT_UNITS // self._step) * self._step
            positions = [range(0)] * len(self._desk.layout.groups)
            for spec in self._others:
                last = -(-min(stop, course.full) // spec.page_units)
                positions[spec.group] = range(first // spec.page_units, last)
            chain = self._context.digests(request_id, stop)
            keys = [BlockKey(spec.group, digest) for digest in chain[first:] for spec in self._others]
            if self._is_held(request_id, positions) and not self._emit(request_id, positions, chain, keys):
                break  # no room: again when the next unit is full
            course.sent = min(stop, course.full)

    def _is_held(self, request_id: RequestId, positions: Sequence[range]) -> bool:
        """Whether there are pages at ``positions``: behind a window there are none."""
        rows = (self._context.blocks(request_id, g, at.start, at.stop) or () for g, at in enumerate(positions))
        return any(slot != HOLE for row in rows for slot in row)

    def _state(self, request_id: RequestId, cut: int) -> None:
        """The checkpoints at unit ``cut``, where there are any."""
        chain = self._context.digests(request_id, cut)
        keys = [BlockKey(spec.group, chain[-1]) for spec in self._states]
        if all(key in self._desk.written for key in keys) or not self._has_room():
            return
        positions = [range(0)] * len(self._desk.layout.groups)
        for spec in self._states:
            positions[spec.group] = range(cut - 1, cut)
        self._emit(request_id, positions, chain, keys)

    def _emit(self, request_id: RequestId, positions: Sequence[range], chain: Chain, keys: Sequence[BlockKey]) -> bool:
        self._desk.written.expect(chain, keys)
        return self._context.emit(TIER, request_id, positions) is not None

    def _first_unwritten(self, chain: Chain) -> int:
        """A hit was loaded from here, or was stored before: units that the server has."""
        for index, digest in enumerate(chain):
            if not any(BlockKey(spec.group, digest) in self._desk.written for spec in self._others):
                return index
        return len(chain)


class LMCacheConnector(Connector):
    """Scheduler half."""

    def __init__(self, address: Address) -> None:
        self.capabilities = Capabilities(TIER, Ownership.SHARED, hooks=HOOKS)
        self.breakers = Breakers()
        self.address = address
        self._site: Site | None = None
        self._desk: Desk | None = None
        self._lookups: Lookups | None = None
        self._traffic: StoreTraffic | None = None
        self._context: KVConnectorSchedulerContext | None = None
        self._emission: Emission | None = None
        self._asking: tuple[RequestId, int] = (RequestId(""), 0)

    def open(self, site: Site) -> None:
        """Raises when LMCache is not installed, or cannot serve this layout; a server that is not there yet is fine."""
        self._site = site
        unit = site.layout.base_unit
        if unit % DIGEST_TOKENS or any(spec.hash_unit != unit for spec in site.layout.groups):
            raise ConnectorError(f"tier lmcache needs one hash unit, a multiple of {DIGEST_TOKENS} tokens, for all")
        self._desk = Desk(site.layout, Claims(time.monotonic, ANSWER_S), Written(), make_names())
        for name, value in QUIET:
            os.environ.setdefault(name, value)
        try:
            from ostinato.connectors.lmcache_mover import check_server
        except ImportError as error:
            raise ConnectorError(
                f"tier lmcache needs the package lmcache 0.5.6 ({error}); docs/stores/lmcache.md says how to install it"
            ) from error
        check_server(self.address, unit)

    def make_mover(self, device: DevicePages, notify: Callable[[], None]) -> Mover:
        from ostinato.connectors.lmcache_mover import LMCacheClient, LMCacheRecords
        from ostinato.connectors.store_mover import StoreMover

        assert self._site is not None and self._desk is not None, "open() comes first"
        site, desk, address = self._site, self._desk, self.address

        opened = set[int]()

        def open_records() -> LMCacheRecords:
            thread = threading.get_ident()
            if thread in opened:  # after a failure: perhaps another server, and an empty one
                desk.written.clear()
            opened.add(thread)
            return LMCacheRecords(LMCacheClient(address, site, address.buffer), desk)

        self._lookups = Lookups(desk, self.breakers.lookup, lambda: LMCacheClient(address, site), notify)
        # The server delivers up to the end of a prompt, and takes a unit's groups together: orders are not to be cut.
        link = StoreLink(TIER, site.identity, self.breakers, open_records, desk.written.add, ALL, ALL)
        mover = StoreMover(device, notify, link)
        self._traffic = mover
        return mover

    @property
    def faults(self) -> Mapping[str, int]:
        """Records that were not what was asked for, by kind of fault (:class:`~ostinato.connectors.record.Fault`)."""
        return {} if self._traffic is None else dict(self._traffic.faults)

    def bind(self, context: KVConnectorSchedulerContext) -> None:
        assert self._desk is not None, "open() comes first"
        self._context = context
        self._emission = Emission(self._desk, context, self._has_room)

    def on_admit(self, request_id: RequestId, tokens: int) -> None:
        # The last token is always computed, so that no longer hit is of use.
        self._asking = request_id, tokens - 1

    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        assert self._desk is not None and self._lookups is not None and self._context is not None
        request_id, tokens = self._asking
        chain = self._context.digests(request_id, tokens // self._desk.layout.base_unit)
        if not chain or self.breakers.lookup.is_open or self.breakers.load.is_open:
            return [False] * len(keys)
        held = self._desk.claims.held(chain[-1])
        if held is None:
            self._lookups.ask(chain[-1], chain)
            return None
        return [key in held for key in keys]

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return [False] * len(keys)  # what is stored is emitted

    def refuted(self, keys: Sequence[BlockKey]) -> None:
        assert self._desk is not None
        self._desk.claims.refute(keys)
        self._desk.written.discard(keys)

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        assert self._emission is not None
        self._emission.on_commit(request_id, computed)

    def on_release(self, request_id: RequestId) -> None:
        assert self._emission is not None
        self._emission.on_release(request_id)

    def close(self) -> None:
        if self._lookups is not None:
            self._lookups.close()

    def _has_room(self) -> bool:
        traffic = self._traffic
        return traffic is not None and traffic.backlog_bytes < MAX_BACKLOG and not self.breakers.store.is_open


def make_connector(spec: TierSpec) -> LMCacheConnector:
    if unknown := set(spec.options) - {"buffer", "timeout"}:
        raise ConfigError(f"tier {spec.text!r}: unknown option {min(unknown)!r}; known: buffer, timeout")
    wrong = ConfigError(f"tier {spec.text!r}: expected for example lmcache://127.0.0.1:{PORT}")
    try:
        url = urlsplit(f"lmcache:{spec.argument or '//127.0.0.1'}")
        host, port = url.hostname or "", url.port or PORT
    except ValueError:
        raise wrong from None
    if not re.fullmatch(r"[A-Za-z0-9.:_-]+", host) or url.path.strip("/") or url.fragment or url.username:
        raise wrong
    host = f"[{host}]" if ":" in host else host
    usual, options = Address(f"tcp://{host}:{port}"), spec.options
    try:
        timeout = float(options.get("timeout", usual.timeout))
    except ValueError:
        timeout = 0.0
    if not 0.05 <= timeout <= 60:
        raise ConfigError(f"tier {spec.text!r}: timeout is a number of seconds from 0.05 to 60")
    buffer = parse_bytes(options["buffer"]) if "buffer" in options else usual.buffer
    return LMCacheConnector(replace(usual, buffer=buffer, timeout=timeout))
