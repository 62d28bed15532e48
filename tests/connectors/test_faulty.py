"""The faulty wrapper: each fault happens as often as it is asked for, the same each time, and never as a wrong byte."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from connectors.memory_store import IDENTITY, LAYOUT, MemoryConnector, MemoryStore, Pages, eventually, key
from ostinato.connectors.api import Site
from ostinato.connectors.faults import Faults
from ostinato.connectors.faulty import FaultyConnector
from ostinato.connectors.host import HostConnector
from ostinato.connectors.multi import MultiConnector
from ostinato.connectors.registry import make_connector
from ostinato.errors import ConfigError
from ostinato.ids import HOLE, JobId, Ordinal, SlotId, Step
from ostinato.transfer.job import JobKind, Move, TransferOrder, TransferReport

JOBS = 60


class Instant:
    """A mover that reports at the next poll, and moves nothing."""

    def __init__(self) -> None:
        self.reports: list[TransferReport] = []
        self.closed = False

    def submit(self, order: TransferOrder) -> None:
        self.reports.append(TransferReport(order.job_id, moved_bytes=order.total_bytes))

    def poll(self) -> list[TransferReport]:
        reports, self.reports = self.reports, []
        return reports

    def cancel(self, job_id: JobId) -> None: ...

    def close(self) -> None:
        self.closed = True


class InstantConnector(HostConnector):
    def make_mover(self, device: Any, notify: Any) -> Any:
        return Instant()


def order(job: int, kind: JobKind = JobKind.LOAD, moves: int = 3) -> TransferOrder:
    made = [Move(key(job), Ordinal(0), SlotId(number), HOLE, 0, 64) for number in range(moves)]
    return TransferOrder(JobId(job), kind, InstantConnector(1 << 20).tier, tuple(made), Step(0))


def outcome(faults: Faults, seconds: float = 0.0) -> tuple[list[TransferReport], Counter[str], Any]:
    """All reports of JOBS orders, each submitted and polled for."""
    connector = FaultyConnector(InstantConnector(1 << 20), faults)
    device = Pages()
    mover = connector.make_mover(device, lambda: None)
    reports = []
    for job in range(1, JOBS + 1):
        mover.submit(order(job))
        reports += mover.poll()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        reports += mover.poll()
        time.sleep(0.01)
    return reports, connector.counts, device


def test_without_faults_nothing_changes() -> None:
    reports, counts, _ = outcome(Faults())
    assert [report.job_id for report in reports] == list(range(1, JOBS + 1))
    assert not any(report.failed for report in reports)
    assert not +counts


def test_dropped_reports_never_come() -> None:
    reports, counts, _ = outcome(Faults(drop=0.3), 0.1)
    assert len(reports) == JOBS - counts["drop"]
    assert 8 < counts["drop"] < 30


def test_failed_loads_leave_rubbish() -> None:
    reports, counts, device = outcome(Faults(fail=0.5))
    failed = [report for report in reports if report.failed]
    assert len(failed) == counts["fail"] > 15
    assert any(len(report.failed) < 3 for report in failed)
    assert all(0 <= index < 3 for report in failed for index in report.failed)
    assert int(device.pages[0, 0]) == 0xA5


def test_failed_stores_leave_the_device_alone() -> None:
    connector = FaultyConnector(InstantConnector(1 << 20), Faults(fail=1.0))
    device = Pages()
    before = device.pages.clone()
    mover = connector.make_mover(device, lambda: None)
    mover.submit(order(1, JobKind.STORE))
    assert mover.poll()[0].failed
    assert bool((device.pages == before).all())


def test_reports_come_twice_and_for_jobs_that_never_were() -> None:
    reports, counts, _ = outcome(Faults(duplicate=0.5))
    assert len(reports) == JOBS + 2 * counts["duplicate"]
    seen = Counter(report.job_id for report in reports)
    assert sorted(set(seen.values())) == [1, 2, counts["duplicate"]]


def test_reports_are_late() -> None:
    start = time.monotonic()
    reports, counts, _ = outcome(Faults(delay=0.2), 0.3)
    assert len(reports) == JOBS == counts["delay"]
    assert time.monotonic() - start > 0.2


def test_reports_change_places() -> None:
    reports, counts, _ = outcome(Faults(reorder=0.4), 0.4)
    jobs = [report.job_id for report in reports]
    assert sorted(jobs) == list(range(1, JOBS + 1))
    assert jobs != sorted(jobs)
    assert counts["reorder"] > 10


def test_a_seed_says_what_happens() -> None:
    def digest(seed: int) -> Any:
        reports, _, _ = outcome(Faults(seed, drop=0.2, fail=0.3, duplicate=0.2))
        return [(report.job_id, report.failed) for report in reports]

    assert digest(1) == digest(1) != digest(2)


def test_each_rank_has_faults_of_its_own() -> None:
    connector = FaultyConnector(InstantConnector(1 << 20), Faults(fail=0.5))
    movers = [connector.make_mover(Pages(), lambda: None) for _ in range(2)]
    for job in range(1, 40):
        for mover in movers:
            mover.submit(order(job))
    first, second = ([report.failed for report in mover.poll()] for mover in movers)
    assert first != second


# ------------------------------------------------------------------------------------------------------ asked tiers


def filled(faults: Faults, count: int = 40) -> tuple[FaultyConnector, MemoryConnector, Any, Any]:
    """A store with ``count`` records, behind faults."""
    inner = MemoryConnector(MemoryStore())
    connector = FaultyConnector(inner, faults)
    connector.open(Site(LAYOUT, IDENTITY))
    device = Pages()
    mover = connector.make_mover(device, lambda: None)
    run(mover, JobKind.STORE, count, 1)
    return connector, inner, device, mover


def run(mover: Any, kind: JobKind, count: int, job: int) -> TransferReport:
    moves = tuple(Move(key(number), Ordinal(0), SlotId(number), HOLE, 0, 64) for number in range(count))
    mover.submit(TransferOrder(JobId(job), kind, mover.inner._link.tier, moves, Step(0)))
    reports: list[TransferReport] = []
    eventually(lambda: reports.extend(mover.poll()) or reports)
    return reports[0]


def answer(connector: FaultyConnector, keys: Sequence[Any]) -> list[bool]:
    eventually(lambda: connector.probe(keys) is not None)
    found = connector.probe(keys)
    assert found is not None
    return list(found)


def test_changed_bytes_are_found_before_they_are_used() -> None:
    connector, inner, device, mover = filled(Faults(corrupt=0.4))
    before = device.pages[:40].clone()
    device.pages[:40] = 0
    failed = run(mover, JobKind.LOAD, 40, 2).failed
    assert len(failed) == connector.counts["corrupt"] == sum(inner.faults.values())
    assert 5 < len(failed) < 35
    for number in range(40):
        assert bool((device.pages[number] == before[number]).all()) or number in failed
    again = run(mover, JobKind.LOAD, 40, 3).failed
    assert set(again) != set(failed), "on its way, not in the store"
    mover.close()
    connector.close()


def test_answers_are_turned_round() -> None:
    connector, _, _, mover = filled(Faults(lie=0.5), 20)
    keys = [key(number) for number in range(40)]
    given = answer(connector, keys)
    truth = [number < 20 for number in range(40)]
    lies = [held != true for held, true in zip(given, truth, strict=True)]
    assert 8 < sum(lies) < 32
    assert answer(connector, keys) == given, "the same key, the same lie"
    mover.close()
    connector.close()


# -------------------------------------------------------------------------------------------------- specifications


def test_faults_stand_among_the_tiers_own_options() -> None:
    connector = make_connector("faulty:host:1MiB?store=lazy&drop=0.1&delay=0.5&seed=7")
    assert isinstance(connector, FaultyConnector)
    assert connector.faults == Faults(7, delay=0.5, drop=0.1)
    assert connector.tier == "host"
    assert not connector.capabilities.eager
    redis = make_connector("faulty:redis://:pw@127.0.0.1:6379/2?prefix=a%20?&corrupt=0.5".replace("%20?", "b"))
    assert isinstance(redis, FaultyConnector)
    assert redis.inner.address.db == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("faulty", "say of which tier"),
        ("faulty:host:1MiB?drop=2", "probability from 0 to 1"),
        ("faulty:host:1MiB?drop=x", "must be a number"),
        ("faulty:host:1MiB?delay=-1", "delay is from 0"),
        ("faulty:host:1MiB?corrupt=0.1", "this process's own memory"),
        ("faulty:disk:/tmp/x:64MiB?corrupt=0.1", "checks its records by itself"),
        ("faulty:host:1MiB?nonsense=1", "the only option"),
        ("faulty:nothing:1", "no connector 'nothing'"),
    ],
)
def test_mistakes_are_told(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_connector(text)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as error:
        make_connector("faulty:redis://:s3cr3t@127.0.0.1:6379?drop=x")
    assert "s3cr3t" not in str(error.value)


def test_a_multi_connector_is_wrapped_by_its_children() -> None:
    with pytest.raises(ConfigError, match="each child"):
        FaultyConnector(MultiConnector([HostConnector(1 << 20)]), Faults())
