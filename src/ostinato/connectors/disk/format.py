"""What the files of a disk cache look like: names, slots, and the frames of the index.  Pure; any thread.

Owns: the format (``docs/disk-format.md``) and its version.  Does not own: the trailer's fields (``record``), files.

::

    slot    | payload, L bytes | zeros | seal, 32 bytes | trailer, 192 bytes |               see slot_bytes()
    index   | header, 64 bytes | frame | frame | ...
    header  0 magic "OSTINLOG" or "OSTINSNP" | 8 version u16 | 10 zeros | 16 generation u64 | 24 zeros | 56 checksum u64
    frame   0 length of body u32 | 4 kind u8, zeros | 8 body | then checksum u64: XXH3-64 of all before it, seeded with
            generation and offset, so that no frame is taken for one of another place
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

import xxhash

from ostinato.connectors.record import TRAILER_BYTES

VERSION: Final = 1
BLOCK: Final = 4096
"""What calls past the page cache are aligned to."""
GRAIN: Final = 64
SEAL_BYTES: Final = 32
TAIL_BYTES: Final = SEAL_BYTES + TRAILER_BYTES
NAME_BYTES: Final = 34
HEADER_BYTES: Final = 64
LOG_MAGIC: Final = b"OSTINLOG"
SNAPSHOT_MAGIC: Final = b"OSTINSNP"
LOCK_NAME: Final = "lock"
REQUEST_NAME: Final = "request"
TOOL_LOCK_NAME: Final = "tool"
"""Of the one tool at a time that asks the writer for something."""

PUT: Final = struct.Struct("<34sHIIIQQ")
"""Name, identity number, slab, slot, last use in seconds since 1970, length, ordinal."""
SLAB: Final = struct.Struct("<IIQ")
"""Number, count of slots, bytes of a slot.  As a body of ``DROP_SLAB``: the same."""
IDENTITY: Final = struct.Struct("<HH4x32s32s16s")
"""Number, flags (1 = encrypted), layout, namespace, mark of the encryption key (zeros without)."""
MODEL: Final = struct.Struct("<H")
"""Identity number, then the model's name for people, UTF-8."""
MAX_MODEL_BYTES: Final = 120
END: Final = struct.Struct("<QII")
"""Records of the snapshot, next slab number, zero."""
_HEADER: Final = struct.Struct("<8sH6xQ32x")
_FRAME: Final = struct.Struct("<IB3x")
_CHECK: Final = struct.Struct("<Q")
FRAME_BYTES: Final = _FRAME.size + _CHECK.size
MAX_FRAME_PUTS: Final = 128
_NAME: Final = re.compile(r"(slab|log|snapshot)-([0-9a-f]{8})(?:-([0-9a-f]{1,12}))?(\.tmp)?")


class Kind(Enum):
    """What a frame's body holds."""

    PUT = 1
    DROP = 2
    SLAB = 3
    DROP_SLAB = 4
    IDENTITY = 5
    END = 6
    MODEL = 7


@dataclass(frozen=True, slots=True)
class Frame:
    """``end``: offset just behind the frame."""

    kind: Kind
    body: memoryview
    end: int


@dataclass(frozen=True, slots=True)
class FileName:
    """A file of ours.  ``number``: of the slab, or the generation; ``slot_bytes`` of a slab."""

    role: str
    number: int
    slot_bytes: int = 0
    temporary: bool = False

    @classmethod
    def parse(cls, name: str) -> FileName | None:
        match = _NAME.fullmatch(name)
        if match is None or (match[1] == "slab") != (match[3] is not None):
            return None
        return cls(match[1], int(match[2], 16), int(match[3] or "0", 16), match[4] is not None)

    def __str__(self) -> str:
        size = f"-{self.slot_bytes:x}" if self.role == "slab" else ""
        return f"{self.role}-{self.number:08x}{size}{'.tmp' if self.temporary else ''}"


class FutureVersionError(Exception):
    """The index was written by a newer version."""


def slot_bytes(length: int, direct: bool = False) -> int:
    """Bytes of the slot of a record of ``length`` bytes.

    Rounded up to a power of two of at most 1/64 of the record and at most 4096: little is wasted on small records, and
    large ones, which are often replaced one by one, share no block.  ``direct``: to 4096.
    """
    size = length + TAIL_BYTES
    grain = BLOCK if direct else max(GRAIN, min(BLOCK, 1 << (size // 64).bit_length() >> 1))
    return -(-size // grain) * grain


def fits(length: int, slot: int) -> bool:
    """Whether a slot of ``slot`` bytes may hold a record of ``length`` bytes."""
    return TAIL_BYTES <= slot - length < TAIL_BYTES + BLOCK


def header(magic: bytes, generation: int, version: int = VERSION) -> bytes:
    raw = _HEADER.pack(magic, version, generation)
    return raw + _CHECK.pack(xxhash.xxh3_64_intdigest(raw))


def generation_of(raw: bytes | bytearray | memoryview, magic: bytes) -> int | None:
    """The generation that a file's header states; None when there is no header, or one of an older version.

    Raises FutureVersionError: the 64 bytes of a header, with their checksum, are the same in every version.
    """
    if len(raw) < HEADER_BYTES:
        return None
    found, version, generation = _HEADER.unpack_from(raw)
    sound = _CHECK.unpack_from(raw, _HEADER.size)[0] == xxhash.xxh3_64_intdigest(raw[: _HEADER.size])
    if not sound or found != magic:
        return None
    if version > VERSION:
        raise FutureVersionError(version)
    return int(generation) if version == VERSION else None


def frame(kind: Kind, body: bytes, generation: int, offset: int) -> bytes:
    raw = _FRAME.pack(len(body), kind.value) + body
    return raw + _CHECK.pack(xxhash.xxh3_64_intdigest(raw, _seed(generation, offset)))


def frames(raw: memoryview, generation: int, base: int, start: int) -> Iterator[Frame]:
    """Sound frames from offset ``start`` on, up to the first that is not; ``raw`` is the file from ``base`` on."""
    kinds = {kind.value: kind for kind in Kind}
    place, stop = start - base, len(raw)
    while place + FRAME_BYTES <= stop:
        length, kind = _FRAME.unpack_from(raw, place)
        end = place + _FRAME.size + length
        if end + _CHECK.size > stop:
            return
        check = xxhash.xxh3_64_intdigest(raw[place:end], _seed(generation, base + place))
        if kind not in kinds or check != _CHECK.unpack_from(raw, end)[0]:
            return
        yield Frame(kinds[kind], raw[place + _FRAME.size : end], base + end + _CHECK.size)
        place = end + _CHECK.size


def _seed(generation: int, offset: int) -> int:
    return (generation << 40 ^ offset) & 0xFFFFFFFFFFFFFFFF
