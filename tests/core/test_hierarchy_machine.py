"""The hierarchy under a state machine: any order of calls, reports and faults."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.scenarios import MAX_DECODE, MAX_PROMPT, SETUPS, prompt
from core.world import World

SMALL: Final = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
LARGE: Final = settings(SMALL, max_examples=2000, stateful_step_count=100)
INDEX = st.integers(0, 30)
BROKEN = st.sampled_from((frozenset[int](), frozenset({0}), frozenset(range(99))))


class HierarchyMachine(RuleBasedStateMachine):
    """Requests with shared prefixes, a scheduler that decides anything, and movers that do anything."""

    @initialize(name=st.sampled_from(sorted(SETUPS)))
    def begin(self, name: str) -> None:
        self.world = World(SETUPS[name])

    @precondition(lambda self: len(self.world.clients) < 7)
    @rule(
        family=st.integers(0, 1),
        shared=st.sampled_from((56, 40, 24, 17, 8, 0)),
        length=st.integers(1, MAX_PROMPT),
        decode=st.sampled_from((0, 3, MAX_DECODE)),
        salt=st.sampled_from(("", "", "salt")),
    )
    def open(self, family: int, shared: int, length: int, decode: int, salt: str) -> None:
        self.world.open(prompt(family, shared, length, length % 3), decode, salt)

    @precondition(lambda self: self.world.in_flight is None)
    @rule(chunks=st.lists(st.sampled_from((100, 8, 4, 3, 1)), min_size=1, max_size=3), admit=st.booleans())
    def plan(self, chunks: list[int], admit: bool) -> None:
        self.world.plan(chunks, admit)

    @precondition(lambda self: self.world.in_flight is not None)
    @rule(backwards=st.booleans())
    def apply(self, backwards: bool) -> None:
        count = len(self.world.worker.inbox)
        self.world.apply(range(count)[::-1] if backwards else range(count))

    @precondition(lambda self: self.world.in_flight is None)
    @rule()
    def step(self) -> None:
        """Plan and apply with all reports that are due: so that most games get somewhere."""
        self.world.plan()
        for errand in list(self.world.worker.open_errands()):
            self.world.worker.report(errand)
        self.world.apply()

    @precondition(lambda self: self.world.worker.open_errands())
    @rule(
        index=INDEX,
        broken=st.sampled_from((frozenset[int](), frozenset({0}), frozenset(range(99)))),
        copies=st.integers(1, 2),
    )
    def report(self, index: int, broken: frozenset[int], copies: int) -> None:
        errands = self.world.worker.open_errands()
        self.world.worker.report(errands[index % len(errands)], broken, copies)

    @precondition(lambda self: self.world.worker.open_errands())
    @rule(index=INDEX, broken=st.booleans())
    def fidget(self, index: int, broken: bool) -> None:
        """A mover that works, perhaps long after its deadline, and says nothing."""
        errands = self.world.worker.open_errands()
        self.world.worker.move(errands[index % len(errands)], frozenset({0}) if broken else frozenset())

    @precondition(lambda self: self.world.clients)
    @rule(index=INDEX)
    def abort(self, index: int) -> None:
        clients = list(self.world.clients.values())
        self.world.close(clients[index % len(clients)])

    @precondition(lambda self: self.world.in_flight is None and self.world.running)
    @rule(index=INDEX)
    def preempt(self, index: int) -> None:
        self.world.preempt(self.world.running[index % len(self.world.running)])

    @rule(seconds=st.sampled_from((0.5, 5.0, 11.0)))
    def wait(self, seconds: float) -> None:
        self.world.clock.now += seconds

    @rule(job=st.integers(0, 20), rank=st.integers(-1, 2))
    def forge(self, job: int, rank: int) -> None:
        self.world.forge(job, rank)

    @precondition(lambda self: self.world.asked)
    @rule(mood=st.sampled_from(("honest", "silent", "liar")), forget=st.booleans())
    def change_mood(self, mood: str, forget: bool) -> None:
        for tier in self.world.asked:
            tier.mood = mood
            if forget:
                tier.forget()

    @rule(device_only=st.booleans())
    def reset(self, device_only: bool) -> None:
        self.world.cache.core.drop_idle(device_only)

    @invariant()
    def ledger(self) -> None:
        if hasattr(self, "world"):
            self.world.cache.audit()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run()
            self.world.check_quiet()


def test_machine() -> None:
    run_state_machine_as_test(HierarchyMachine, settings=SMALL)


@pytest.mark.slow
def test_long_machine() -> None:
    run_state_machine_as_test(HierarchyMachine, settings=LARGE)
