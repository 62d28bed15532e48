"""A record that is not what was asked for is a miss, whatever happened to its bytes, and it is found out every time."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from disk.simulated import SimulatedFolder
from disk.support import CLEAR, IDENTITY, LENGTH, OTHER, close, get, item, key, open_path, open_store, payload, put
from ostinato.connectors.disk.codec import Clear, Codec, Encrypted
from ostinato.connectors.disk.format import (
    LOG_MAGIC,
    SNAPSHOT_MAGIC,
    VERSION,
    FileName,
    FutureVersionError,
    header,
    slot_bytes,
)
from ostinato.connectors.disk.store import DiskStore

SECRET = bytes(range(32))
COUNT = 20
SIZE = slot_bytes(LENGTH)
AREAS = {
    "payload": range(LENGTH),
    "filling": range(LENGTH, SIZE - 224),
    "seal": range(SIZE - 224, SIZE - 192),
    "trailer": range(SIZE - 192, SIZE),
}
CODECS: list[Codec] = [CLEAR, Encrypted(IDENTITY, SECRET)]


def stored(codec: Codec = CLEAR) -> SimulatedFolder:
    folder = SimulatedFolder()
    store = open_store(folder)
    assert put(store, range(COUNT), codec=codec) == COUNT
    store.close()
    return folder.copy()


def slab_of(folder: SimulatedFolder) -> bytearray:
    (name,) = [name for name in folder.sizes() if name.startswith("slab")]
    return folder.bytes_of(name)


def place(store: DiskStore, number: int, codec: Codec = CLEAR) -> int:
    entry = store.catalog.index.get(codec.name(key(number)))
    assert entry is not None
    return entry.slot * SIZE


@pytest.mark.parametrize("codec", CODECS, ids=["clear", "encrypted"])
@pytest.mark.parametrize("area", AREAS)
def test_every_flipped_byte_is_found(codec: Codec, area: str) -> None:
    store = open_store(stored(codec))
    slab = slab_of(store.folder)  # type: ignore[arg-type]
    rng = random.Random(area)
    where = list(AREAS[area]) if area != "payload" else rng.sample(AREAS[area], 200)
    start = place(store, 3, codec)
    for offset in where:
        slab[start + offset] ^= 1 << rng.randrange(8)
        assert get(store, [2, 3, 4], codec=codec) == {2, 4}, f"byte {offset}"
        assert get(store, [3], codec=codec) == set(), "a bad record stays in the index"
        assert put(store, [3], codec=codec) == 1
        start = place(store, 3, codec)
    assert store.stats.faults.total() == len(where)


def damage(change: Callable[[SimulatedFolder, DiskStore], None], codec: Codec = CLEAR) -> tuple[set[int], DiskStore]:
    folder = stored(codec)
    peek = open_store(folder.copy())
    change(folder, peek)
    store = open_store(folder)
    return get(store, range(COUNT), codec=codec), store  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", CODECS, ids=["clear", "encrypted"])
def test_swapped_slots(codec: Codec) -> None:
    def swap(folder: SimulatedFolder, store: DiskStore) -> None:
        slab, a, b = slab_of(folder), place(store, 1, codec), place(store, 2, codec)
        slab[a : a + SIZE], slab[b : b + SIZE] = slab[b : b + SIZE], slab[a : a + SIZE]

    found, store = damage(swap, codec)
    assert found == set(range(COUNT)) - {1, 2}
    assert store.stats.faults.total() == 2


def test_a_truncated_slab_is_forgotten() -> None:
    def cut(folder: SimulatedFolder, store: DiskStore) -> None:
        del slab_of(folder)[-1:]

    found, store = damage(cut)
    assert found == set()
    assert put(store, range(COUNT)) == COUNT


def test_a_slab_that_shrinks_while_it_is_used() -> None:
    store = open_store(stored())
    del slab_of(store.folder)[place(store, 7) + 100 :]  # type: ignore[arg-type]
    found = get(store, range(COUNT))  # type: ignore[arg-type]
    assert found < set(range(COUNT))
    assert 7 not in found


def test_an_extended_slab_is_as_good() -> None:
    found, _ = damage(lambda folder, store: slab_of(folder).extend(b"more"))
    assert found == set(range(COUNT))


def test_records_of_another_group_identity_or_length() -> None:
    store = open_store(stored())
    assert get(store, range(COUNT), codec=Clear(OTHER)) == set()  # type: ignore[arg-type]
    assert get(store, range(COUNT), group=1) == set()  # type: ignore[arg-type]
    assert get(store, range(COUNT), length=LENGTH + 1) == set()  # type: ignore[arg-type]
    assert get(store, range(COUNT), codec=Encrypted(IDENTITY, SECRET)) == set()  # type: ignore[arg-type]
    assert not store.stats.faults, "the index alone tells these apart"
    assert get(store, range(COUNT)) == set(range(COUNT))  # type: ignore[arg-type]


@pytest.mark.parametrize("which", ["group", "identity", "key", "secret"])
def test_an_index_that_lies(which: str) -> None:
    """The record in the slot is sound, but another one."""
    writer: Codec = {"identity": Clear(OTHER), "secret": Encrypted(IDENTITY, bytes(32))}.get(which, CLEAR)
    reader: Codec = Encrypted(IDENTITY, SECRET) if which == "secret" else CLEAR
    folder = SimulatedFolder()
    store = open_store(folder)
    put(store, [0], codec=writer, group=1 if which == "group" else 0)
    (entry,) = store.catalog.index
    store.catalog.index.remove(entry)
    entry.slab.take(entry.slot, 1)
    entry.identity = store.space.number_of(reader.owner)
    entry.name = reader.name(key(1 if which == "key" else 0))
    store.catalog.index.add(entry)
    assert store.holds(reader, entry.name)
    assert get(store, [1 if which == "key" else 0], codec=reader) == set()
    assert store.stats.faults.total() == 1


def test_a_stale_index() -> None:
    """The index is from before many slots were used again."""
    folder = SimulatedFolder()
    store = open_store(folder, 1 << 20, clock=lambda: float(folder.operations))
    put(store, range(100))
    store.flush()
    old = {name: bytes(folder.bytes_of(name)) for name in folder.sizes() if not name.startswith("slab")}
    for number in range(100, 1000, 50):
        put(store, range(number, number + 50))
    store.close()
    later = folder.copy()
    for name in list(later.sizes()):
        if name not in old and not name.startswith("slab"):
            later.remove(name)
    for name, content in old.items():
        file = later.open(name, _create())
        file.truncate(0)
        file.write([content], 0)
    again = open_store(later, 1 << 20)
    claimed = len(again.catalog.index)
    found = get(again, list(range(1000)))
    assert claimed == 100
    assert again.stats.faults.total() == claimed - len(found)
    assert len(found) < 100


def _create() -> object:
    from ostinato.connectors.disk.files import Access

    return Access.CREATE


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("role", ["log", "snapshot"])
def test_a_damaged_index_never_lies(seed: int, role: str) -> None:
    rng = random.Random(seed)
    folder = SimulatedFolder()
    store = open_store(folder)
    put(store, range(COUNT))
    store.flush()
    if role == "snapshot":
        get(store, [1])
        store.close()
    damaged = folder.copy()
    (name,) = [name for name in damaged.sizes() if name.startswith(role)]
    raw = damaged.bytes_of(name)
    match seed % 3:
        case 0:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        case 1:
            del raw[rng.randrange(len(raw)) :]
        case _:
            start = rng.randrange(len(raw))
            raw[start : start + 64] = rng.randbytes(len(raw[start : start + 64]))
    again = open_store(damaged)
    found = get(again, range(COUNT))  # type: ignore[arg-type]
    assert not again.stats.faults, "what the index says was checked before it was believed"
    assert put(again, range(COUNT)) == COUNT
    assert get(again, range(COUNT)) == set(range(COUNT)) >= found  # type: ignore[arg-type]
    again.close()
    assert get(open_store(damaged.copy()), range(COUNT)) == set(range(COUNT))  # type: ignore[arg-type]


def test_a_torn_end_of_the_log_is_cut_off() -> None:
    folder = SimulatedFolder()
    store = open_store(folder)
    put(store, range(COUNT))
    store.flush()
    torn = folder.copy()
    (name,) = [name for name in torn.sizes() if name.startswith("log")]
    torn.bytes_of(name).extend(b"\x07" * 100)
    again = open_store(torn)
    assert put(again, range(COUNT, 2 * COUNT)) == COUNT
    again.close()
    assert get(open_store(torn.copy()), range(2 * COUNT)) == set(range(2 * COUNT))  # type: ignore[arg-type]


@pytest.mark.parametrize("magic", [LOG_MAGIC, SNAPSHOT_MAGIC])
def test_an_index_of_a_newer_version_is_left_alone(magic: bytes) -> None:
    folder = SimulatedFolder()
    role = "log" if magic == LOG_MAGIC else "snapshot"
    raw = header(magic, 0, VERSION + 1)
    file = folder.open(str(FileName(role, 0)), _create())  # type: ignore[arg-type]
    file.write([raw + b"what nobody knows yet"], 0)
    slab = folder.open("slab-00000000-1000", _create())  # type: ignore[arg-type]
    slab.allocate(4096)
    before = folder.sizes()
    with pytest.raises(FutureVersionError):
        open_store(folder)
    assert folder.sizes() == before


def test_ciphertext_shows_nothing(tmp_path: Path) -> None:
    codec = Encrypted(IDENTITY, SECRET)
    store = open_path(tmp_path / "kv")
    store.write(codec, [item(1)])
    store.flush()
    close(store)
    content = b"".join(path.read_bytes() for path in (tmp_path / "kv").iterdir())
    for secret in (payload(1)[:64], payload(1)[100:132], key(1).digest, SECRET):
        assert secret not in content
