"""Reports of standstill: whatever holds the blocks, every request ends in a bounded number of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from field.rig import Rig, expected_tokens, fake_rig, layout_of
from field.scripted import LOAD, STORE, ScriptedTier, kept
from field.tiny import Oracle, prompt, runtime, tiny_engine
from ostinato.cache.kinds import Full, Window
from ostinato.connectors.api import Hook
from ostinato.connectors.context import Pin
from ostinato.errors import CapacityError
from ostinato.ids import JobId, RequestId, Step
from ostinato.scheduler.policy import Policy
from ostinato.transfer.job import TransferReport

FULL = layout_of(Full())


def session(number: int, length: int) -> list[int]:
    return [number * 10_000 + position for position in range(length)]


def check_answers(rig: Rig, asked: dict[str, tuple[list[int], int]]) -> None:
    for name, (tokens, count) in asked.items():
        assert rig.outputs[name].outputs[0].token_ids == expected_tokens(tokens, count)


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("make", [ScriptedTier, kept])
@pytest.mark.parametrize("urgent", [-1, 0, 1])
def test_d01_parked_loads_and_a_head_that_needs_their_blocks(
    policy: Policy, make: Callable[[], ScriptedTier], urgent: int
) -> None:
    """vllm#45387: two parked loads of 3 and 4 blocks in a pool of 7, and a head that needs 6, wait for each other."""
    tier = make()
    rig = fake_rig(FULL, 7, [tier], policy=policy)
    for number, blocks in ((1, 4), (2, 3)):
        rig.serve(session(number, 16 * blocks))
        rig.evict_device()
    tier.mover.shut(LOAD)
    asked = {}
    for number, blocks in ((1, 4), (2, 3)):
        tokens, count = session(number, 16 * blocks), 12
        asked[rig.add(tokens, count)] = (tokens, count)
    rig.step(2)
    assert {rig.phase(name) for name in asked} == {"parked"}
    head = session(3, 90)
    asked[rig.add(head, 4, priority=urgent)] = (head, 4)
    rig.step(20)
    tier.mover.open(LOAD)
    rig.run(patience=10)
    check_answers(rig, asked)
    rig.check_quiet()


@pytest.mark.parametrize("policy", list(Policy))
def test_d01_a_load_that_never_ends_holds_up_nobody_for_ever(policy: Policy) -> None:
    """After the deadline its blocks are lost until it reports, and the others get what is left."""
    tier = ScriptedTier()
    rig = fake_rig(FULL, 9, [tier], policy=policy)
    rig.serve(session(1, 48))
    rig.evict_device()
    tier.mover.shut(LOAD)
    asked = {}
    for number, length in ((1, 49), (3, 90), (4, 30)):
        asked[rig.add(session(number, length), 4)] = (session(number, length), 4)
    rig.tick = 1.0
    rig.run(patience=45)
    check_answers(rig, asked)
    tier.mover.open(LOAD)
    rig.check_quiet()


def test_d06_reports_are_reaped_when_nothing_can_be_scheduled() -> None:
    """sglang PR#32455: completions are looked at only where blocks are evicted, and nothing can be evicted."""
    tier = ScriptedTier()
    rig = fake_rig(FULL, 8, [tier])
    tier.mover.shut(STORE)
    rig.add(session(1, 64))
    rig.run()
    rig.step()
    assert tier.mover.waiting(STORE)
    tokens = session(2, 120)
    name = rig.add(tokens, 2)
    rig.step(15)
    assert rig.phase(name) == "waiting"
    tier.mover.open(STORE)
    rig.run(patience=4)
    check_answers(rig, {name: (tokens, 2)})
    rig.check_quiet()


class Pinner(ScriptedTier):
    """Pins all it sees at the end of each step, and lets go two steps later."""

    pins: list[tuple[Step, Pin]]

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        context = self.context
        assert context is not None
        blocks = context.blocks(request_id, 0)
        assert blocks is not None
        if len(self.pins) < 3:
            self.pins.append((Step(self.now + 2), context.pin(blocks)))

    def on_step_end(self, step: Step) -> None:
        self.now = step
        for due, pin in list(self.pins):
            if due <= step:
                pin.release()
                self.pins.remove((due, pin))


def test_d06_pins_of_a_connector_end_although_nothing_is_scheduled() -> None:
    tier = Pinner(hooks=[Hook.COMMIT, Hook.STEP_END])
    tier.pins, tier.now = [], Step(0)
    rig = fake_rig(FULL, 8, [tier])
    asked = {}
    for number in range(6):
        asked[rig.add(session(number, 100), 3)] = (session(number, 100), 3)
    rig.run(patience=6)
    check_answers(rig, asked)
    rig.step(4)
    rig.check_quiet()


def test_d06_a_leaked_pin_is_said_and_not_waited_for() -> None:
    """Blocks that will never come back: the request that needs them fails by name, the others go on."""
    rig = fake_rig(FULL, 8)
    holder = rig.pool.take(4, "leak")
    rig.tick = 7.0
    long, short = rig.add(session(1, 120)), rig.add(session(2, 40))
    with pytest.raises(CapacityError, match=long):
        rig.run(patience=20)
    rig.run()
    assert short in rig.outputs
    holder.release()
    rig.check_quiet()


