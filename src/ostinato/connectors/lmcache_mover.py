"""An LMCache server's protocol, and the shared memory through which it takes and gives bytes: worker half.

Owns: one client (connection, registration, shared buffer) per thread that talks to the server, and the layout of
records in the buffer.  Does not own: threads, sealing and checking (``store_mover``), what is asked or stored and when
(``lmcache``).  A client belongs to one thread.

The server copies between its own memory and blocks of tensors that a client registers.  What we register is not the
device pool but a buffer in POSIX shared memory, through which records pass::

    buffer    | null block | records of group 0      | records of group 1 ...
    record    | payload: the unit's bytes | trailer: 192 bytes | padding to 64 |        one block of its group

So each unit keeps its trailer and is checked when it comes back, and a server that answers too late writes into memory
that nobody reads any more, never into a page that belongs to another request by then.  Every group is registered as a
tensor over the whole buffer, whose block is one record; block 0 is LMCache's *null block*: nothing to store there, and
what is delivered into it is thrown away.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
import zmq
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transfer_context import create_transfer_context
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from ostinato.cache.kinds import ceil_div, keeps_checkpoints
from ostinato.cache.layout import CacheLayout
from ostinato.connectors.api import Site
from ostinato.connectors.lmcache_claims import Chain, Lookup, peers, stand_ins, trailing_tokens
from ostinato.connectors.lmcache_lookups import Address, Desk, look_up
from ostinato.connectors.record import TRAILER_BYTES
from ostinato.connectors.records import Record
from ostinato.errors import ConnectorError

log: Final = logging.getLogger(__name__)
SLOTS: Final = 16
"""LMCache sees a block as so many rows of bytes, whatever a unit's tokens are."""
ALIGNMENT: Final = 64
REFRESH_S: Final = 5.0
"""A registration is repeated after so long: it costs a millisecond, and the server may have forgotten us."""
SHARED_MEMORY: Final = "/dev/shm"
SLOWEST: Final = 100e6
"""Bytes per second that a server must move at least, not to be taken for one that hangs."""
FIRST_POLL_S: Final = 0.0005
LAST_POLL_S: Final = 0.02


class LMCacheError(Exception):
    """The server did not do what it was asked to."""


def check_server(address: Address, unit: int) -> None:
    """Raise :class:`ConnectorError` when a server that answers has another chunk size.  One that is silent is fine."""
    _check_shared_memory(2 * address.buffer)
    client = _connect(address)
    try:
        _check_chunk(client, address, unit)
    except TimeoutError as error:
        log.warning("tier lmcache: %s; until it answers, nothing is found there and nothing is stored", error)
    finally:
        client.close()


class Placed(NamedTuple):
    """A record of a batch: its place in the batch, and its unit's ordinal."""

    at: int
    record: Record
    ordinal: int


