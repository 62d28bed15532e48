"""A Mooncake store as a tier: worker half.

Owns: records in staging memory, what need not be stored again, the form in which an emitted order reaches a worker.
Does not own: threads and checks (``store_mover``), the client (``mooncake_client``).  Threads: as ``store_mover``.

::

    staging   | payload | trailer | payload | trailer | ...      one contiguous object per unit
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import msgspec

from ostinato.cache.keys import BlockKey
from ostinato.cache.layout import ALIGNMENT, CacheLayout
from ostinato.connectors.api import DevicePages
from ostinato.connectors.mooncake_client import MooncakeClient, Span, Staging
from ostinato.connectors.record import TRAILER_BYTES
from ostinato.connectors.records import Record, Records, StoreLink, record_name
from ostinato.connectors.store_mover import StoreMover
from ostinato.ids import HOLE, GroupId, JobId, Ordinal, RequestId, SlotId, Step, TierId
from ostinato.transfer.job import JobKind, Move, TransferOrder

STAGING_BYTES: Final = 16 << 20
OS_PAGE: Final = 4096

Unit: TypeAlias = tuple[int, bytes, int, int, int, int]
"""Group, digest, ordinal; device page, offset and size in bytes."""


class MooncakeJob(msgspec.Struct, frozen=True, array_like=True):
    """A store that the connector emitted, as plain values: what a worker process needs, and all that it gets.

    ``blocks``: device pages of all groups by position, holes (-1) kept, as the table had them when the order was
    emitted.  ``units``: what is stored, full units of held positions; where two requests computed a unit at the same
    time, the page may be the other one's, with the same bytes.
    """

    job_id: int
    request_id: str
    after_step: int
    units: tuple[Unit, ...]
    blocks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, order: TransferOrder, request_id: str) -> MooncakeJob:
        units = tuple((*move.key, move.ordinal, move.device_slot, move.offset, move.length) for move in order.moves)
        return cls(order.job_id, request_id, order.after_step, units, order.blocks)

    def order(self, tier: TierId) -> TransferOrder:
        moves = tuple(
            Move(BlockKey(GroupId(group), digest), Ordinal(ordinal), SlotId(page), HOLE, offset, size)
            for group, digest, ordinal, page, offset, size in self.units
        )
        blocks = tuple(tuple(SlotId(slot) for slot in row) for row in self.blocks)
        return TransferOrder(JobId(self.job_id), JobKind.STORE, tier, moves, Step(self.after_step), blocks)


def staging_bytes(layout: CacheLayout) -> int:
    """Room for at least one record of any group."""
    largest = max(spec.unit_bytes for spec in layout.groups)
    return max(STAGING_BYTES, -(-(largest + TRAILER_BYTES) // OS_PAGE) * OS_PAGE)


class MooncakeRecords:
    """Records of one thread; implements ``Records``."""

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
        self._staging = client.take_staging()

    def load(self, batch: Sequence[Record]) -> Sequence[bool]:
        good: list[bool] = []
        for records, spans in _pieces(batch, self._staging):
            found = self._client.get(spans)
            for record, span, there in zip(records, spans, found, strict=True):
                if there:
                    offset = span.address - self._staging.address
                    self._staging.get(offset, record.payload)
                    self._staging.get(offset + len(record.payload), record.trailer)
            good += found
        return good

    def store(self, batch: Sequence[Record]) -> Sequence[bool]:
        good: list[bool] = []
        for records, spans in _pieces(batch, self._staging):
            for record, span in zip(records, spans, strict=True):
                offset = span.address - self._staging.address
                self._staging.put(offset, record.payload)
                self._staging.put(offset + len(record.payload), record.trailer)
            good += self._client.put(spans)
        return good

    def close(self) -> None:
        self._client.give_staging(self._staging)


def _pieces(batch: Sequence[Record], staging: Staging) -> Iterator[tuple[list[Record], list[Span]]]:
    """Runs of records that lie in staging memory together."""
    records: list[Record] = []
    spans: list[Span] = []
    offset = 0
    for record in batch:
        size = len(record.payload) + len(record.trailer)
        if records and offset + size > staging.size:
            yield records, spans
            records, spans, offset = [], [], 0
        records.append(record)
        # Units of all groups that end at one token have one digest: losing one makes the others useless.
        spans.append(Span(record.name, staging.address + offset, size, record.key.digest.hex()))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    if records:
        yield records, spans


class MooncakeMover(StoreMover):
    """``request_of(job_id)``: whose store it is, for emitted orders."""

    def __init__(
        self,
        device: DevicePages,
        notify: Callable[[], None],
        link: StoreLink,
        client: MooncakeClient,
        request_of: Callable[[JobId], RequestId],
    ) -> None:
        self._client = client
        self._request_of = request_of
        super().__init__(device, notify, link)

    def submit(self, order: TransferOrder) -> None:
        """An emitted order goes on as the bytes of its job, so that it could have come from another process."""
        if order.blocks:
            job = msgspec.msgpack.encode(MooncakeJob.of(order, self._request_of(order.job_id)))
            order = msgspec.msgpack.decode(job, type=MooncakeJob).order(order.tier)
        super().submit(order)

    def _move(self, records: Records, kind: JobKind, moves: Sequence[Move]) -> Sequence[bool]:
        """Stores what is not known to be there: pages of shared prefixes are emitted by every request that has them."""
        names = [record_name(move.key) for move in moves]
        known = [kind is JobKind.STORE and name in self._client.known for name in names]
        new = [move for move, skip in zip(moves, known, strict=True) if not skip]
        answers = iter(super()._move(records, kind, new) if new else ())
        good = [True if skip else next(answers) for skip in known]
        self._client.known.note([name for name, there in zip(names, good, strict=True) if there])
        return good

    def _check(self, batch: Sequence[Record], found: Sequence[bool]) -> Sequence[bool]:
        good = super()._check(batch, found)
        self._client.remove(
            [record.name for record, there, sound in zip(batch, found, good, strict=True) if there and not sound]
        )
        return good
