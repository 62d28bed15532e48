"""What the index says, in memory: slabs, identities and entries, built from frames and written as frames.

Owns: the meaning of each frame.  Does not own: files (``journal``), bytes of records.  Changes under the store's lock.
An entry is a claim: it is believed only after the record's trailer was checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from ostinato.connectors.disk.format import (
    END,
    IDENTITY,
    MAX_FRAME_PUTS,
    MAX_MODEL_BYTES,
    MODEL,
    NAME_BYTES,
    PUT,
    SLAB,
    Frame,
    Kind,
)
from ostinato.connectors.disk.index import Entry, Index
from ostinato.connectors.disk.slabs import MAX_SLOTS, Slab, SlabClass
from ostinato.connectors.record import RecordIdentity


class Owner(NamedTuple):
    """Who wrote a record: identity, and a mark of the key it is encrypted with (zeros: in the clear)."""

    identity: RecordIdentity
    key_mark: bytes = bytes(16)

    @property
    def label(self) -> str:
        """A short name for people and tools."""
        return hashlib.sha256(self.identity.layout + self.identity.namespace + self.key_mark).hexdigest()[:16]


@dataclass(slots=True)
class Catalog:
    """The state that the frames so far add up to."""

    index: Index = field(default_factory=Index)
    slabs: dict[int, Slab] = field(default_factory=dict)
    classes: dict[int, SlabClass] = field(default_factory=dict)
    owners: dict[int, Owner] = field(default_factory=dict)
    models: dict[int, str] = field(default_factory=dict)
    """What people call the model of an owner."""
    next_slab: int = 0
    now: int = 0xFFFFFFFF
    """Uses later than this are taken for now: the clock was wrong."""

    def apply(self, frame: Frame) -> None:
        """Frames whose bodies make no sense are skipped: what they claim would not be believed anyway."""
        body = frame.body
        match frame.kind:
            case Kind.PUT if len(body) % PUT.size == 0:
                self._put(body)
            case Kind.DROP if len(body) % NAME_BYTES == 0:
                for place in range(0, len(body), NAME_BYTES):
                    entry = self.index.get(bytes(body[place : place + NAME_BYTES]))
                    if entry is not None:
                        self.index.remove(entry)
            case Kind.SLAB if len(body) == SLAB.size:
                number, slots, slot_bytes = SLAB.unpack(body)
                plausible = 0 < slots <= MAX_SLOTS and 0 < slot_bytes < 1 << 40
                if number not in self.slabs and plausible:
                    self.add_slab(Slab(number, slot_bytes, slots))
            case Kind.DROP_SLAB if len(body) == SLAB.size:
                slab = self.slabs.get(SLAB.unpack(body)[0])
                if slab is not None:
                    self.drop_slab(slab)
            case Kind.IDENTITY if len(body) == IDENTITY.size:
                number, _, layout, namespace, mark = IDENTITY.unpack(body)
                self.owners[number] = Owner(RecordIdentity(layout, namespace), mark)
            case Kind.MODEL if MODEL.size <= len(body) <= MODEL.size + MAX_MODEL_BYTES:
                self.models[MODEL.unpack_from(body)[0]] = bytes(body[MODEL.size :]).decode(errors="replace")
            case Kind.END if len(body) == END.size:
                self.next_slab = max(self.next_slab, END.unpack(body)[1])

    def add_slab(self, slab: Slab) -> None:
        self.slabs[slab.number] = slab
        self.classes.setdefault(slab.slot_bytes, SlabClass(slab.slot_bytes)).slabs[slab.number] = slab
        self.next_slab = max(self.next_slab, slab.number + 1)

    def drop_slab(self, slab: Slab) -> None:
        """Forget the slab and all that lies in it."""
        for entry in self.index.in_slab(slab):
            self.index.remove(entry)
        del self.slabs[slab.number]
        some = self.classes[slab.slot_bytes]
        del some.slabs[slab.number]
        if not some.slabs:
            del self.classes[slab.slot_bytes]

    def forget_unused_owners(self) -> None:
        used = {entry.identity for entry in self.index}
        self.owners = {number: owner for number, owner in self.owners.items() if number in used}
        self.models = {number: model for number, model in self.models.items() if number in used}

    def slots(self) -> int:
        return sum(slab.slots for slab in self.slabs.values())

    def slab_bytes(self) -> int:
        return sum(slab.file_bytes for slab in self.slabs.values())

    def number_of(self, owner: Owner) -> int | None:
        return next((number for number, known in self.owners.items() if known == owner), None)

    def bodies(self) -> Iterator[tuple[Kind, bytes]]:
        """A snapshot of all that is durable."""
        for number, owner in self.owners.items():
            yield Kind.IDENTITY, identity_body(number, owner)
        for number, model in self.models.items():
            yield Kind.MODEL, model_body(number, model)
        for slab in self.slabs.values():
            yield Kind.SLAB, slab_body(slab)
        count = 0
        for body, records in put_bodies(entry for entry in self.index if entry.durable):
            count += records
            yield Kind.PUT, body
        yield Kind.END, END.pack(count, self.next_slab, 0)

    def _put(self, body: memoryview) -> None:
        index, slabs, now = self.index, self.slabs, self.now
        for name, identity, number, slot, used, length, ordinal in PUT.iter_unpack(body):
            slab = slabs.get(number)
            if slab is None or slot >= slab.slots:
                continue
            known = index.get(name)
            if known is not None:
                index.remove(known)
            if not slab.used[slot]:
                slab.used[slot] = 1
                slab.free -= 1
                index.add(Entry(name, identity, slab, slot, min(used, now), length, ordinal))


def put_bodies(entries: Iterable[Entry]) -> Iterator[tuple[bytes, int]]:
    """Bodies of PUT frames, each with the number of its records."""
    rest = iter(entries)
    while some := list(islice(rest, MAX_FRAME_PUTS)):
        packed = [PUT.pack(e.name, e.identity, e.slab.number, e.slot, e.used, e.length, e.ordinal) for e in some]
        yield b"".join(packed), len(some)


def slab_body(slab: Slab) -> bytes:
    return SLAB.pack(slab.number, slab.slots, slab.slot_bytes)


def identity_body(number: int, owner: Owner) -> bytes:
    return IDENTITY.pack(number, any(owner.key_mark), owner.identity.layout, owner.identity.namespace, owner.key_mark)


def model_body(number: int, model: str) -> bytes:
    return MODEL.pack(number) + model.encode(errors="replace")[:MAX_MODEL_BYTES]
