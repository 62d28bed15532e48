"""A unit's bytes to what lies in a slot, and back: in the clear, or encrypted.

Owns: sealing, checking, encryption, names of records.  Does not own: slots and files.  Any thread.

In the clear a record is its payload and the trailer of ``record``.  Encrypted (AES-256-GCM), payload and trailer are
one ciphertext with a random nonce per record; identity, name and length are authenticated with it, and names are keyed
hashes, so that nobody without the key can test a guess of a prompt.  See ``docs/disk-format.md``.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ostinato.cache.keys import BlockKey
from ostinato.connectors.disk.catalog import Owner
from ostinato.connectors.disk.files import Buffer
from ostinato.connectors.disk.format import SEAL_BYTES, TAIL_BYTES
from ostinato.connectors.record import Fault, RecordIdentity, check, seal
from ostinato.errors import ConfigError
from ostinato.ids import GroupId

KEY_BYTES: Final = 32
_NONCE: Final = 12
_TAG: Final = 16
_NO_SEAL: Final = bytes(SEAL_BYTES)


@dataclass(frozen=True, slots=True)
class Item:
    """One unit on its way: ``payload`` is its place in a device page."""

    key: BlockKey
    ordinal: int
    payload: memoryview


class Codec(Protocol):
    """``owner``: whose records it reads and writes."""

    @property
    def owner(self) -> Owner: ...

    def name(self, key: BlockKey) -> bytes:
        """The record's 34-byte name in the index."""

    def encode(self, item: Item) -> tuple[Buffer, bytes]:
        """Body, as long as the payload, and the slot's last 224 bytes."""

    def decode(self, key: BlockKey, body: memoryview, tail: memoryview) -> Fault | None:
        """Check a record; afterwards ``body`` holds the payload.  What a faulty one leaves there has no meaning."""

    def inspect(self, name: bytes, body: memoryview, tail: memoryview) -> Fault | None:
        """As :meth:`decode`, of a record whose name is known and whose key is not."""


class Clear:
    """Payloads as they are."""

    def __init__(self, identity: RecordIdentity) -> None:
        self.owner = Owner(identity)

    def name(self, key: BlockKey) -> bytes:
        return key.group.to_bytes(2, "little") + key.digest

    def encode(self, item: Item) -> tuple[Buffer, bytes]:
        return item.payload, _NO_SEAL + seal(self.owner.identity, item.key, item.ordinal, [item.payload])

    def decode(self, key: BlockKey, body: memoryview, tail: memoryview) -> Fault | None:
        if tail[:SEAL_BYTES] != _NO_SEAL:
            return Fault.FORMAT
        return check(self.owner.identity, key, [body], tail[SEAL_BYTES:])

    def inspect(self, name: bytes, body: memoryview, tail: memoryview) -> Fault | None:
        return self.decode(BlockKey(GroupId(int.from_bytes(name[:2], "little")), name[2:]), body, tail)


class Encrypted:
    """AES-256-GCM under keys derived from ``secret``, 32 bytes."""

    def __init__(self, identity: RecordIdentity, secret: bytes) -> None:
        assert len(secret) == KEY_BYTES
        cipher, self._invalid = _cipher()
        self._cipher = cipher(_derive(secret, b"payload"))
        self._names = _derive(secret, b"name")
        self.owner = Owner(identity, _derive(secret, b"mark")[:16])

    def name(self, key: BlockKey) -> bytes:
        group = key.group.to_bytes(2, "little")
        return group + hmac.digest(self._names, group + key.digest, hashlib.sha256)

    def encode(self, item: Item) -> tuple[Buffer, bytes]:
        trailer = seal(self.owner.identity, item.key, item.ordinal, [item.payload])
        nonce, length = os.urandom(_NONCE), len(item.payload)
        plain = b"".join((item.payload, trailer))
        text = memoryview(self._cipher.encrypt(nonce, plain, self._context(self.name(item.key), length)))
        front = (nonce + bytes(text[-_TAG:])).ljust(SEAL_BYTES, b"\0")
        return text[:length], front + bytes(text[length:-_TAG])

    def decode(self, key: BlockKey, body: memoryview, tail: memoryview) -> Fault | None:
        trailer = self._decrypt(self.name(key), body, tail)
        return trailer if isinstance(trailer, Fault) else check(self.owner.identity, key, [body], trailer)

    def inspect(self, name: bytes, body: memoryview, tail: memoryview) -> Fault | None:
        trailer = self._decrypt(name, body, tail)
        if isinstance(trailer, Fault):
            return trailer
        key = BlockKey(GroupId(int.from_bytes(name[:2], "little")), key_digest(trailer))
        return check(self.owner.identity, key, [body], trailer) if self.name(key) == name else Fault.IDENTITY

    def _decrypt(self, name: bytes, body: memoryview, tail: memoryview) -> bytes | Fault:
        """Decrypt ``body`` in place; returns the trailer."""
        nonce, tag, zeros = tail[:_NONCE], tail[_NONCE : _NONCE + _TAG], tail[_NONCE + _TAG : SEAL_BYTES]
        if any(zeros):
            return Fault.FORMAT
        text = b"".join((body, tail[SEAL_BYTES:], tag))
        try:
            plain = self._cipher.decrypt(bytes(nonce), text, self._context(name, len(body)))
        except self._invalid:
            return Fault.CHECKSUM
        body[:] = plain[: len(body)]
        return bytes(plain[len(body) :])

    def _context(self, name: bytes, length: int) -> bytes:
        identity, mark = self.owner
        return b"ostinato-disk-1" + identity.layout + identity.namespace + mark + name + length.to_bytes(8, "little")


def key_digest(trailer: bytes) -> bytes:
    return trailer[32:64]


def read_secret(path: str) -> bytes:
    """The key in a file of exactly 32 bytes that only its owner can read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            mode = os.fstat(descriptor).st_mode
            secret = os.read(descriptor, KEY_BYTES + 1) if stat.S_ISREG(mode) else b""
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from None
    if len(secret) != KEY_BYTES:
        raise ConfigError(f"the key file {path} must be a file of exactly 32 bytes: head -c 32 /dev/urandom > {path}")
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"the key file {path} can be read by others: chmod 600 {path}")
    return secret


def make_codec(identity: RecordIdentity, secret: bytes | None) -> Codec:
    return Clear(identity) if secret is None else Encrypted(identity, secret)


def check_encryption() -> None:
    """Raise ConfigError when encryption is asked for and cannot be had."""
    _cipher()


def _cipher() -> tuple[Any, type[Exception]]:
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise ConfigError("key_file needs the package cryptography: pip install 'ostinato[encryption]'") from None
    return AESGCM, InvalidTag


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return hmac.digest(secret, b"ostinato-disk-1 " + purpose, hashlib.sha256)


assert TAIL_BYTES == SEAL_BYTES + 192
