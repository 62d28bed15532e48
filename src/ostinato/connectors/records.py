"""A store of records, as both halves of an asked tier see it.

Owns: the types, the naming of records, and what the halves share.  Does not own: the halves (``store``,
``store_mover``), the trailer (``record``).  Values and protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ostinato.cache.keys import BlockKey
from ostinato.connectors.breaker import Breakers
from ostinato.connectors.record import RecordIdentity
from ostinato.ids import TierId

CLOSE_S: Final = 5.0
"""How long closing waits for a call that hangs; connectors have shorter time-outs, foreign libraries may not."""


def record_name(key: BlockKey) -> str:
    """Name of a unit's record in any store.  The digest chains the namespace, so equal names mean equal contents."""
    return f"ostinato1-{key.group:x}-{key.digest.hex()}"


@dataclass(frozen=True, slots=True)
class Record:
    """One record on its way: ``payload`` is the unit's place in a device page, ``trailer`` its 192 bytes."""

    name: str
    key: BlockKey
    payload: memoryview
    trailer: bytearray


class Directory(Protocol):
    """What the scheduler half asks.  Called on the lookup thread only; may block for as long as its own time-out."""

    def contains(self, names: Sequence[str]) -> Sequence[bool]:
        """Which records could be read now.  Raises when the store cannot be reached."""

    def close(self) -> None: ...


class Records(Protocol):
    """What the worker half uses.  The load and the store thread have one each; may block as :class:`Directory` may."""

    def load(self, batch: Sequence[Record]) -> Sequence[bool]:
        """Fill payload and trailer of each record; False where there is none.  Raises when the store is unreachable.

        Nothing is written outside of ``payload`` and ``trailer``, whatever the store sends.
        """

    def store(self, batch: Sequence[Record]) -> Sequence[bool]:
        """Write each record; False where it found no room.  Raises when the store cannot be reached."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StoreLink:
    """What the worker half knows of its connector.  ``stored(keys)`` may be called from any thread.

    ``batch_bytes`` and ``batch_records``: the most that is handed over at once (None: as the mover sees fit).
    """

    tier: TierId
    identity: RecordIdentity
    breakers: Breakers
    open_records: Callable[[], Records]
    stored: Callable[[Sequence[BlockKey]], None]
    batch_bytes: int | None = None
    batch_records: int | None = None
