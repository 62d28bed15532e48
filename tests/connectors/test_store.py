"""The base of asked tiers over a store that blocks, raises, loses, corrupts and answers late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from connectors.memory_store import LOAD, LOOKUP, STORE, UNIT, Bench, MemoryStore, eventually, key, name, timed
from ostinato.connectors import answers, records, store, store_mover
from ostinato.ids import JobId
from ostinato.transfer.job import JobKind

Make = Callable[..., Bench]


@pytest.fixture
def make() -> Iterator[Make]:
    """Benches over one store; closed afterwards, and no thread of theirs is left."""
    before, made, shared = set(threading.enumerate()), [], MemoryStore()

    def bench(**options: Any) -> Bench:
        made.append(Bench(shared, **options))
        return made[-1]

    yield bench
    for gate in shared.gates.values():
        gate.set()
    for one in made:
        one.close()
    assert set(threading.enumerate()) <= before
    assert shared.opened == shared.closed


@pytest.fixture
def bench(make: Make) -> Bench:
    return make()


def fill(bench: Bench, count: int) -> None:
    """Units 0, 1, ... from pages 0, 1, ..."""
    assert bench.move(JobKind.STORE, *((key(i), i) for i in range(count))) == ()


# ------------------------------------------------------------------------------------------------- what works, works


def test_what_was_stored_comes_back_into_other_pages(bench: Bench) -> None:
    fill(bench, 5)
    before = bench.device.pages.clone()
    bench.device.pages[20:] = 0
    assert bench.move(JobKind.LOAD, *((key(i), 20 + i) for i in range(5))) == ()
    assert torch.equal(bench.device.pages[20:25], before[:5])
    assert not bench.device.pages[25:].any()


def test_a_unit_inside_of_a_page_is_moved_alone(bench: Bench) -> None:
    """Only bytes [offset, offset + length) are read and written."""
    fill(bench, 1)
    view = bench.mover._record(_move(slot=3, offset=16, length=32))  # type: ignore[attr-defined]
    view.payload[:] = b"\xaa" * 32
    row = bench.device.pages[3]
    assert row[16:48].eq(0xAA).all()
    assert not row[:16].eq(0xAA).any()
    assert not row[48:].eq(0xAA).any()


def _move(slot: int, offset: int, length: int) -> Any:
    from ostinato.ids import HOLE, Ordinal, SlotId
    from ostinato.transfer.job import Move

    return Move(key(0), Ordinal(0), SlotId(slot), HOLE, offset, length)


def test_missing_records_fail_alone(bench: Bench) -> None:
    fill(bench, 4)
    del bench.store.content[name(1)]
    assert bench.move(JobKind.LOAD, *((key(i), 20 + i) for i in range(6))) == (1, 4, 5)
    assert not bench.connector.breakers.load.is_open
    assert not bench.connector.faults


def test_a_big_order_goes_in_batches_and_is_reported_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_mover, "BATCH_BYTES", 3 * UNIT)
    fill(bench, 10)
    assert [len(names) for kind, names in bench.store.calls if kind == STORE] == [3, 3, 3, 1]
    monkeypatch.setattr(store_mover, "BATCH_RECORDS", 2)
    del bench.store.content[name(7)]
    assert bench.move(JobKind.LOAD, *((key(i), 20 + i) for i in range(10))) == (7,)
    time.sleep(0.01)
    bench.poll()
    assert all(len(reports) == 1 for reports in bench.reports.values())


def test_one_move_above_the_batch_size_goes_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_mover, "BATCH_BYTES", 1)
    fill(bench, 3)
    assert bench.store.count(STORE) == 3


# ---------------------------------------------------------------------------------------------------------- questions


def test_probe_never_waits_and_asks_once(bench: Bench) -> None:
    bench.store.gates[LOOKUP].clear()
    start = time.monotonic()
    for _ in range(200):
        assert bench.connector.probe([key(1), key(2)]) is None
    assert time.monotonic() - start < 2
    assert not bench.notified.is_set()
    bench.store.gates[LOOKUP].set()
    assert bench.notified.wait(5)
    assert bench.connector.probe([key(1), key(2)]) == [False, False]
    assert bench.store.count(LOOKUP) == 1


def test_questions_that_wait_are_asked_together(bench: Bench) -> None:
    bench.store.gates[LOOKUP].clear()
    bench.connector.probe([key(0)])
    eventually(lambda: bench.store.count(LOOKUP) == 1)
    for i in range(1, 50):
        assert bench.connector.probe([key(i), key(i + 1)]) is None
    bench.store.gates[LOOKUP].set()
    bench.answer(*(key(i) for i in range(51)))
    assert bench.store.count(LOOKUP) == 2


def test_answers_expire(make: Make) -> None:
    bench = make(ttl_s=0.5)
    assert bench.answer(key(1)) == [False]
    bench.store.content[name(1)] = b"by another engine"
    assert bench.connector.probe([key(1)]) == [False]
    time.sleep(0.51)
    assert bench.connector.probe([key(1)]) is None
    assert bench.answer(key(1)) == [True]


def test_slow_answers_are_good_for_long_enough_to_ask_for_the_others(make: Make) -> None:
    bench = make(ttl_s=0.0)
    bench.store.gates[LOOKUP].clear()
    threading.Timer(0.5, bench.store.gates[LOOKUP].set).start()
    bench.answer(key(1))
    time.sleep(0.3)
    assert bench.connector.probe([key(1)]) is not None


def test_what_was_stored_is_known_at_once(bench: Bench) -> None:
    """Also when the question before it was answered no, and when an older answer arrives later."""
    assert bench.answer(key(1), key(2)) == [False, False]
    fill(bench, 2)
    assert bench.connector.probe([key(1), key(2)]) == [True, False]
    assert bench.connector.offer([key(1), key(2)]) == [False, True]


def test_an_answer_from_before_a_store_or_a_refutation_does_not_count(bench: Bench) -> None:
    bench.store.gates[LOOKUP].clear()
    bench.store.edit = lambda kind, reply: [False, True] if kind == LOOKUP else reply
    assert bench.connector.probe([key(0), key(1)]) is None
    eventually(lambda: bench.store.count(LOOKUP) == 1)
    fill(bench, 1)
    bench.connector.refuted([key(1)])
    bench.store.gates[LOOKUP].set()
    assert bench.notified.wait(5)
    eventually(lambda: not bench.connector._answers._asked)
    assert bench.connector.probe([key(0), key(1)]) == [True, False]


def test_refuted_keys_are_left_alone_for_a_while(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "REFUTED_S", 0.5)
    fill(bench, 1)
    assert bench.answer(key(0)) == [True]
    bench.connector.refuted([key(0)])
    asked = bench.store.count(LOOKUP)
    assert bench.connector.probe([key(0)]) == [False]
    assert bench.connector.offer([key(0)]) == [True], "a new copy is welcome"
    assert bench.store.count(LOOKUP) == asked
    time.sleep(0.51)
    assert bench.answer(key(0)) == [True]


def test_a_new_copy_ends_a_refutation(bench: Bench) -> None:
    fill(bench, 1)
    bench.connector.refuted([key(0)])
    fill(bench, 1)
    assert bench.connector.probe([key(0)]) == [True]


def test_memory_of_answers_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWERS", 100)
    for start in range(0, 2000, 20):
        bench.answer(*(key(start + i) for i in range(20)))
        assert len(bench.connector._answers) <= 120
    assert not bench.connector._answers._asked


def test_a_store_that_cannot_be_asked_holds_nothing_and_is_left_alone(make: Make) -> None:
    breakers, clock = timed()
    bench = make(ttl_s=0.0, breakers=breakers)
    bench.store.broken = {LOOKUP}
    for i in range(3):
        assert bench.connector.probe([key(i)]) is None
        eventually(lambda i=i: bench.store.count(LOOKUP) == i + 1)
        eventually(lambda: not bench.connector._answers._asked)
    assert bench.connector.probe([key(99)]) == [False], "not asked any more"
    assert bench.store.count(LOOKUP) == 3
    assert bench.store.opened == {"directory": 3}
    bench.store.broken = set()
    bench.store.content[name(99)] = b"x"
    clock.now = 1.0
    bench.connector.probe([key(99)])
    eventually(lambda: bench.store.count(LOOKUP) == 4)
    eventually(lambda: not bench.connector.breakers.lookup.is_open)


@pytest.mark.parametrize("reply", [[], [True], [True] * 3, None])
def test_a_wrong_number_of_answers_is_a_failure_of_the_store(bench: Bench, reply: Any) -> None:
    bench.store.edit = lambda kind, _: reply
    assert bench.answer(key(0), key(1)) == [False, False]
    bench.store.edit = lambda kind, reply: reply
    assert bench.answer(key(2)) == [False], "the thread is alive"


def test_a_question_that_hangs_costs_nobody_else_anything(make: Make) -> None:
    """None while an answer may come; False for everyone as soon as that is unlikely; late answers still count."""
    breakers, clock = timed()
    bench = make(breakers=breakers)
    bench.store.gates[LOOKUP].clear()
    bench.store.content[name(0)] = b"x"
    assert bench.connector.probe([key(0)]) is None
    eventually(lambda: bench.store.count(LOOKUP) == 1)
    clock.now = 2.9
    assert bench.connector.probe([key(0)]) is None
    clock.now = 3.1
    assert bench.connector.probe([key(0)]) == [False]
    for i in range(1, 300):
        assert bench.connector.probe([key(i)]) == [False]
    assert len(bench.connector._answers._asked) == 1
    bench.store.gates[LOOKUP].set()
    eventually(lambda: bench.connector.probe([key(0)]) == [True])


# -------------------------------------------------------------------------------------------------------------- loads


@pytest.mark.parametrize("place", [0, 30, UNIT - 1, UNIT, UNIT + 40, UNIT + 191])
def test_a_changed_byte_is_found_and_counted(bench: Bench, place: int) -> None:
    fill(bench, 3)
    value = bytearray(bench.store.content[name(1)])
    value[place] ^= 1
    bench.store.content[name(1)] = bytes(value)
    assert bench.move(JobKind.LOAD, *((key(i), 20 + i) for i in range(3))) == (1,)
    assert sum(bench.connector.faults.values()) == 1
    assert not bench.connector.breakers.load.is_open


def test_another_units_record_is_not_believed(bench: Bench) -> None:
    fill(bench, 2)
    bench.store.content[name(1)] = bench.store.content[name(0)]
    assert bench.move(JobKind.LOAD, (key(1), 20)) == (0,)
    assert bench.connector.faults == {"identity": 1}


def test_a_claim_without_bytes_is_not_believed(bench: Bench) -> None:
    bench.store.edit = lambda kind, reply: [True] * len(reply)
    assert bench.move(JobKind.LOAD, (key(1), 20)) == (0,)
    assert bench.connector.faults == {"format": 1}


def test_loads_do_not_wait_for_stores(bench: Bench) -> None:
    fill(bench, 2)
    bench.store.gates[STORE].clear()
    jobs = [bench.submit(JobKind.STORE, [(key(10 + i), i)]) for i in range(20)]
    assert bench.move(JobKind.LOAD, (key(1), 20)) == ()
    assert not set(jobs) & set(bench.reports)


def test_loads_that_fail_open_the_breaker_although_questions_are_answered(make: Make) -> None:
    breakers, clock = timed()
    bench = make(breakers=breakers)
    fill(bench, 1)
    bench.store.broken = {LOAD}
    for _ in range(3):
        assert bench.answer(key(0)) == [True]
        assert bench.move(JobKind.LOAD, (key(0), 20)) == (0,)
    assert bench.connector.probe([key(0)]) == [False]
    loads = bench.store.count(LOAD)
    assert bench.move(JobKind.LOAD, (key(0), 20)) == (0,), "reported without a call"
    assert bench.store.count(LOAD) == loads == 3
    bench.store.broken = set()
    clock.now = 1.0
    assert bench.answer(key(0)) == [True]
    assert bench.move(JobKind.LOAD, (key(0), 20)) == ()
    assert not breakers.load.is_open


def test_a_load_that_hangs_keeps_others_from_being_sent_after_it(make: Make) -> None:
    breakers, clock = timed()
    bench = make(breakers=breakers)
    fill(bench, 2)
    assert bench.answer(key(1)) == [True]
    bench.store.gates[LOAD].clear()
    job = bench.submit(JobKind.LOAD, [(key(0), 20)])
    eventually(lambda: bench.store.count(LOAD) == 1)
    assert bench.connector.probe([key(1)]) == [True]
    clock.now = 3.1
    assert bench.connector.probe([key(1)]) == [False]
    bench.store.gates[LOAD].set()
    assert bench.wait(job).failed == ()
    assert bench.connector.probe([key(1)]) == [True]


def test_after_a_failure_the_connection_is_made_anew(bench: Bench) -> None:
    fill(bench, 1)
    bench.store.broken = {LOAD}
    assert bench.move(JobKind.LOAD, (key(0), 20)) == (0,)
    bench.store.broken = set()
    assert bench.move(JobKind.LOAD, (key(0), 20)) == ()
    assert bench.store.opened["records"] == 3
    assert bench.store.closed["records"] == 1


def test_what_moved_before_a_failure_counts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_mover, "BATCH_RECORDS", 2)

    def fail_at_the_third(kind: str, reply: Any) -> Any:
        if bench.store.count(STORE) == 3:
            raise OSError("gone")
        return reply

    bench.store.edit = fail_at_the_third
    job = bench.submit(JobKind.STORE, [(key(i), i) for i in range(9)])
    report = bench.wait(job)
    assert report.failed == (4, 5, 6, 7, 8)
    assert report.moved_bytes == 4 * UNIT


# ------------------------------------------------------------------------------------------------------------- stores


def test_nothing_is_offered_while_too_much_is_on_its_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_BACKLOG", 4 * UNIT)
    bench.store.gates[STORE].clear()
    assert bench.connector.offer([key(i) for i in range(6)]) == [True] * 4 + [False] * 2
    job = bench.submit(JobKind.STORE, [(key(i), i) for i in range(3)])
    assert bench.connector.offer([key(i) for i in range(6)]) == [True] + [False] * 5
    more = bench.submit(JobKind.STORE, [(key(3), 3)])
    assert bench.connector.offer([key(i) for i in range(6)]) == [False] * 6
    bench.store.gates[STORE].set()
    bench.wait(job)
    bench.wait(more)
    assert bench.connector.offer([key(i) for i in range(10, 14)]) == [True] * 4


def test_a_full_store_is_left_alone(make: Make) -> None:
    breakers, clock = timed()
    bench = make(breakers=breakers)
    fill(bench, 2)
    bench.store.room = 2
    for i in range(3):
        assert bench.connector.offer([key(10)]) == [True]
        assert bench.move(JobKind.STORE, (key(10 + i), 1)) == (0,)
    assert bench.connector.offer([key(10)]) == [False]
    assert bench.answer(key(0)) == [True], "it still delivers"
    assert bench.move(JobKind.LOAD, (key(0), 20)) == ()
    bench.store.room = 9
    clock.now = 1.0
    assert bench.connector.offer([key(10)]) == [True]
    assert bench.move(JobKind.STORE, (key(10), 1)) == ()
    assert not bench.connector.breakers.store.is_open


def test_a_store_with_room_for_some_takes_some(bench: Bench) -> None:
    bench.store.room = 2
    assert bench.move(JobKind.STORE, *((key(i), i) for i in range(4))) == (2, 3)
    assert bench.connector.probe([key(0), key(1)]) == [True, True]
    assert bench.connector.breakers.store.trips == 0


@pytest.mark.parametrize("kind", [JobKind.LOAD, JobKind.STORE])
@pytest.mark.parametrize("reply", [[], [True], [True] * 3, None])
def test_a_wrong_number_of_results_fails_the_order(bench: Bench, kind: JobKind, reply: Any) -> None:
    bench.store.edit = lambda what, _: reply
    assert bench.move(kind, (key(0), 0), (key(1), 1)) == (0, 1)
    bench.store.edit = lambda what, reply: reply
    fill(bench, 2)


# --------------------------------------------------------------------------------------------------- cancel and close


def test_cancelled_orders_end_without_being_carried_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_mover, "BATCH_RECORDS", 2)
    bench.store.gates[STORE].clear()
    first = bench.submit(JobKind.STORE, [(key(i), i) for i in range(6)])
    second = bench.submit(JobKind.STORE, [(key(10), 0)])
    third = bench.submit(JobKind.STORE, [(key(20), 0)])
    eventually(lambda: bench.store.count(STORE) == 1)
    bench.mover.cancel(JobId(first))
    bench.mover.cancel(JobId(second))
    bench.mover.cancel(JobId(12345))
    bench.store.gates[STORE].set()
    assert bench.wait(first).failed == (2, 3, 4, 5), "the batch that had begun was finished"
    assert bench.wait(second).failed == (0,)
    assert bench.wait(third).failed == ()
    assert bench.mover._cancelled == bench.mover._pending == set()  # type: ignore[attr-defined]
    assert bench.mover.backlog_bytes == 0  # type: ignore[attr-defined]


def test_closing_gives_up_what_was_not_begun(make: Make) -> None:
    bench = make()
    bench.store.gates[STORE].clear()
    jobs = [bench.submit(JobKind.STORE, [(key(i), i)]) for i in range(30)]
    eventually(lambda: bench.store.count(STORE) == 1)
    threading.Timer(0.1, bench.store.gates[STORE].set).start()
    bench.close()
    assert bench.store.count(STORE) == 1
    bench.poll()
    assert sorted(bench.reports) == jobs, "and says so"


def test_closing_does_not_wait_for_a_store_that_hangs_for_ever(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "CLOSE_S", 0.1)
    monkeypatch.setattr(store, "CLOSE_S", 0.1)
    monkeypatch.setattr(store_mover, "CLOSE_S", 0.1)
    bench = make()
    for gate in bench.store.gates.values():
        gate.clear()
    bench.connector.probe([key(0)])
    bench.submit(JobKind.LOAD, [(key(0), 1)])
    bench.submit(JobKind.STORE, [(key(0), 2)])
    start = time.monotonic()
    bench.close()
    assert time.monotonic() - start < 3
    for gate in bench.store.gates.values():
        gate.set()
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("ostinato-memory")])


def test_a_connector_that_was_never_used_closes(make: Make) -> None:
    make()
    assert make().store.opened == {}


def test_a_closed_store_that_refuses_connections_is_survived(make: Make) -> None:
    bench = make()

    def refuse(site: Any) -> Any:
        raise ConnectionRefusedError("nobody is there")

    bench.connector.open_records = refuse  # type: ignore[method-assign]
    bench.connector.open_directory = refuse  # type: ignore[method-assign]
    assert bench.answer(key(0)) == [False]
    for _ in range(10):
        assert bench.move(JobKind.LOAD, (key(0), 1)) == (0,)
        assert bench.move(JobKind.STORE, (key(0), 1)) == (0,)
    assert bench.connector.breakers.load.trips >= 1
