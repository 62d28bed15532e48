"""A connector that does badly what another one does well: for tests of everything around it.

Owns: the scheduler half.  Does not own: what goes wrong and how often (``faults``), the worker half
(``faulty_mover``), the connector underneath.  Specification: that of the tier, behind ``faulty:``, with the faults
among its options::

    faulty:host:1GiB?fail=0.1&delay=0.05
    faulty:redis://127.0.0.1:6379?timeout=1&corrupt=0.05&seed=7

Faults never lead to a wrong answer, only to a miss: bytes are corrupted where the trailer is checked afterwards, and a
move that is reported as done was done.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from urllib.parse import urlencode

from ostinato.cache.keys import BlockKey
from ostinato.connectors.api import Connector, DevicePages, Mover, Ownership, Site
from ostinato.connectors.faults import OPTIONS, Faults
from ostinato.connectors.forwarding import ForwardingConnector
from ostinato.connectors.multi import MultiConnector
from ostinato.connectors.record import TRAILER_BYTES
from ostinato.connectors.records import Record, Records
from ostinato.connectors.registry import TierSpec
from ostinato.connectors.registry import make_connector as make_inner
from ostinato.connectors.store import StoreConnector
from ostinato.errors import ConfigError


class FaultyConnector(ForwardingConnector):
    """``inner`` with ``faults``.  ``counts``: how often each of them happened."""

    def __init__(self, inner: Connector, faults: Faults) -> None:
        if isinstance(inner, MultiConnector):
            raise ConfigError("faults go around each child of a MultiConnector, not around the whole")
        if faults.corrupt:
            _check_corruptible(inner)
        super().__init__(inner)
        self.faults = faults
        self.counts: Counter[str] = Counter()
        self._movers = 0
        store = innermost(inner)
        if faults.corrupt and isinstance(store, StoreConnector):
            self._spoil_records(store)

    def make_mover(self, device: DevicePages, notify: Callable[[], None]) -> Mover:
        from ostinato.connectors.faulty_mover import FaultyMover

        rank, self._movers = self._movers, self._movers + 1
        return FaultyMover(self.inner.make_mover(device, notify), device, self.faults, self.counts, rank)

    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        answer = self.inner.probe(keys)
        if answer is None or not self.faults.lie:
            return answer
        lies = [self.faults.draws("lie", (key.group, key.digest)) for key in keys]
        self.counts["lie"] += sum(lies)
        return [bool(held) != lie for held, lie in zip(answer, lies, strict=True)]

    def _spoil_records(self, inner: StoreConnector) -> None:
        """Put a layer between the inner connector's records and the check of their trailers."""
        open_records = inner.open_records

        def open_spoilt(site: Site) -> Records:
            return SpoilingRecords(open_records(site), self.faults, self.counts)

        inner.open_records = open_spoilt  # type: ignore[method-assign]


class SpoilingRecords:
    """Implements ``Records``: what arrives is not always what was stored."""

    def __init__(self, inner: Records, faults: Faults, counts: Counter[str]) -> None:
        self._inner = inner
        self._faults = faults
        self._counts = counts
        self._loads = 0

    def load(self, batch: Sequence[Record]) -> Sequence[bool]:
        found = self._inner.load(batch)
        for record, there in zip(batch, found, strict=True):
            self._loads += 1
            if there and self._faults.draws("corrupt", (record.name, self._loads)):
                self._spoil(record)
        return found

    def store(self, batch: Sequence[Record]) -> Sequence[bool]:
        return self._inner.store(batch)

    def close(self) -> None:
        self._inner.close()

    def _spoil(self, record: Record) -> None:
        """One bit, anywhere in payload and trailer."""
        self._counts["corrupt"] += 1
        source = self._faults.source("bit", record.name)
        place = source.randrange(len(record.payload) + TRAILER_BYTES)
        bit = 1 << source.randrange(8)
        if place < len(record.payload):
            record.payload[place] ^= bit
        else:
            record.trailer[place - len(record.payload)] ^= bit


def innermost(connector: Connector) -> Connector:
    """What is left when all wrappers are taken off."""
    while isinstance(connector, ForwardingConnector):
        connector = connector.inner
    return connector


def _check_corruptible(inner: Connector) -> None:
    if inner.capabilities.ownership is Ownership.OWNED:
        raise ConfigError(
            f"faults: the bytes of tier {inner.tier} are this process's own memory, which nothing checks; "
            "corrupt is for tiers with records (fail is what can happen here)"
        )
    if not isinstance(innermost(inner), StoreConnector):
        raise ConfigError(
            f"faults: tier {inner.tier} checks its records by itself, so nothing can be changed before the check; "
            "change what it has stored instead"
        )


def make_connector(spec: TierSpec) -> FaultyConnector:
    if not spec.argument:
        raise ConfigError(f"tier {spec.text!r}: say of which tier, for example faulty:host:1GiB?fail=0.1")
    values = {name: _number(spec, name) for name in OPTIONS if name in spec.options}
    rest = {name: text for name, text in spec.options.items() if name not in OPTIONS}
    seed = int(values.pop("seed", 0))
    faults = Faults(seed=seed, **values)
    return FaultyConnector(make_inner(spec.argument + (f"?{urlencode(rest)}" if rest else "")), faults)


def _number(spec: TierSpec, name: str) -> float:
    try:
        value = float(spec.options[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"tier {spec.text!r}: {name} must be a number")
    return value
