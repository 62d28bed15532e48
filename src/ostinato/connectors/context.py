"""``KVConnectorSchedulerContext``: the narrow window through which a connector sees the scheduler's blocks.

Owns: borrowing (read-only views that die with the hook that received them), orders that a connector emits itself, and
pins (leases for transfers that it drives itself).  Does not own: allocation and freeing; neither can be done from here.
Bound once, forwarded unchanged by connectors that wrap others.  Thread: the scheduler's only.

A borrow costs the same for ten blocks and for ten thousand: nothing is copied, rows are read in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

from ostinato.cache.directory import Directory
from ostinato.cache.keys import BlockKey, KeyChain
from ostinato.cache.pool import Lease, SlotPool, SlotState
from ostinato.cache.retention import Retention
from ostinato.cache.table import BlockTable
from ostinato.errors import ConnectorError, StaleViewError
from ostinato.ids import DEVICE, HOLE, GroupId, JobId, RequestId, SlotId, TierId


class BlockView(Sequence[SlotId]):
    """Slots of one group of one request, by position, HOLEs included.  Raises StaleViewError once its hook is over."""

    __slots__ = ("_context", "_epoch", "_range", "_row")

    def __init__(
        self, context: KVConnectorSchedulerContext, row: Sequence[SlotId], positions: range | None = None
    ) -> None:
        self._context = context
        self._epoch = context.epoch
        self._row = row
        self._range = positions
        """None = all of the row: most views are never looked into."""

    def __len__(self) -> int:
        return len(self._positions())

    @overload
    def __getitem__(self, index: int) -> SlotId: ...
    @overload
    def __getitem__(self, index: slice) -> BlockView: ...
    def __getitem__(self, index: int | slice) -> SlotId | BlockView:
        positions = self._positions()
        if isinstance(index, slice):
            return BlockView(self._context, self._row, positions[index])
        return self._row[positions[index]]

    def __iter__(self) -> Iterator[SlotId]:
        for position in self._positions():
            self._check()
            yield self._row[position]

    def _positions(self) -> range:
        self._check()
        return range(len(self._row)) if self._range is None else self._range

    def _check(self) -> None:
        if self._epoch != self._context.epoch:
            raise StaleViewError("a borrowed block view is valid only inside the hook that received it; borrow again")


@dataclass(frozen=True, slots=True)
class BoundaryState:
    """A state checkpoint handed over in this step: the state of ``group`` after exactly ``tokens`` tokens."""

    request_id: RequestId
    group: GroupId
    tokens: int
    slot: SlotId


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Device slots: all, and those that could be taken now (``free`` of them without evicting)."""

    capacity: int
    available: int
    free: int


class Pin:
    """A claim on device slots for a transfer that a connector drives.  Ends when every rank has released it."""

    __slots__ = ("_lease", "_waiting")

    def __init__(self, lease: Lease, world_size: int) -> None:
        self._lease = lease
        self._waiting = set(range(world_size))

    @property
    def slots(self) -> Sequence[SlotId]:
        return tuple(self._lease.slots)

    def release(self, rank: int = 0) -> bool:
        """Rank ``rank`` is done; True when it was the last.  Twice from one rank is an error."""
        if rank not in self._waiting:
            raise ConnectorError(f"rank {rank} released a pin that it does not hold")
        self._waiting.remove(rank)
        if not self._waiting:
            self._lease.release()
        return not self._waiting


Emit: TypeAlias = Callable[[TierId, RequestId, Sequence[range]], JobId | None]


def _emit_nothing(_tier: TierId, _request_id: RequestId, _positions: Sequence[range]) -> JobId | None:
    return None


def _no_chain(_request_id: RequestId) -> KeyChain | None:
    return None


@dataclass(frozen=True, slots=True)
class Source:
    """Where a context gets what it shows: tables and chains by request, this step's checkpoints, the way orders go."""

    table: Callable[[RequestId], BlockTable | None]
    states: Callable[[], Sequence[BoundaryState]] = tuple
    emit: Emit = _emit_nothing
    chain: Callable[[RequestId], KeyChain | None] = _no_chain