class Buffer:
    """Shared memory of at least ``size`` bytes, as blocks of every group."""

    def __init__(self, layout: CacheLayout, size: int) -> None:
        self._rows = [ceil_div(spec.unit_bytes + TRAILER_BYTES, ALIGNMENT) * ALIGNMENT for spec in layout.groups]
        self._null = max(self._rows)
        self.order = [group for together in peers(layout) for group in together]
        """Groups as LMCache numbers them."""
        size = max(size, 3 * self._null + 2 * sum(self._rows))
        _check_shared_memory(size)
        storage = torch.zeros(size, dtype=torch.uint8)
        self.tensors = {}
        for group in self.order:
            row = self._rows[group]
            self.tensors[f"group{group}"] = storage[: size // row * row].view(size // row, SLOTS, row // SLOTS)
        self.unit_bytes = sum(self._rows)
        """Of one unit of all groups."""
        self._size = size
        self._memory = memoryview(b"")

    def settle(self) -> None:
        """To be called after registering, which moves the tensors into shared memory."""
        first = next(iter(self.tensors.values()))
        whole = torch.as_strided(first, (self._size,), (1,), 0)
        self._memory = memoryview(whole.numpy().data).cast("B")

    def parts(self, batch: Sequence[Placed]) -> Iterator[list[Placed]]:
        """Runs of whole ordinals that fit."""
        part: list[Placed] = []
        used, room = 0, self._size - self._null - sum(self._rows)  # each group begins at a multiple of its row
        for ordinal, placed in _by_ordinal(batch):
            size = sum(self._rows[item.record.key.group] for item in placed)
            if part and used + size > room:
                yield part
                part, used = [], 0
            assert size <= room, (ordinal, size, room)
            part += placed
            used += size
        if part:
            yield part

    def blocks(self, part: Sequence[Placed], first: int, stop: int) -> tuple[list[list[int]], list[int]]:
        """Blocks of units ``first`` to ``stop``, 0 where there is no record, by group; and each record's offset."""
        table = [[0] * (stop - first) for _ in self._rows]
        offsets = [0] * len(part)
        end = self._null
        for group, row in enumerate(self._rows):
            block = ceil_div(end, row)
            for index, item in enumerate(part):
                if item.record.key.group == group:
                    table[group][item.ordinal - first] = block
                    offsets[index] = block * row
                    block += 1
            end = block * row
        return [table[group] for group in self.order], offsets

    def write(self, part: Sequence[Placed], offsets: Sequence[int]) -> None:
        for item, offset in zip(part, offsets, strict=True):
            payload, trailer = self._places(item.record, offset)
            payload[:], trailer[:] = item.record.payload, item.record.trailer

    def read(self, part: Sequence[Placed], offsets: Sequence[int]) -> None:
        for item, offset in zip(part, offsets, strict=True):
            payload, trailer = self._places(item.record, offset)
            item.record.payload[:], item.record.trailer[:] = payload, trailer

    def forget(self, part: Sequence[Placed], offsets: Sequence[int]) -> None:
        """No trailer of an earlier record may pass for one that was just delivered."""
        for item, offset in zip(part, offsets, strict=True):
            self._places(item.record, offset)[1][:] = bytes(TRAILER_BYTES)

    def _places(self, record: Record, offset: int) -> tuple[memoryview, memoryview]:
        end = offset + len(record.payload)
        return self._memory[offset:end], self._memory[end : end + TRAILER_BYTES]


class LMCacheClient:
    """A connection with a registered buffer of ``buffer`` bytes (0: as small as possible).  All calls may block.

    Raises :class:`TimeoutError` when the server does not answer in time, :class:`LMCacheError` when it refuses.
    """

    def __init__(self, address: Address, site: Site, buffer: int = 0) -> None:
        self.buffer = Buffer(site.layout, buffer)
        self._unit = site.layout.base_unit
        self._timeout = address.timeout
        self._model = f"ostinato1-{site.identity.namespace.hex()}"
        kinds = [site.layout.groups[group].kind for group in self.buffer.order]
        self._groups = [
            EngineGroupInfo(
                engine_group_id=number,
                layer_indices=(number,),
                tokens_per_block=self._unit,
                sw_size_tokens=trailing_tokens(kind, self._unit),
                recurrent_state=keeps_checkpoints(kind),
            )
            for number, kind in enumerate(kinds)
        ]
        self._client = _connect(address)
        try:
            _check_chunk(self._client, address, self._unit)
            self._transfer = create_transfer_context(
                self.buffer.tensors,
                instance_id=uuid.uuid4().int >> 65,
                req_client=self._client,
                mode="lmcache_driven",
            )
            self._registered: float | None = None
            self._refresh()
            self.buffer.settle()
        except BaseException:
            self._client.close()
            raise

    def look_up(self, name: str, chain: Chain) -> int:
        """Units of ``chain`` that can be restored.  More than 0: the server holds them until :meth:`end`."""
        self._refresh()
        until = time.monotonic() + self._timeout
        self._client.lookup(self._key(name, chain, None, 0, len(chain)), 1).result(timeout=self._timeout)
        pause = FIRST_POLL_S
        while (units := self._client.query_prefetch_status(name).result(timeout=self._timeout)) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"no answer to a lookup within {self._timeout} s")
            time.sleep(pause)
            pause = min(2 * pause, LAST_POLL_S)
        if not units:
            self._client.end_session(name).result(timeout=self._timeout)
        return int(units)

    def end(self, lookup: Lookup, used: range = range(0)) -> None:
        """Release what a lookup holds, but for the units ``used``, which a load has released."""
        stop = len(lookup.chain)
        for span in (range(used.start), range(used.stop, stop)) if used else (range(stop),):
            if span:
                key = self._key(lookup.name, lookup.chain, None, span.start, span.stop)
                self._client.free_lookup_locks(key, 1).result(timeout=self._timeout)
        self._client.end_session(lookup.name).result(timeout=self._timeout)

    def retrieve(self, lookup: Lookup, units: range, blocks: list[list[int]]) -> bool:
        """Fill ``blocks`` with ``units``; False when something is not there any more.  Ends the lookup."""
        self._refresh()
        key = self._key(lookup.name, lookup.chain, 0, units.start, units.stop)
        event = self._transfer.create_recorded_event()
        future = self._transfer.submit_retrieve(lookup.name, key, self.buffer.tensors, blocks, event, 1)
        done = bool(future.result(timeout=self._patience(units)))
        self.end(lookup, units)
        return done

    def store(self, name: str, chain: Chain, units: range, blocks: list[list[int]]) -> None:
        """Store ``blocks`` as ``units`` of ``chain``.  What the server has no room for it drops without a word."""
        self._refresh()
        key = self._key(name, chain, 0, units.start, units.stop)
        event = self._transfer.create_recorded_event()
        future = self._transfer.submit_store(name, key, self.buffer.tensors, blocks, event, 1)
        done = future.result(timeout=self._patience(units))
        self._client.end_session(name).result(timeout=self._timeout)
        if not done:
            raise LMCacheError("the server did not take what it was given")

    def close(self) -> None:
        try:
            future = self._transfer.unregister()
            if future is not None:
                future.result(timeout=self._timeout)
        finally:
            self._transfer.close()
            self._client.close()

    def _patience(self, units: range) -> float:
        return self._timeout + len(units) * self.buffer.unit_bytes / SLOWEST

    def _key(self, name: str, chain: Chain, worker: int | None, first: int, stop: int) -> Any:
        return IPCCacheServerKey(
            model_name=self._model,
            world_size=1,
            worker_id=worker,
            token_ids=stand_ins(chain[:stop], self._unit),
            start=first * self._unit,
            end=stop * self._unit,
            request_id=name,
            num_kv_readers=1,
        )

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._registered is None or now - self._registered > REFRESH_S:
            self._transfer.register(
                self.buffer.tensors,
                self._model,
                1,
                1,
                self._timeout,
                layout_hints={"kv_layout": "NHD"},
                engine_group_infos=self._groups,
            )
            self._registered = now


