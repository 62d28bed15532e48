"""Jobs from order to last report."""

from __future__ import annotations

import pytest

from core.builders import make_pool
from ostinato.cache.keys import BlockKey
from ostinato.cache.pool import SlotPool, SlotState
from ostinato.ids import GroupId, JobId, Ordinal, SlotId, Step, TierId
from ostinato.transfer.book import Book, release
from ostinato.transfer.job import JobKind, JobState, Move, TransferJob, TransferOrder, TransferReport

HOST = TierId("host")


def open_job(book: Book, pool: SlotPool, kind: JobKind = JobKind.LOAD, patience: float = 10.0) -> TransferJob:
    device, tier = pool.take(2, "device"), pool.take(1, "tier")
    assert device is not None
    moves = [
        Move(BlockKey(GroupId(0), bytes(32)), Ordinal(index), slot, SlotId(0), 0, 8)
        for index, slot in enumerate(device.slots)
    ]
    order = TransferOrder(book.new_id(), kind, HOST, tuple(moves), Step(0))
    assert order.total_bytes == 16
    return book.open(order, device, tier, patience)


def test_a_job_from_order_to_report() -> None:
    pool, _, _ = make_pool(4)
    book = Book()
    job = open_job(book, pool)
    assert job.state is JobState.QUEUED
    assert book.report(TransferReport(job.job_id)) is None, "nobody can have done what was not sent"
    assert book.stats.late_reports == 1
    assert book.dispatch(0.0) == (job.order,)
    assert book.dispatch(0.0) == ()
    assert book.report(TransferReport(job.job_id)) is job
    assert job.state is JobState.DONE
    assert len(book) == 0
    release(job)
    assert pool.available == 4
    with pytest.raises(AssertionError):
        release(job)


def test_two_ranks_are_joined() -> None:
    pool, _, _ = make_pool(4)
    book = Book(world_size=2)
    job = open_job(book, pool)
    book.dispatch(0.0)
    assert book.report(TransferReport(job.job_id, rank=1, failed=(1,))) is None
    assert book.report(TransferReport(job.job_id, rank=1)) is None, "a rank counts once"
    assert book.report(TransferReport(job.job_id, rank=2)) is None, "nor does a rank that does not exist"
    assert book.report(TransferReport(job.job_id, rank=-1)) is None
    assert book.stats.duplicate_reports == 3
    assert book.report(TransferReport(job.job_id, rank=0, failed=(0, 7, -1))) is job
    assert job.state is JobState.FAILED
    assert job.failed == {0, 1}, "indices of moves that were never ordered are ignored"
    assert book.stats.failed_moves == 2


def test_reports_of_closed_and_unknown_jobs_are_counted() -> None:
    pool, _, _ = make_pool(4)
    book = Book()
    job = open_job(book, pool)
    book.dispatch(0.0)
    book.report(TransferReport(job.job_id))
    for job_id in (job.job_id, JobId(999), JobId(0)):
        assert book.report(TransferReport(job_id)) is None
    assert book.stats.late_reports == 3


def test_a_deadline_puts_slots_into_quarantine_until_the_last_rank_is_quiet() -> None:
    pool, _, _ = make_pool(6)
    book = Book(world_size=2)
    job = open_job(book, pool, patience=5.0)
    book.dispatch(0.0)
    assert book.expire(4.9) == []
    book.report(TransferReport(job.job_id, rank=0))
    assert book.expire(5.0) == [job]
    assert book.expire(9.0) == [], "once is enough"
    assert [pool.state(slot) for slot in job.device_lease.slots] == [SlotState.QUARANTINE] * 2
    assert book.report(TransferReport(job.job_id, rank=1)) is job
    assert job.state is JobState.IN_DOUBT
    release(job)
    assert pool.available == 6


def test_queued_jobs_do_not_expire_and_only_they_are_revoked() -> None:
    pool, _, _ = make_pool(12)
    book = Book()
    started = open_job(book, pool, JobKind.STORE, patience=1.0)
    book.dispatch(0.0)
    store, load = open_job(book, pool, JobKind.STORE, 1.0), open_job(book, pool, JobKind.LOAD, 1.0)
    assert book.expire(2.0) == [started]
    assert book.revoke(JobKind.STORE) == [store]
    assert store.state is JobState.REVOKED
    release(store)
    assert book.dispatch(0.0) == (load.order,)
    assert sorted(job.job_id for job in book) == [started.job_id, load.job_id]
    assert book.stats.revoked == 1
    assert book.report(TransferReport(store.job_id)) is None


def test_ids_are_never_used_twice() -> None:
    book = Book()
    ids = [book.new_id() for _ in range(5)]
    assert len(set(ids)) == 5
    assert book.get(ids[0]) is None


def test_a_deadline_begins_when_the_order_goes_out() -> None:
    """What the last step of a batch ordered goes out with the next batch, perhaps an hour later."""
    pool, _, _ = make_pool(4)
    book = Book()
    job = open_job(book, pool, JobKind.STORE, patience=5.0)
    assert book.expire(3600.0) == [], "no mover has seen it"
    book.dispatch(3600.0)
    assert book.expire(3604.0) == []
    assert book.expire(3605.0) == [job]
