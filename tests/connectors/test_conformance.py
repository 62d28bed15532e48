"""The conformance kit: what is right passes, and each way to be wrong is found by the check that is named for it."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from connectors.memory_store import MemoryConnector, MemoryStore
from connectors.shelf import BROKEN, SLOW, Shelf, ShelfConnector
from ostinato.conformance import bench, delivering, manners
from ostinato.conformance.bench import Subject
from ostinato.conformance.kit import CHECKS, Check, run_check, subject_of
from ostinato.conformance.suite import ConnectorConformance
from ostinato.conformance.verdict import Outcome, Verdict
from ostinato.connectors.multi import MultiConnector, expand
from ostinato.connectors.registry import make_connector
from ostinato.serve.cli import app

BY_NAME = {check.name: check for check in CHECKS}


def shelf_subject(kind: type[ShelfConnector] = ShelfConnector) -> Subject:
    shelf: Shelf = {}

    def spoil() -> None:
        """An honest shelf has no checksums, so its records are lost rather than changed."""
        shelf.clear()

    return Subject(kind.__name__, lambda: (kind(shelf),), spoil=spoil, lose=lambda: _lose(shelf))


def _lose(shelf: Shelf) -> None:
    for name in sorted(shelf)[::5]:
        del shelf[name]


def memory_subject() -> Subject:
    store = MemoryStore()
    store.calls = deque(maxlen=0)  # type: ignore[assignment]

    def spoil() -> None:
        for number, name in enumerate(sorted(store.content)):
            value = bytearray(store.content[name])
            value[number % len(value)] ^= 0x40
            store.content[name] = bytes(value)

    def lose() -> None:
        for name in sorted(store.content)[::4]:
            del store.content[name]

    return Subject("memory", lambda: (MemoryConnector(store, ttl_s=0.5),), spoil, lose)


def judge(kind: type[ShelfConnector], check: str) -> Verdict:
    return run_check(BY_NAME[check], shelf_subject(kind))


# ---------------------------------------------------------------------------------------------------- what is right


class TestHostEager(ConnectorConformance):
    spec = "host"


@pytest.mark.slow
class TestHostLazy(ConnectorConformance):
    spec = "host:16MiB?store=lazy"


@pytest.mark.slow
class TestDisk(ConnectorConformance):
    spec = "disk"


@pytest.mark.slow
class TestHostAndDisk(ConnectorConformance):
    spec = ("host", "disk")


@pytest.mark.slow
class TestFaultyDisk(ConnectorConformance):
    """Faults are survived on top of faults; what must come back, or in time, does not always do so."""

    spec = "faulty:disk:{folder}:32MiB?fail=0.1&delay=0.01"

    @pytest.fixture
    def specs(self, tmp_path: Path) -> Sequence[str]:
        return (self.spec.format(folder=tmp_path),)

    skip = ("delivers_what_was_stored", "serves_two_workers")


class TestShelf(ConnectorConformance):
    @pytest.fixture
    def subject(self) -> Subject:
        return shelf_subject()


class TestMemoryStore(ConnectorConformance):
    """On StoreConnector."""

    @pytest.fixture
    def subject(self) -> Subject:
        return memory_subject()


@pytest.mark.slow
class TestMultiConnector(ConnectorConformance):
    """Two children, of which the second is offered what the first one leaves."""

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        store = MemoryStore()
        store.calls = deque(maxlen=0)  # type: ignore[assignment]

        def make() -> Sequence[object]:
            children = [make_connector(f"disk:{tmp_path}:16MiB"), MemoryConnector(store)]
            return expand([MultiConnector(children, "first")])

        return Subject("multi", make)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_the_kit_finds(kind: type[ShelfConnector], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manners, "CLOSE_S", 1.0)
    monkeypatch.setattr(delivering, "TRIES", 2)
    verdict = judge(kind, BROKEN[kind])
    assert verdict.outcome is Outcome.FAILED, verdict
    assert re.search(EXPECTED.get(kind.__name__, "."), verdict.text), verdict.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOW, ids=lambda kind: kind.__name__)
def test_the_kit_does_not_wait_for_ever(kind: type[ShelfConnector], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PATIENCE_S", 7.0)
    verdict = judge(kind, SLOW[kind])
    assert verdict.outcome is Outcome.FAILED, verdict


@pytest.mark.parametrize("check", ["finds_changed_bytes", "finds_changed_records"])
def test_the_kit_finds_a_store_that_compares_nothing(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.connectors.store_mover.check", lambda *_: None)
    verdict = run_check(BY_NAME[check], memory_subject())
    assert verdict.outcome is Outcome.FAILED, verdict


EXPECTED = {
    "ReportsTwice": "second time: one report per order",
    "WritesOutside": "changed although no load of it is under way",
    "ClaimsAll": "holds keys that nobody has ever stored",
    "KeepsViews": r"after on_commit\(\): a BlockView is kept",
    "KeepsSlots": "ids of device blocks are kept",
    "KeepsPins": "still held: pin",
    "RaisesOnProbe": r"probe\(\) raised RuntimeError: no connection",
    "NotifiesNobody": r"notify\(\) was never called",
    "BlocksTheScheduler": "thread of your own",
    "LeavesThreads": "threads go on after close",
}
"""What the failure's text says, for some."""


def test_checks_are_named_and_explained() -> None:
    assert len(BY_NAME) == len(CHECKS)
    assert all(check.contract.endswith(".") for check in CHECKS)
    found = {*BROKEN.values(), *SLOW.values()}
    assert found <= set(BY_NAME)


# ------------------------------------------------------------------------------------------------------- the command


def test_the_command_prints_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    some = tuple(check for check in CHECKS if check.name in ("starts_and_stops", "closes_without_work"))
    monkeypatch.setattr("ostinato.conformance.kit.CHECKS", some)
    done = CliRunner().invoke(app, ["conformance", "host", "--json"])
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert report["failed"] == 0
    assert [row["check"] for row in report["checks"]] == [check.name for check in some]
    table = CliRunner().invoke(app, ["conformance", "host"])
    assert "2 passed" in table.stdout


def test_the_command_fails_where_a_check_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(subject: Subject) -> None:
        """It never works."""
        raise AssertionError("no")

    monkeypatch.setattr("ostinato.conformance.kit.CHECKS", (Check(breaks),))
    done = CliRunner().invoke(app, ["conformance", "host", "--json"])
    assert done.exit_code == 1
    assert "AssertionError: no" in json.loads(done.stdout)["checks"][0]["text"]


def test_passwords_are_not_shown() -> None:
    with subject_of(["redis://user:secret@127.0.0.1:1"]) as subject:
        assert "secret" not in subject.name