class LMCacheRecords:
    """One thread's loads or stores (``records.Records``)."""

    def __init__(self, client: LMCacheClient, desk: Desk) -> None:
        self._client = client
        self._desk = desk
        groups = desk.layout.groups
        self._cuts_only = any(trailing_tokens(spec.kind, spec.hash_unit) >= 0 for spec in groups)
        """Whether some group can be restored at the end of what was looked up only."""
        self._peers = {group: together for together in peers(desk.layout) for group in together}

    def load(self, batch: Sequence[Record]) -> Sequence[bool]:
        good = [False] * len(batch)
        taken = self._desk.claims.take([record.key for record in batch])
        if taken is None:
            return good
        chain, lookup = taken
        buffer = self._client.buffer
        for part in buffer.parts(_placed(batch, chain)):
            lookup = lookup or self._look_up(chain)
            if lookup is None:
                break
            stop = len(chain) if self._cuts_only else part[-1].ordinal + 1
            units = range(part[0].ordinal, stop)
            blocks, offsets = buffer.blocks(part, units.start, units.stop)
            buffer.forget(part, offsets)
            done = self._client.retrieve(lookup, units, blocks)
            lookup = None
            if done:
                buffer.read(part, offsets)
                for item in part:
                    good[item.at] = True
        return good

    def _look_up(self, chain: Chain) -> Lookup | None:
        """A lookup that holds all of ``chain``."""
        lookup = look_up(self._desk, self._client, chain)
        if lookup is not None and len(lookup.chain) < len(chain):
            self._client.end(lookup)
            return None
        return lookup

    def store(self, batch: Sequence[Record]) -> Sequence[bool]:
        good = [record.key in self._desk.written for record in batch]
        missing = [index for index, known in enumerate(good) if not known]
        chain = self._desk.written.chain_of([batch[index].key for index in missing]) if missing else None
        if chain is None:
            return good
        placed = [
            Placed(missing[item.at], item.record, item.ordinal) for item in _placed([batch[i] for i in missing], chain)
        ]
        buffer = self._client.buffer
        for part in buffer.parts(self._complete(placed)):
            units = range(part[0].ordinal, part[-1].ordinal + 1)
            blocks, offsets = buffer.blocks(part, units.start, units.stop)
            buffer.write(part, offsets)
            self._client.store(self._desk.names(), chain, units, blocks)
            for item in part:
                good[item.at] = True
        return good

    def _complete(self, placed: Sequence[Placed]) -> list[Placed]:
        """Those whose peers are there too: an object that lacks one would have garbage in its place."""
        there = {(item.ordinal, item.record.key.group) for item in placed}
        return [
            item for item in placed if all((item.ordinal, peer) in there for peer in self._peers[item.record.key.group])
        ]

    def close(self) -> None:
        self._client.close()


def _placed(batch: Sequence[Record], chain: Chain) -> list[Placed]:
    ordinals = {digest: ordinal for ordinal, digest in enumerate(chain)}
    return [Placed(index, record, ordinals[record.key.digest]) for index, record in enumerate(batch)]


def _by_ordinal(batch: Sequence[Placed]) -> list[tuple[int, list[Placed]]]:
    units: dict[int, list[Placed]] = {}
    for item in batch:
        units.setdefault(item.ordinal, []).append(item)
    return sorted(units.items())


def _connect(address: Address) -> Any:
    context = zmq.Context()
    context.linger = 0  # what was not sent to a dead server does not hold up the end of the process
    return RequestClientFactory.create(address.url, context=context)


def _check_chunk(client: Any, address: Address, unit: int) -> None:
    try:
        chunk = int(client.get_chunk_size().result(timeout=address.timeout))
    except TimeoutError:
        raise TimeoutError(f"no answer from {address.url} within {address.timeout} s") from None
    if chunk != unit:
        raise ConnectorError(
            f"the LMCache server at {address.url} has chunks of {chunk} tokens; start it with --chunk-size {unit}"
        )


def _check_shared_memory(wanted: int) -> None:
    """A process that writes to more than there is would be killed."""
    there = os.statvfs(SHARED_MEMORY)
    free = there.f_bavail * there.f_frsize
    if wanted > free:
        raise ConnectorError(
            f"tier lmcache wants {wanted / 2**20:.0f} MiB in {SHARED_MEMORY}, where {free / 2**20:.0f} MiB are free: "
            "make it larger, or give a smaller ?buffer="
        )
