"""What a cached unit looks like outside of the process: its bytes, then a trailer that says what they are.

Owns: the trailer's format, sealing and checking.  Does not own: where records lie, who moves them.  Pure; any thread.
A record that differs in any field from what was asked for is a miss: nobody has to trust a store.

::

    record    | payload: the unit's bytes, length L                                   | trailer: 192 bytes        |
    trailer   0    magic   "OSTINREC"
              8    version u16, group u16, zero u32
              16   length L u64
              24   ordinal u64: the unit's number in its sequence
              32   key, 32 bytes: the chain digest at the unit's end
              64   layout, 32 bytes: fingerprint of the cache layout
              96   namespace, 32 bytes: digest of weights, config, dtype and numerics
              128  checksum, 16 bytes: XXH3-128 of payload and of trailer[0:128]
              144  zero, 48 bytes

All numbers little-endian.  The checksum is against accidents, not against an attacker.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

import xxhash

from ostinato.cache.keys import BlockKey

MAGIC: Final = b"OSTINREC"
VERSION: Final = 1
TRAILER_BYTES: Final = 192
_FIELDS: Final = struct.Struct("<8sHHIQQ32s32s32s")
_START: Final = struct.Struct("<8sHHIQ")
"""Of ``_FIELDS``, what comes before the ordinal, which a reader does not know."""
_NAMES: Final = _START.size + 8
_DIGEST_BYTES: Final = 16
_USED: Final = _FIELDS.size + _DIGEST_BYTES
_REST: Final = bytes(TRAILER_BYTES - _USED)

Buffer: TypeAlias = bytes | bytearray | memoryview


class Fault(Enum):
    """Why a record is not what was asked for."""

    TRUNCATED = "truncated"
    """Fewer or more bytes than the payload and its trailer."""
    FORMAT = "format"
    """No trailer of ours, or of another version."""
    IDENTITY = "identity"
    """Another key, group, layout or namespace."""
    CHECKSUM = "checksum"
    """The bytes were changed."""


@dataclass(frozen=True, slots=True)
class RecordIdentity:
    """What all records of one engine have in common: 32-byte digests of its layout and of its namespace."""

    layout: bytes
    namespace: bytes

    def __post_init__(self) -> None:
        assert len(self.layout) == len(self.namespace) == 32


def seal(identity: RecordIdentity, key: BlockKey, ordinal: int, payload: Iterable[Buffer]) -> bytes:
    """The trailer of a record whose payload is ``payload``, in pieces."""
    pieces = list(payload)
    fields = _FIELDS.pack(
        MAGIC, VERSION, key.group, 0, _length(pieces), ordinal, key.digest, identity.layout, identity.namespace
    )
    return fields + _checksum(pieces, fields) + _REST


def check(identity: RecordIdentity, key: BlockKey, payload: Iterable[Buffer], trailer: Buffer) -> Fault | None:
    """None when ``payload`` is what was stored under ``key`` by an engine of this identity."""
    pieces, raw = list(payload), bytes(trailer)
    length, names = _length(pieces), key.digest + identity.layout + identity.namespace
    start = _START.pack(MAGIC, VERSION, key.group, 0, length)
    if not (raw.startswith(start) and raw[_NAMES : _FIELDS.size] == names and raw[_USED:] == _REST):
        return _difference(raw, key, names)
    if raw[_FIELDS.size : _USED] != _checksum(pieces, raw[: _FIELDS.size]):
        return Fault.CHECKSUM
    return None


def _difference(raw: bytes, key: BlockKey, names: bytes) -> Fault:
    """What is wrong with a trailer that is not the expected one."""
    if len(raw) != TRAILER_BYTES:
        return Fault.TRUNCATED
    magic, version, group, zero, _ = _START.unpack_from(raw)
    if magic != MAGIC or version != VERSION or zero or raw[_USED:] != _REST:
        return Fault.FORMAT
    if group != key.group or raw[_NAMES : _FIELDS.size] != names:
        return Fault.IDENTITY
    return Fault.TRUNCATED


def _length(pieces: Sequence[Buffer]) -> int:
    total = 0
    for piece in pieces:
        total += memoryview(piece).nbytes
    return total


def _checksum(payload: Iterable[Buffer], fields: bytes) -> bytes:
    digest = xxhash.xxh3_128()
    for piece in payload:
        digest.update(piece)
    digest.update(fields)
    return digest.digest()
