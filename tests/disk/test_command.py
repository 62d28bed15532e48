"""``ostinato cache``: a folder looked at, checked and cut down, stopped or live; nothing else is touched."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from disk.support import CLEAR, IDENTITY, LENGTH, OTHER, close, get, key, open_path, put
from ostinato.connectors.disk import requests
from ostinato.connectors.disk.codec import Clear, Codec, Encrypted
from ostinato.errors import ConfigError, ConnectorError
from ostinato.serve.cli import app

SECRET = bytes(range(32))
CODECS: list[tuple[str, Codec, int, int]] = [
    ("gemma", CLEAR, 100, 0),
    ("llama", Clear(OTHER), 30, 1),
    ("gemma", Encrypted(IDENTITY, SECRET), 10, 0),
]


def fill(path: Path) -> None:
    store = open_path(path)
    for model, codec, count, group in CODECS:
        store.model = model
        put(store, range(count), codec=codec, group=group)
    close(store)


@contextmanager
def engine(path: Path, live: bool) -> Iterator[None]:
    """A writer that has the lock and looks at requests, if ``live``."""
    store = open_path(path) if live else None
    if store is not None:
        store.start(lambda: requests.serve(store))
    try:
        yield
    finally:
        if store is not None:
            close(store)


def run(*words: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["cache", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def run_json(*words: Any, code: int = 0) -> Any:
    return json.loads(run(*words, "--json", code=code))


def damage(path: Path, numbers: list[int]) -> None:
    store = open_path(path)
    for number in numbers:
        entry = store.catalog.index.get(CLEAR.name(key(number)))
        assert entry is not None
        (name,) = [name for name in path.iterdir() if name.name.startswith(f"slab-{entry.slab.number:08x}")]
        with name.open("r+b") as file:
            file.seek(entry.slot * entry.slab.slot_bytes + 17)
            file.write(b"\x00\x01\x02\x03")
    close(store)


live_or_not = pytest.mark.parametrize("live", [False, True], ids=["stopped", "live"])


@live_or_not
def test_ls_and_du(tmp_path: Path, live: bool) -> None:
    path = tmp_path / "kv"
    fill(path)
    with engine(path, live):
        report = run_json("ls", path)
        assert report["live"] is live
        assert report["sound"]
        rows = sorted((row["model"], row["encrypted"], row["records"]) for row in report["owners"])
        assert rows == [("gemma", False, 100), ("gemma", True, 10), ("llama", False, 30)]
        text = run("ls", path)
        assert all(row["label"] in text for row in report["owners"])
        assert ("an engine uses this folder" in text) is live
        usage = run_json("du", path)
        assert usage["file_bytes"] == sum(file.stat().st_size for file in path.iterdir())
        slabs = usage["slabs"]
        assert sum(row["used"] for row in slabs) == 140
        assert sum(row["payload_bytes"] for row in slabs) == 140 * LENGTH
        assert sum(row["file_bytes"] for row in slabs) + usage["index_bytes"] == usage["file_bytes"]
        assert "index" in run("du", path)


@live_or_not
def test_verify_finds_and_quarantines(tmp_path: Path, live: bool) -> None:
    path = tmp_path / "kv"
    fill(path)
    damage(path, [3, 50])
    secret = tmp_path / "key"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    with engine(path, live):
        report = run_json("verify", path, "--keep", code=1)
        assert (report["checked"], report["skipped"], report["faults"]) == (130, 10, {"checksum": 2})
        assert "2 bad" in run("verify", path, "--key-file", secret, code=1)
        report = run_json("verify", path, "--key-file", secret)
        assert (report["checked"], report["bad"]) == (138, 0)
    store = open_path(path)
    assert get(store, list(range(100))) == set(range(100)) - {3, 50}
    close(store)


def test_verify_tells_of_a_damaged_index(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    fill(path)
    store = open_path(path)
    store._touched = True
    close(store)
    (snapshot,) = path.glob("snapshot-*")
    raw = bytearray(snapshot.read_bytes())
    raw[100] ^= 1
    snapshot.write_bytes(raw)
    assert "index is damaged" in run("verify", path, code=1)
    assert "index is damaged" in run("ls", path)


@live_or_not
def test_gc(tmp_path: Path, live: bool) -> None:
    path = tmp_path / "kv"
    store = open_path(path)
    put(store, range(1000))
    close(store)
    with engine(path, live):
        before = run_json("du", path)["file_bytes"]
        report = run_json("gc", path, "--size", "1MiB")
        assert report["file_bytes"] <= 1 << 20
        assert report["freed_bytes"] == before - report["file_bytes"]
        assert "0 B freed" in run("gc", path, "--size", "100GiB")


@live_or_not
def test_rm(tmp_path: Path, live: bool) -> None:
    path = tmp_path / "kv"
    fill(path)
    with engine(path, live):
        label = Clear(OTHER).owner.label
        assert run_json("rm", path, "--identity", label[:6], "--yes")["removed"] == 30
        assert {row["model"] for row in run_json("ls", path)["owners"]} == {"gemma"}
        assert "110 records" in run("rm", path, "--model", "gemma", "--yes")
        assert not run_json("ls", path)["owners"]
    fill(path)
    with engine(path, live):
        report = run_json("rm", path, "--all", "-y")
        assert report["removed"] == 140
        assert not run_json("du", path)["slabs"]


def test_rm_asks(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    fill(path)
    for words, message in (
        (["--all"], "140 records of 3 identities .* add --yes"),
        ([], "one of --model, --identity and --all"),
        (["--all", "--model", "gemma"], "one of --model, --identity and --all"),
        (["--model", "nobody", "--yes"], "no records of 'nobody'; known: gemma, llama"),
        (["--identity", "zz", "--yes"], "no records of 'zz'; known: "),
    ):
        with pytest.raises(ConfigError, match=message):
            run("rm", path, *words)
    assert len(run_json("ls", path)["owners"]) == 3


def test_a_folder_that_is_no_cache_is_left_alone(tmp_path: Path) -> None:
    empty, other, link = tmp_path / "empty", tmp_path / "other", tmp_path / "link"
    empty.mkdir()
    other.mkdir()
    (other / "slab-00000000-1000").write_bytes(b"mine")
    (other / "notes.txt").write_bytes(b"mine")
    fill(tmp_path / "kv")
    link.symlink_to(tmp_path / "kv")
    for path, message in (
        (empty, "is not a disk cache"),
        (other, "is not a disk cache"),
        (link, "is a link"),
        (tmp_path / "none", "No such file"),
        (other / "notes.txt", "Not a directory"),
    ):
        for words in (["ls"], ["du"], ["verify"], ["gc", "--size", "0"], ["rm", "--all", "--yes"]):
            with pytest.raises(ConnectorError, match=message):
                run(words[0], path, *words[1:])
    assert not list(empty.iterdir())
    assert sorted(file.name for file in other.iterdir()) == ["notes.txt", "slab-00000000-1000"]


def test_links_and_foreign_files_inside_are_neither_followed_nor_removed(tmp_path: Path) -> None:
    path, outside = tmp_path / "kv", tmp_path / "outside"
    fill(path)
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    (path / "notes.txt").write_bytes(b"mine")
    (path / "folder").mkdir()
    for name in ("slab-000000ff-1000", "log-000000ff", "snapshot-000000ff.tmp", "request"):
        (path / name).symlink_to(outside / "precious")
    slab = next(path.glob("slab-00000000-*"))
    slab.unlink()
    slab.symlink_to(outside / "precious")
    # Its records cannot be read: all are bad, and forgotten.
    run("verify", path, code=1)
    run("gc", path, "--size", "0")
    run("rm", path, "--all", "--yes")
    assert (outside / "precious").read_bytes() == b"precious"
    assert (path / "notes.txt").exists()
    assert (path / "folder").is_dir()
    assert sorted(os.listdir(outside)) == ["precious"]


def test_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    from ostinato.connectors.disk.format import LOG_MAGIC, VERSION, header

    path = tmp_path / "kv"
    fill(path)
    (log,) = path.glob("log-*")
    for snapshot in path.glob("snapshot-*"):
        snapshot.unlink()
    log.rename(path / "log-00000000")
    (path / "log-00000000").write_bytes(header(LOG_MAGIC, 0, VERSION + 1))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    for words in (["ls"], ["verify"], ["rm", "--all", "--yes"]):
        with pytest.raises(ConnectorError, match="newer version"):
            run(words[0], path, *words[1:])
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