class KVConnectorSchedulerContext:
    """Read access to block tables, pins, orders, and facts about the device pool."""

    def __init__(
        self, source: Source, pool: SlotPool, retention: Retention, directory: Directory, world_size: int = 1
    ) -> None:
        self.epoch = 0
        self._tables = source.table
        self._pool = pool
        self._retention = retention
        self._directory = directory
        self._states = source.states
        self._emit = source.emit
        self._chains = source.chain
        self._world_size = world_size

    @overload
    def blocks(self, request_id: RequestId) -> tuple[BlockView, ...] | None: ...
    @overload
    def blocks(
        self, request_id: RequestId, group: int, start: int = 0, stop: int | None = None
    ) -> BlockView | None: ...
    def blocks(
        self, request_id: RequestId, group: int | None = None, start: int = 0, stop: int | None = None
    ) -> tuple[BlockView, ...] | BlockView | None:
        """The request's current blocks of all groups, or positions ``[start, stop)`` of one group.

        None when the request owns no table: waiting, preempted, finished, or unknown.
        """
        table = self._tables(request_id)
        if table is None:
            return None
        if group is None:
            return tuple([BlockView(self, row) for row in table.rows])
        row = table.rows[group]
        return BlockView(self, row, range(len(row))[start:stop])

    def digests(self, request_id: RequestId, units: int) -> tuple[bytes, ...]:
        """The digests of the request's first ``units`` base units, or of as many as are hashed.

        Digest ``i`` names all tokens up to the end of unit ``i``; a :class:`~ostinato.cache.keys.BlockKey` has the one
        at its own end.
        """
        chain = self._chains(request_id)
        return tuple(chain.digests[:units]) if chain is not None else ()

    def pin(self, slots: Iterable[SlotId]) -> Pin:
        """Hold ``slots`` until all ranks have released the pin.  Duplicates count once; holes, free slots: refused."""
        unique = dict.fromkeys(slots)
        if HOLE in unique:
            raise ConnectorError("a hole cannot be pinned: skip it, its block is not held")
        for slot in unique:
            if not 0 <= slot < self._pool.capacity or self._pool.state(slot) is SlotState.FREE:
                raise ConnectorError(f"slot {slot} cannot be pinned: nobody holds it and it has no content")
        return Pin(self._pool.share(unique, "pin"), self._world_size)

    def emit(self, tier: TierId, request_id: RequestId, positions: Sequence[range]) -> JobId | None:
        """Order a store of what the request's rows hold at ``positions`` (one range per group) to the connector's tier.

        The order that reaches the mover carries the blocks of all groups by position, holes kept (``order.blocks``);
        its moves name the full units among them, and every page is pinned once until all ranks have reported.  None
        when there is nothing to store, or stores pin too many pages already; ask again in a later hook.
        """
        if any(places.step != 1 or places.start < 0 for places in positions):
            raise ConnectorError("positions are ranges of step 1 from 0 on, one for each group")
        return self._emit(tier, request_id, positions)

    def boundary_states(self) -> Sequence[BoundaryState]:
        """State checkpoints handed over this step; reading takes nothing away from other connectors."""
        return self._states()

    def cached(self, keys: Iterable[BlockKey]) -> list[bool]:
        """Which keys the device holds, ready to use."""
        places = (self._directory.place(key, DEVICE) for key in keys)
        return [place is not None and place.ready for place in places]

    def eviction_candidates(self, cursor: int, count: int) -> tuple[list[SlotId], int]:
        """The slots that the device would evict after the first ``cursor`` ones, and the next cursor."""
        slots = self._retention.candidates(cursor + count)[cursor:]
        return slots, cursor + len(slots)

    def pool_stats(self) -> PoolStats:
        return PoolStats(self._pool.capacity, self._pool.available, len(self._pool.free_slots))

    def expire(self) -> None:
        """End of a hook: views borrowed so far become stale."""
        self.epoch += 1
