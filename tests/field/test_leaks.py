"""Reports of leaks: every claim on a block ends with whoever made it, whichever way out is taken."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from field.rig import Rig, expected_tokens, fake_rig, layout_of, pins
from field.scripted import LOAD, STORE, ScriptedTier, kept
from ostinato.cache.kinds import Full, Window
from ostinato.hierarchy.residency import NoRoom
from ostinato.ids import RequestId

SMALL = layout_of(Full(), Window(32))
WINDOW_16 = layout_of(Full(), Window(16), Window(16), unit=16)


def session(number: int, length: int) -> list[int]:
    return [number * 10_000 + position for position in range(length)]


@pytest.mark.parametrize("eager", [True, False])
def test_l01_a_window_block_is_never_freed_twice(eager: bool) -> None:
    """vllm#42571: a window recycles blocks while an eager store holds them; audited in each step of 300 requests."""
    rng = random.Random(1)
    tier = ScriptedTier(slots=60, eager=eager)
    rig = fake_rig(WINDOW_16, 70, [tier], step_tokens=48)
    for number in range(300):
        name = rig.add(session(rng.randrange(12), 200)[: rng.randint(150, 200)], rng.randint(1, 20))
        if number % 3 == 0:
            tier.mover.shut(STORE)
            rig.step(rng.randint(1, 6))
        if number % 7 == 0:
            rig.engine.abort(name)
        if number % 5 == 0:
            tier.mover.open(STORE)
            rig.run()
    tier.mover.open(STORE)
    rig.run()
    rig.check_quiet()
    assert len(tier.mover.orders(STORE)) > 100


def test_l04_look_ups_that_load_nothing_pin_nothing() -> None:
    """LMCache#1034: a hit of 1000 tokens that the device holds too, 200 times; then the tier takes new data."""
    tier = ScriptedTier(slots=200)
    rig = fake_rig(SMALL, 200, [tier], step_tokens=512)
    prefix = session(1, 1008)
    rig.serve(prefix)
    host = rig.cache.core.lower[tier.tier].pool
    for number in range(200):
        output = rig.serve([*prefix, number])
        assert output.cached_tokens == 1008
        assert pins(rig) == 0
    assert not tier.mover.orders(LOAD)
    assert host.available == host.capacity
    before = len(tier.mover.orders(STORE))
    for number in range(3):
        rig.serve(session(2 + number, 1008))
    assert len(tier.mover.orders(STORE)) > before
    rig.evict_device()
    assert rig.serve([*session(4, 1008), 5]).cached_tokens == 1008, "new data finds room"
    rig.check_quiet()


def test_l04_a_partial_load_gives_its_pins_back() -> None:
    tier = ScriptedTier()
    rig = fake_rig(SMALL, 100, [tier])
    rig.serve(session(1, 256))
    rig.evict_device()
    rig.serve(session(1, 128))
    output = rig.serve([*session(1, 256), 5])
    assert output.cached_tokens == 256
    assert set(output.cached_by_tier) == {"device", "host"}
    assert pins(rig) == 0
    rig.check_quiet()


def loading(tier: ScriptedTier) -> tuple[Rig, str]:
    """A request whose load has begun and does not end."""
    rig = fake_rig(SMALL, 100, [tier])
    rig.serve(session(1, 256))
    rig.evict_device()
    tier.mover.shut(LOAD)
    name = rig.add([*session(1, 256), 5], 3)
    rig.step()
    assert rig.phase(name) == "parked"
    assert pins(rig) > 0
    return rig, name


def leave_by_abort(rig: Rig, tier: ScriptedTier, name: str) -> None:
    rig.engine.abort(name)
    rig.step()
    tier.mover.open(LOAD)


def leave_by_failure(rig: Rig, tier: ScriptedTier, name: str) -> None:
    tier.mover.fail(tier.mover.waiting(LOAD)[0])
    tier.mover.open(LOAD)


def leave_by_partial_failure(rig: Rig, tier: ScriptedTier, name: str) -> None:
    tier.mover.broken = {(0, 3), (1, 15)}
    tier.mover.open(LOAD)


def leave_by_deadline(rig: Rig, tier: ScriptedTier, name: str) -> None:
    rig.clock.now += 31.0
    rig.step(2)
    tier.mover.open(LOAD)


def leave_by_deadline_and_abort(rig: Rig, tier: ScriptedTier, name: str) -> None:
    rig.clock.now += 31.0
    rig.step(2)
    rig.engine.abort(name)
    tier.mover.open(LOAD)


