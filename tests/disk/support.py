"""Records of known contents, and stores over a folder, for the tests of the disk tier.  Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from ostinato.cache.keys import BlockKey
from ostinato.connectors.disk.codec import Clear, Codec, Item
from ostinato.connectors.disk.files import Folder, OsFolder
from ostinato.connectors.disk.format import LOCK_NAME
from ostinato.connectors.disk.store import DiskStore
from ostinato.connectors.record import RecordIdentity
from ostinato.ids import GroupId

IDENTITY = RecordIdentity(b"L" * 32, b"N" * 32)
OTHER = RecordIdentity(b"L" * 32, b"M" * 32)
CLEAR = Clear(IDENTITY)
LENGTH = 3000
MIB = 1 << 20


def key(number: int, group: int = 0) -> BlockKey:
    return BlockKey(GroupId(group), hashlib.sha256(b"key %d" % number).digest())


def payload(number: int, length: int = LENGTH, group: int = 0) -> bytes:
    """What must be found under ``key(number, group)``."""
    return hashlib.shake_128(b"%d/%d" % (group, number)).digest(length)


def item(number: int, length: int = LENGTH, group: int = 0) -> Item:
    return Item(key(number, group), number, memoryview(bytearray(payload(number, length, group))))


def target(number: int, length: int = LENGTH, group: int = 0) -> Item:
    return Item(key(number, group), number, memoryview(bytearray(b"\xee" * length)))


def open_store(folder: Folder, budget: int = 8 * MIB, **options: Any) -> DiskStore:
    assert folder.lock(LOCK_NAME), "another writer"
    return DiskStore(folder, budget, **options)


def open_path(path: Any, budget: int = 8 * MIB, **options: Any) -> DiskStore:
    return open_store(OsFolder(str(path)), budget, **options)


def close(store: DiskStore) -> None:
    """Gracefully."""
    store.close()
    store.folder.close()


def abandon(store: DiskStore) -> None:
    """As if the process had ended just now: nothing is synced or logged any more."""
    store._journal.close()
    store.files.close()
    store.folder.close()


def put(store: DiskStore, numbers: Iterable[int], length: int = LENGTH, codec: Codec = CLEAR, group: int = 0) -> int:
    """Store records; returns how many are held now."""
    return sum(store.write(codec, [item(number, length, group) for number in numbers]))


def get(store: Any, numbers: Sequence[int], length: int = LENGTH, codec: Codec = CLEAR, group: int = 0) -> set[int]:
    """Load records; the numbers that were hits, after checking every byte of them."""
    targets = [target(number, length, group) for number in numbers]
    found = store.read(codec, targets)
    for number, one, hit in zip(numbers, targets, found, strict=True):
        assert not hit or bytes(one.payload) == payload(number, length, group), f"record {number} is wrong"
    return {number for number, hit in zip(numbers, found, strict=True) if hit}


def folder_bytes(folder: Folder) -> int:
    return sum(folder.sizes().values())
