"""The breaker's states, by a clock that moves only when told to, and by threads."""

from __future__ import annotations

import threading

from field.scripted import Clock
from ostinato.connectors.breaker import Breaker, Breakers


def make(**options: float) -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker(limit=3, pause_s=1.0, max_pause_s=4.0, clock=clock, **options), clock


def fail(breaker: Breaker, times: int = 1) -> None:
    for _ in range(times):
        assert breaker.allows()
        breaker.failed()


def elsewhere(*calls: object) -> list[object]:
    """The results of ``calls``, made on one other thread."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.extend(call() for call in calls))  # type: ignore[operator]
    thread.start()
    thread.join()
    return results


def test_failures_in_a_row_open_it() -> None:
    breaker, _ = make()
    fail(breaker, 2)
    assert not breaker.is_open
    fail(breaker)
    assert breaker.is_open
    assert not breaker.allows()
    assert breaker.trips == 1


def test_a_success_forgets_failures() -> None:
    breaker, _ = make()
    for _ in range(5):
        fail(breaker, 2)
        assert breaker.allows()
        breaker.succeeded()
    assert not breaker.is_open
    assert breaker.trips == 0


def test_after_the_pause_one_call_tries_and_closes_it() -> None:
    breaker, clock = make()
    fail(breaker, 3)
    clock.now = 0.99
    assert not breaker.allows()
    clock.now = 1.0
    assert not breaker.is_open
    assert breaker.allows()
    assert breaker.is_open, "the trial is on its way"
    assert elsewhere(breaker.allows) == [False]
    breaker.succeeded()
    assert not breaker.is_open
    assert breaker.allows()


def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_success() -> None:
    breaker, clock = make()
    fail(breaker, 3)
    for pause in (1.0, 2.0, 4.0, 4.0):
        clock.now += pause - 0.01
        assert not breaker.allows()
        clock.now += 0.01
        fail(breaker)
        assert breaker.is_open
    clock.now += 4.0
    assert breaker.allows()
    breaker.succeeded()
    fail(breaker, 3)
    clock.now += 1.0
    assert breaker.allows()
    assert breaker.trips == 6


def test_a_late_failure_of_another_call_does_not_end_the_trial() -> None:
    breaker, clock = make()
    assert elsewhere(breaker.allows) == [True]
    fail(breaker, 3)
    clock.now = 1.0
    assert breaker.allows()
    elsewhere(breaker.failed)
    assert breaker.is_open
    assert not breaker.allows(), "the trial is still on its way"
    breaker.succeeded()
    assert not breaker.is_open


def test_a_late_success_of_another_call_closes_it() -> None:
    breaker, _ = make()
    fail(breaker, 3)
    elsewhere(breaker.succeeded)
    assert not breaker.is_open
    assert breaker.allows()


def test_a_late_failure_does_not_prolong_the_pause() -> None:
    breaker, clock = make()
    fail(breaker, 3)
    clock.now = 0.9
    breaker.failed()
    clock.now = 1.0
    assert breaker.allows()
    assert breaker.trips == 1


def test_a_call_that_hangs_holds_others_back_until_it_returns() -> None:
    breaker, clock = make(patience_s=3.0)
    assert breaker.allows()
    clock.now = 3.0
    assert not breaker.is_open
    clock.now = 3.1
    assert breaker.is_open
    breaker.succeeded()
    assert not breaker.is_open
    assert breaker.trips == 0


def test_each_kind_of_call_has_its_own() -> None:
    breakers = Breakers()
    fail(breakers.store, 3)
    assert breakers.store.is_open
    assert not breakers.lookup.is_open
    assert not breakers.load.is_open
    assert not Breakers().store.is_open