def test_d15_an_abort_in_the_queue_touches_nobody_else() -> None:
    """vllm#49118: aborting a request that was never scheduled kills the engine."""
    tier, disk = ScriptedTier(hooks=list(Hook)), kept()
    rig = fake_rig(FULL, 20, [tier, disk], max_running=1)
    names = [rig.add(session(number, 64), 2) for number in range(3)]
    assert rig.engine.abort(names[1])
    assert not rig.engine.abort(names[1])
    rig.step()
    last = rig.add(session(4, 64), 2)
    rig.step()
    assert rig.engine.abort(last)
    rig.run()
    check_answers(rig, {names[0]: (session(0, 64), 2), names[2]: (session(2, 64), 2)})
    rig.check_quiet()


@pytest.mark.parametrize("steps", range(8))
def test_d15_an_abort_at_any_time(steps: int) -> None:
    """Waiting for an answer, for a load, for room, running: the other requests do not notice."""
    tier, disk = ScriptedTier(), kept()
    rig = fake_rig(FULL, 12, [tier, disk], step_tokens=32)
    rig.serve(session(1, 80))
    rig.evict_device()
    disk.mood = "silent"
    tier.mover.shut(LOAD)
    victim, other = rig.add(session(1, 100), 8), rig.add(session(2, 100), 3)
    for number in range(steps):
        rig.step()
        if number == 1:
            disk.mood = "honest"
        if number == 3:
            tier.mover.open(LOAD)
    rig.engine.abort(victim)
    disk.mood = "honest"
    tier.mover.open(LOAD)
    rig.run()
    check_answers(rig, {other: (session(2, 100), 3)})
    rig.check_quiet()


def test_d15_a_silent_tier_is_asked_until_its_deadline_only() -> None:
    disk = kept()
    rig = fake_rig(FULL, 20, [disk])
    disk.mood = "silent"
    rig.tick = 0.5
    name = rig.add(session(1, 64), 2)
    rig.run(patience=15)
    check_answers(rig, {name: (session(1, 64), 2)})
    assert rig.clock.now < 10


@pytest.mark.parametrize("tiers", [0, 1])
def test_r04_three_prompts_that_exceed_the_pool_together(tiers: int) -> None:
    """llama-server: three streams break off after 4, 1 and 0 tokens; here they queue, or one is preempted."""
    oracle = Oracle()
    pages = runtime().layout.peak_pages(124, 32)
    rig = tiny_engine([ScriptedTier()] * tiers, pages=pages * 2 - 8, step_tokens=32)
    names = [rig.add(prompt(number, 100), 24) for number in range(3)]
    rig.run()
    for name in names:
        assert len(rig.outputs[name].outputs[0].token_ids) == 24
        oracle.check(rig.outputs[name])
    rig.check_quiet()


@pytest.mark.parametrize("pages", range(8, 26))
@pytest.mark.parametrize("policy", list(Policy))
def test_r04_any_pool_that_holds_one_of_them_serves_them_all(pages: int, policy: Policy) -> None:
    """Decoding outgrows the pool: victims are preempted and resume, in every size of pool."""
    tier = ScriptedTier(slots=16)
    rig = fake_rig(layout_of(Full(), Window(16)), pages + 4, [tier], step_tokens=32, policy=policy)
    asked = {}
    for number in range(5):
        tokens, count = session(number, 30 + number), 60 + number
        asked[rig.add(tokens, count, priority=number % 3)] = (tokens, count)
    rig.run(patience=10)
    check_answers(rig, asked)
    assert pages > 16 or any(output.metrics.preemptions for output in rig.outputs.values())
    rig.check_quiet()


def break_probe(tier: ScriptedTier) -> None:
    tier.probe = broken_call  # type: ignore[method-assign]


def break_offer(tier: ScriptedTier) -> None:
    tier.offer = broken_call  # type: ignore[method-assign]


def break_refuted(tier: ScriptedTier) -> None:
    tier.mood = "liar"
    tier.refuted = broken_call  # type: ignore[method-assign]


def break_submit(tier: ScriptedTier) -> None:
    tier.mover.submit = broken_call  # type: ignore[method-assign]


def break_poll(tier: ScriptedTier) -> None:
    tier.mover.poll = broken_call  # type: ignore[method-assign]


def report_rubbish(tier: ScriptedTier) -> None:
    rubbish = [None, TransferReport(JobId(1), failed=None), TransferReport(JobId(1), failed=("0",))]  # type: ignore[arg-type]
    tier.mover.poll = lambda: rubbish  # type: ignore[assignment, return-value]


def answer_too_little(tier: ScriptedTier) -> None:
    tier.probe = lambda keys: [True]  # type: ignore[method-assign]


def broken_call(*arguments: object) -> Any:
    raise RuntimeError("the store is gone")


TIER_FAULTS = [
    break_probe,
    break_offer,
    break_refuted,
    break_submit,
    break_poll,
    report_rubbish,
    answer_too_little,
]


@pytest.mark.parametrize("break_it", TIER_FAULTS)
def test_a_tier_that_raises_is_a_miss(break_it: Callable[[ScriptedTier], None]) -> None:
    """Whatever a tier does, the worst case is recomputation."""
    disk = kept()
    rig = tiny_engine([disk])
    break_it(disk)
    for _ in range(2):
        name = rig.add(prompt(1, 64), 2)
        rig.run()
        Oracle().check(rig.outputs[name])
