"""The scheduler half: options, answers, who writes a folder, permissions."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disk.support import IDENTITY, OTHER, item, key, payload, target
from field.rig import layout_of
from ostinato.cache.kinds import Full
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.connectors.api import Site
from ostinato.connectors.disk.connector import DiskConnector
from ostinato.connectors.disk.files import Access, OsFolder
from ostinato.connectors.disk.follower import Follower
from ostinato.connectors.disk.format import LOG_MAGIC, VERSION, header
from ostinato.connectors.record import RecordIdentity
from ostinato.connectors.registry import make_connector
from ostinato.errors import CapacityError, ConfigError, ConnectorError
from ostinato.ids import GroupId

LENGTH = 3000
LAYOUT = CacheLayout((GroupSpec(GroupId(0), Full(), (0,), 16, 1, 16, LENGTH, 3008),), 3008)


def connect(path: Path, options: str = "", identity: RecordIdentity = IDENTITY, size: str = "8MiB") -> DiskConnector:
    tier = make_connector(f"disk:{path}:{size}{options}")
    assert isinstance(tier, DiskConnector)
    tier.open(Site(LAYOUT, identity))
    return tier


def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("disk", "say where and how much"),
        ("disk:", "say where and how much"),
        ("disk:/tmp/kv", "say where and how much"),
        ("disk::8GiB", "say where and how much"),
        ("disk:/tmp/kv:much", "not a size"),
        ("disk:/tmp/kv:8GiB?mode=fast", "mode is one of"),
        ("disk:/tmp/kv:8GiB?admit=never", "admit is all or second"),
        ("disk:/tmp/kv:8GiB?write_limit=much", "not a rate"),
        ("disk:/tmp/kv:8GiB?write_limit=", "not a rate"),
        ("disk:/tmp/kv:8GiB?size=3", "unknown option 'size'"),
        ("disk:/tmp/kv:8GiB?key_file=/nowhere", "cannot be read"),
        ("disk:/dev/null:8GiB", "not a folder"),
    ],
)
def test_mistakes_are_told(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make_connector(text)


def test_making_a_connector_touches_nothing(tmp_path: Path) -> None:
    make_connector(f"disk:{tmp_path}/a:b/kv:8GiB").close()
    assert not list(tmp_path.iterdir())


def test_a_colon_in_the_path(tmp_path: Path) -> None:
    connect(tmp_path / "a:b").close()
    assert (tmp_path / "a:b" / "lock").exists()


def test_key_files(tmp_path: Path) -> None:
    short, open_to_all = tmp_path / "short", tmp_path / "open"
    short.write_bytes(b"123")
    open_to_all.write_bytes(bytes(32))
    open_to_all.chmod(0o644)
    for path, what in ((short, "exactly 32 bytes"), (open_to_all, "chmod 600"), (tmp_path, "exactly 32 bytes")):
        with pytest.raises(ConfigError, match=what):
            make_connector(f"disk:{tmp_path}/kv:8MiB?key_file={path}")


def test_a_budget_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="at least"):
        connect(tmp_path / "kv", size="64KiB")
    assert not (tmp_path / "kv").exists()


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConnectorError, match="cannot use"):
        connect(tmp_path / "file" / "kv")
    (tmp_path / "kv").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    with pytest.raises(ConfigError, match="is a link"):
        connect(tmp_path / "link")
    with pytest.raises(NotADirectoryError):
        OsFolder(str(tmp_path / "link"))
    (tmp_path / "kv" / "log-00000000").write_bytes(header(LOG_MAGIC, 0, VERSION + 1))
    with pytest.raises(ConnectorError, match="newer version"):
        connect(tmp_path / "kv")


def test_permissions_and_links(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        (tmp_path / "kv").mkdir(mode=0o755)
        tier = connect(tmp_path / "kv")
        tier.write([item(1)])
        tier.store.flush()
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    files = list((tmp_path / "kv").iterdir())
    assert len(files) >= 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    tier.close()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "kv" / "other").symlink_to(victim)
    folder = OsFolder(str(tmp_path / "kv"))
    with pytest.raises(OSError, match="symbolic link"):
        folder.open("other", Access.CREATE)
    assert "other" not in folder.sizes()
    folder.close()
    assert victim.read_text() == "precious"


def test_answers(tmp_path: Path) -> None:
    tier = connect(tmp_path / "kv")
    keys = [key(0), key(1)]
    assert tier.probe(keys) == [False, False]
    assert tier.offer(keys) == [True, True]
    assert tier.write([item(0)]) == [True]
    assert tier.probe(keys) == [True, False]
    assert tier.offer(keys) == [False, True]
    tier.refuted([key(0)])
    assert tier.probe(keys) == [False, False], "not again at once"
    assert tier.read([target(0)]) == [True], "but it is still there"
    tier.close()


def test_two_models_share_one_folder_and_budget(tmp_path: Path) -> None:
    first = connect(tmp_path / "kv")
    first.write([item(number) for number in range(50)])
    first.close()
    second = connect(tmp_path / "kv", identity=OTHER)
    assert not any(second.probe([key(number) for number in range(50)]) or ())
    second.write([item(number) for number in range(100, 150)])
    second.close()
    first = connect(tmp_path / "kv")
    assert first.probe([key(1), key(101)]) == [True, False]
    assert len(first.store.catalog.index) == 100
    first.close()


def test_a_second_process_reads_and_takes_over(tmp_path: Path) -> None:
    writer = connect(tmp_path / "kv")
    writer.write([item(number) for number in range(10)])
    writer.store.flush()
    reader = connect(tmp_path / "kv")
    assert isinstance(reader.store, Follower)
    assert reader.probe([key(3)]) == [True]
    one = target(3)
    assert reader.read([one]) == [True]
    assert bytes(one.payload) == payload(3)
    assert reader.offer([key(99)]) == [False]
    assert reader.write([item(99)]) == [False]

    writer.write([item(number) for number in range(10, 20)])
    writer.store.flush()
    wait_for(lambda: reader.probe([key(15)]) == [True])
    assert reader.read([target(15)]) == [True]

    writer.store.drop(list(writer.store.catalog.index))
    writer.write([item(number) for number in range(200, 220)])
    assert reader.read([target(15)]) == [False], "its slot has another record now"
    writer.close()
    wait_for(lambda: reader.probe([key(210)]) == [True])
    wait_for(lambda: reader.offer([key(99)]) == [True])
    assert reader.write([item(99)]) == [True]
    assert reader.read([target(210)]) == [True]
    reader.close()
    last = connect(tmp_path / "kv")
    assert last.probe([key(99), key(210)]) == [True, True]
    last.close()


def test_a_reader_follows_a_new_snapshot(tmp_path: Path) -> None:
    writer = connect(tmp_path / "kv")
    writer.write([item(0)])
    writer.store.flush()
    reader = connect(tmp_path / "kv")
    writer.write([item(1)])
    writer.store.flush()
    with writer.store.lock:
        writer.store.space.snapshot()  # type: ignore[union-attr]
    writer.write([item(2)])
    writer.store.flush()
    wait_for(lambda: reader.probe([key(0), key(1), key(2)]) == [True] * 3)
    assert reader.read([target(0), target(1), target(2)]) == [True] * 3
    reader.close()
    writer.close()


def test_idle_writes_become_durable_by_themselves(tmp_path: Path) -> None:
    tier = connect(tmp_path / "kv")
    tier.write([item(0)])
    assert not tier.store.stats.durable
    wait_for(lambda: tier.store.stats.durable == 1)
    tier.close()


def test_layouts_with_tiny_units(tmp_path: Path) -> None:
    tier = make_connector(f"disk:{tmp_path / 'kv'}:8MiB")
    tier.open(Site(layout_of(Full()), IDENTITY))
    tier.close()
