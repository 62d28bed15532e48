"""Looking after a folder, stopped or live."""

from __future__ import annotations

from pathlib import Path

import pytest

from disk.support import CLEAR, IDENTITY, LENGTH, OTHER, close, get, key, open_path, put
from ostinato.connectors.disk import requests, tools
from ostinato.connectors.disk.codec import Clear, Encrypted
from ostinato.connectors.disk.store import DiskStore
from ostinato.errors import ConnectorError

SECRET = bytes(range(32))


def fill(path: Path) -> None:
    store = open_path(path)
    put(store, range(100))
    put(store, range(30), codec=Clear(OTHER), group=1)
    put(store, range(10), codec=Encrypted(IDENTITY, SECRET))
    close(store)


def damage(path: Path, store: DiskStore, number: int) -> None:
    entry = store.catalog.index.get(CLEAR.name(key(number)))
    assert entry is not None
    (name,) = [name for name in path.iterdir() if name.name.startswith(f"slab-{entry.slab.number:08x}")]
    with name.open("r+b") as file:
        file.seek(entry.slot * entry.slab.slot_bytes + 17)
        file.write(b"\x00\x01\x02\x03")


def test_inspect(tmp_path: Path) -> None:
    fill(tmp_path / "kv")
    report = tools.inspect(str(tmp_path / "kv"))
    assert not report.busy
    assert report.file_bytes == sum(file.stat().st_size for file in (tmp_path / "kv").iterdir())
    assert sorted((owner.records, owner.encrypted) for owner in report.owners) == [
        (10, True),
        (30, False),
        (100, False),
    ]
    assert {owner.payload_bytes for owner in report.owners} == {100 * LENGTH, 30 * LENGTH, 10 * LENGTH}
    assert len({owner.label for owner in report.owners}) == 3


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    for call in (tools.inspect, tools.verify, tools.remove):
        with pytest.raises(ConnectorError, match="cannot be used"):
            call(str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("live", [False, True])
def test_verify_finds_and_quarantines(tmp_path: Path, live: bool) -> None:
    path = tmp_path / "kv"
    fill(path)
    store = open_path(path)
    for number in (3, 50):
        damage(path, store, number)
    if live:
        store.start(lambda: requests.serve(store))
    else:
        close(store)
    steps: list[tuple[int, int]] = []
    report = tools.verify(str(path), quarantine=False, progress=lambda done, total: steps.append((done, total)))
    assert (report.checked, report.skipped, report.bad) == (130, 10, 2)
    assert steps[-1] == (130, 130)
    report = tools.verify(str(path), secret=SECRET)
    assert (report.checked, report.skipped, report.faults) == (140, 0, {"checksum": 2})
    assert tools.verify(str(path), secret=SECRET).bad == 0
    if not live:
        store = open_path(path)
    assert get(store, list(range(100))) == set(range(100)) - {3, 50}
    assert not store.stats.faults
    close(store)


@pytest.mark.parametrize("live", [False, True])
def test_remove_one_model_then_all(tmp_path: Path, live: bool) -> None:
    path = tmp_path / "kv"
    fill(path)
    store = open_path(path) if live else None
    if store is not None:
        store.start(lambda: requests.serve(store))
    label = Clear(OTHER).owner.label
    assert tools.remove(str(path), label) == 30
    assert {owner.records for owner in tools.inspect(str(path)).owners} == {10, 100}
    with pytest.raises(ConnectorError, match="no records of"):
        tools.remove(str(path), "nobody")
    assert tools.remove(str(path)) == 110
    report = tools.inspect(str(path))
    assert not report.owners
    assert not report.slabs
    if store is not None:
        close(store)


@pytest.mark.parametrize("live", [False, True])
def test_gc(tmp_path: Path, live: bool) -> None:
    path = tmp_path / "kv"
    store = open_path(path)
    put(store, range(1000))
    if live:
        store.start(lambda: requests.serve(store))
    else:
        close(store)
    before = tools.inspect(str(path)).file_bytes
    freed = tools.gc(str(path), 1 << 20)
    after = tools.inspect(str(path)).file_bytes
    assert after <= 1 << 20
    assert freed == before - after
    if live:
        close(store)


def test_a_writer_that_does_not_answer(tmp_path: Path) -> None:
    store = open_path(tmp_path / "kv")
    with pytest.raises(ConnectorError, match="does not answer"):
        requests.ask(tools.OsFolder(str(tmp_path / "kv")), {"shrink": 0}, patience=0.2)
    assert "request" not in store.folder.sizes()
    close(store)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'{"drop": ["xyz"]}', b'{"drop": 3}', b'{"shrink": "x"}', b"\xff" * 99]
)
def test_a_request_without_sense_is_harmless(tmp_path: Path, raw: bytes) -> None:
    store = open_path(tmp_path / "kv")
    put(store, range(5))
    (tmp_path / "kv" / "request").write_bytes(raw)
    requests.serve(store)
    assert not (tmp_path / "kv" / "request").exists()
    assert get(store, list(range(5))) == set(range(5))
    close(store)