def leave_by_preemption(rig: Rig, tier: ScriptedTier, name: str) -> None:
    tier.mover.open(LOAD)
    rig.run(until=lambda: rig.phase(name) == "running")
    scheduler = rig.engine.scheduler
    scheduler._preempt(scheduler.requests[RequestId(name)])


EXITS = [
    leave_by_abort,
    leave_by_failure,
    leave_by_partial_failure,
    leave_by_deadline,
    leave_by_deadline_and_abort,
    leave_by_preemption,
]


@pytest.mark.parametrize("leave", EXITS)
@pytest.mark.parametrize("make", [ScriptedTier, kept])
def test_l04_every_way_out_of_a_load_ends_its_pins(
    make: Callable[[], ScriptedTier], leave: Callable[[Rig, ScriptedTier, str], None]
) -> None:
    tier = make()
    rig, name = loading(tier)
    leave(rig, tier, name)
    rig.run()
    rig.settle()
    assert pins(rig) == 0
    if name in rig.outputs:
        assert rig.outputs[name].outputs[0].token_ids == expected_tokens([*session(1, 256), 5], 3)
    rig.check_quiet()
    tier.mover.broken.clear()
    tokens = session(2, 256)
    rig.serve(tokens)
    rig.evict_device()
    assert rig.serve([*tokens, 5]).cached_tokens == 256, "the tier still takes and gives"


def test_l04_an_abort_before_the_order_left_harms_nobody() -> None:
    tier = ScriptedTier()
    rig = fake_rig(SMALL, 100, [tier])
    rig.serve(session(1, 256))
    rig.evict_device()
    name = rig.add([*session(1, 256), 5], 3)
    plan = rig.engine.scheduler.plan()
    rig.engine.abort(name)
    rig.engine.scheduler.apply(rig.engine.executor.execute(plan))
    rig.cache.audit()
    rig.check_quiet()
    assert rig.serve([*session(1, 256), 5]).cached_tokens == 256


def test_l10_a_refused_admission_takes_nothing() -> None:
    """sglang PR#16067: one group gets its blocks, the next finds none, and the first ones are lost."""
    layout = layout_of(Full(), Window(64), Window(64), Window(64))
    rig = fake_rig(layout, 60, step_tokens=64)
    rig.serve(session(1, 128))
    holder = rig.cache.core.device.pool.take(60 - 20, "somebody")
    assert holder is not None
    rig.add([*session(1, 128), *session(2, 64)])
    before = (rig.pool.available, len(rig.pool.free_slots), len(rig.cache.core.directory))
    for _ in range(100):
        assert isinstance(rig.cache.admit(RequestId("r1")), NoRoom)
        rig.cache.audit()
        assert (rig.pool.available, len(rig.pool.free_slots), len(rig.cache.core.directory)) == before
    holder.release()
    rig.run()
    assert rig.outputs["r1"].outputs[0].token_ids == expected_tokens([*session(1, 128), *session(2, 64)], 1)
    rig.check_quiet()


@pytest.mark.parametrize("pages", range(1, 14))
def test_l10_growth_is_all_or_nothing_over_the_groups(pages: int) -> None:
    layout = layout_of(Full(), Window(32), Window(32))
    rig = fake_rig(layout, 13, step_tokens=64)
    rig.cache.open(RequestId("a"), session(1, 64))
    rig.cache.admit(RequestId("a"))
    holder = rig.pool.take(13 - pages, "somebody")
    before = rig.pool.available
    grown = rig.cache.grow(RequestId("a"), 64)
    assert grown is (pages >= 12)
    assert rig.pool.available == (before - 12 if grown else before)
    rig.cache.audit()
    holder.release()
    rig.cache.finish(RequestId("a"))
    rig.check_quiet()


def test_stores_that_never_report_are_given_up() -> None:
    """A mover that goes quiet costs its slots until it reports; nothing else, and nothing for ever."""
    tier = ScriptedTier(slots=100)
    rig = fake_rig(SMALL, 60, [tier])
    tier.mover.shut(STORE)
    rig.add(session(1, 128))
    rig.run()
    rig.step()
    lost = [tier.mover.drop(order) for order in tier.mover.waiting(STORE)]
    assert lost
    rig.clock.now += 61.0
    rig.step()
    assert pins(rig) == 2 * len(lost)
    rig.add(session(1, 128))
    rig.run()
    tier.mover.open(STORE)
    for order in lost:
        tier.mover.deliver(order)
        tier.mover.deliver(order)
    rig.step()
    rig.check_quiet()
