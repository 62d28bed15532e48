"""Reports about transfers that fail, come late, or never: what is believed, and who goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from field.rig import Rig, expected_tokens, fake_rig, layout_of
from field.scripted import LOAD, STORE, ScriptedTier, kept
from ostinato.cache.kinds import Full, State, Window
from ostinato.cache.pool import SlotState
from ostinato.ids import RequestId
from ostinato.scheduler.policy import Policy

FULL = layout_of(Full())
SMALL = layout_of(Full(), Window(32))
HYBRID = layout_of(Full(), Window(32), State())

Make = Callable[[], ScriptedTier]
below = pytest.mark.parametrize("make", [ScriptedTier, kept], ids=["host", "disk"])


def session(number: int, length: int) -> list[int]:
    return [number * 10_000 + position for position in range(length)]


def check(rig: Rig, name: str, tokens: list[int], count: int = 1) -> int:
    """The answer is the cold one; returns what was reused."""
    output = rig.outputs[name]
    assert output.outputs[0].token_ids == expected_tokens(tokens, count)
    return output.cached_tokens


def below_only(tier: ScriptedTier, tokens: list[int], layout: Any = SMALL, pages: int = 100, **options: Any) -> Rig:
    """The tier has ``tokens``, the device has nothing."""
    rig = fake_rig(layout, pages, [tier], **options)
    rig.serve(tokens)
    rig.evict_device()
    return rig


# ------------------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize(
    ("layout", "hit"), [(SMALL, 208), (layout_of(Full(), Full()), 208), (layout_of(Window(32), Full()), 208)]
)
def test_w06_a_hit_is_what_all_groups_really_returned(layout: Any, hit: int) -> None:
    """W06, sglang PR#31108: both pools said yes, then the last 3 objects of one are evicted before the get.

    Right: the prefix is clipped to what all groups returned; the rest is computed again.
    """
    disk = kept()
    rig = below_only(disk, session(1, 256), layout)
    disk.mover.shut(LOAD)
    name = rig.add([*session(1, 256), 5], 3)
    rig.step(2)
    for order in disk.mover.orders(STORE):
        for move in order.moves:
            if move.key.group == 1 and move.ordinal in (13, 14, 15):
                del disk.stored[move.key]
    disk.mover.open(LOAD)
    rig.run()
    assert check(rig, name, [*session(1, 256), 5], 3) == hit
    assert disk.refutations
    rig.check_quiet()


@below
@pytest.mark.parametrize("layout", [SMALL, HYBRID], ids=["small", "hybrid"])
def test_w18_a_failed_block_is_never_loaded(make: Make, layout: Any) -> None:
    """W18, dynamo#15079: one of 8 blocks fails while the job counts as done; HTTP 200 with another request's KV.

    Right (F03, vllm-ascend#10561, is the same): it never becomes loaded, also not for those that joined; recompute.
    """
    for bad in range(8):
        tier = make()
        rig = below_only(tier, session(1, 128), layout)
        tier.mover.broken = {(0, bad)}
        names = [rig.add([*session(1, 128), number], 2) for number in range(2)]
        rig.run()
        assert check(rig, names[0], [*session(1, 128), 0], 2) <= 16 * bad
        check(rig, names[1], [*session(1, 128), 1], 2)  # may reuse what the first one computed
        assert rig.cache.core.book.stats.failed_moves >= 1
        rig.check_quiet()


@below
def test_w18_a_failed_store_is_never_found(make: Make) -> None:
    """W18 on the way down: what did not arrive is not hit, and what follows it is of no use."""
    for bad in range(8):
        tier = make()
        tier_rig = fake_rig(SMALL, 100, [tier])
        tier.mover.broken = {(0, bad)}
        tier_rig.serve(session(1, 128))
        tier_rig.evict_device()
        tier.mover.broken = set()
        output = tier_rig.serve([*session(1, 128), 5], 2)
        assert output.outputs[0].token_ids == expected_tokens([*session(1, 128), 5], 2)
        assert output.cached_tokens == 16 * bad
        tier_rig.check_quiet()


def test_f04_data_that_went_between_look_up_and_load() -> None:
    """F04, LMCache#1690: the index says yes and the data is gone.

    Right: the prefix is kept up to the first gap, the rest is computed again; counters move.
    """
    disk = kept()
    rig = below_only(disk, session(1, 256), FULL)
    disk.mover.shut(LOAD)
    name = rig.add([*session(1, 256), 5], 3)
    rig.step(2)
    (order,) = disk.mover.waiting(LOAD)
    for move in order.moves:
        if move.ordinal in (6, 7, 11):
            disk.stored.pop(move.key)
    disk.mover.open(LOAD)
    rig.run()
    assert check(rig, name, [*session(1, 256), 5], 3) == 96
    assert len(disk.mover.orders(LOAD)) == 1, "what arrived is not loaded twice"
    assert len(disk.refutations) == 3
    assert rig.cache.core.book.stats.failed_moves == 3
    rig.check_quiet()


@below
def test_f05_a_load_of_ten_thousand_steps(make: Make) -> None:
    """F05, vllm#49545: one slow get parks a request for a minute.

    Right: after the limit (20 steps) it is computed in other blocks; late data is ignored; the old blocks are free
    when the load ends.
    """
    tier = make()
    rig = below_only(tier, session(1, 128))
    rig.tick = rig.cache.core.config.load_deadline_s / 20
    tier.mover.shut(LOAD)
    name = rig.add([*session(1, 128), 5], 4)
    rig.step(2)
    (order,) = tier.mover.waiting(LOAD)
    slow = {move.device_slot for move in order.moves}
    rig.run(until=lambda: rig.phase(name) == "running", patience=25)
    assert rig.engine.executor.steps <= 40  # type: ignore[attr-defined]
    rows = rig.cache.table(RequestId(name)).rows
    assert not slow & {slot for row in rows for slot in row}
    tier.mover.broken = {(group, ordinal) for group in (0, 1) for ordinal in range(8)}
    tier.mover.copy(order)
    rig.run()
    assert check(rig, name, [*session(1, 128), 5], 4) == 0
    assert {rig.pool.state(slot) for slot in slow} == {SlotState.QUARANTINE}
    rig.step(10_000 // 100)
    assert {rig.pool.state(slot) for slot in slow} == {SlotState.QUARANTINE}
    tier.mover.open(LOAD)
    rig.step()
    rig.check_quiet()


def test_f09_a_lease_that_ends_before_the_transfer() -> None:
    """F09, Mooncake#3076: keys are known, but their lease (1 step) ends during the transfer (3 steps).

    Right: treated as failed; nothing is believed that was read after the end.
    """
    disk = kept()
    rig = below_only(disk, session(1, 128))
    disk.mover.shut(LOAD)
    name = rig.add([*session(1, 128), 5], 2)
    rig.step(2)
    disk.stored.clear()
    rig.step(3)
    disk.mover.open(LOAD)
    rig.run()
    assert check(rig, name, [*session(1, 128), 5], 2) == 0
    assert rig.cache.core.book.stats.failed_moves == 8 + 2
    rig.check_quiet()


# --------------------------------------------------------------------------------------------------- waiting for others


@below
def test_d08_one_completion_is_lost(make: Make) -> None:
    """D08, LMCache#4759: a wake-up is lost, everything is idle, a request is parked for ever.

    Right: a deadline, then recomputation; the request ends.
    """
    tier = make()
    rig = below_only(tier, session(1, 128))
    tier.mover.shut(LOAD)
    names = [rig.add([*session(1, 128), number], 2) for number in range(2)]
    rig.step(2)
    (lost,) = [tier.mover.drop(order) for order in tier.mover.waiting(LOAD)]
    tier.mover.open(LOAD)
    rig.tick = 1.0
    rig.run(patience=int(rig.cache.core.config.load_deadline_s) + 2)
    for number, name in enumerate(names):
        check(rig, name, [*session(1, 128), number], 2)
    tier.mover.deliver(lost)
    rig.step()
    rig.check_quiet()


@below
@pytest.mark.parametrize("apart", [False, True])
def test_d11_twenty_requests_behind_one_load(make: Make, apart: bool) -> None:
    """D11, vllm#44294: 50 requests with one prefix queue behind one load, then one after another.

    Right: one load of 10 steps; the others join it and start in the step in which it ends.
    """
    tier = make()
    rig = below_only(tier, session(1, 128), SMALL, 400)
    tier.mover.shut(LOAD)
    names = []
    for number in range(20):
        names.append(rig.add([*session(1, 128), number], 2))
        rig.step(number % 2 if apart else 0)
    rig.step(0 if apart else 10)
    assert {rig.phase(name) for name in names} == {"parked"}
    assert len(tier.mover.orders(LOAD)) == 1
    tier.mover.open(LOAD)
    rig.step(2)
    assert {rig.phase(name) for name in names} == {"running"}
    rig.run()
    for number, name in enumerate(names):
        assert check(rig, name, [*session(1, 128), number], 2) == 128
    assert len(tier.mover.orders(LOAD)) == 1
    rig.check_quiet()


@below
def test_d12_a_slow_store_and_a_new_request(make: Make) -> None:
    """D12, vllm PR#45595: the engine blocks on a flush when its last request ends.

    Right: a request that comes while the store is still under way is scheduled at once.
    """
    tier = make()
    rig = fake_rig(SMALL, 60, [tier])
    tier.mover.shut(STORE)
    rig.add(session(1, 128))
    rig.run()
    rig.step()
    assert tier.mover.waiting(STORE)
    name = rig.add(session(2, 40))
    rig.step()
    assert name in rig.outputs
    assert tier.mover.waiting(STORE)
    tier.mover.open(STORE)
    rig.check_quiet()


@below
@pytest.mark.parametrize("layout", [SMALL, HYBRID], ids=["small", "hybrid"])
@pytest.mark.parametrize("steps", [2, 3, 5])
def test_d14_preempted_with_a_store_under_way_and_admitted_with_a_hit(make: Make, layout: Any, steps: int) -> None:
    """D14, vllm#46014: a preempted request with a store in flight is admitted again with an external hit: assertion.

    Right: deferred if need be, then it goes on; the output equals a cold run.
    """
    tier = make()
    rig = below_only(tier, session(1, 64), layout, 60, step_tokens=48)
    tier.mover.shut(STORE)
    tokens = session(1, 150)
    name = rig.add(tokens, 20)
    rig.step(steps)
    assert rig.phase(name) == "running"
    scheduler = rig.engine.scheduler
    for _ in range(2):
        scheduler._preempt(scheduler.requests[RequestId(name)])
        rig.cache.core.drop_idle(device_only=True)
        rig.step(2)
    tier.mover.shut(LOAD)
    rig.step(3)
    tier.mover.open(LOAD, STORE)
    rig.run()
    check(rig, name, tokens, 20)
    rig.check_quiet()


@below
@pytest.mark.parametrize("policy", list(Policy))
def test_d02_loaded_requests_that_need_one_block_more(make: Make, policy: Policy) -> None:
    """D02, vllm PR#57104: A needs 4 + 1 blocks, B 3 + 1, the pool has 7: both hold what they loaded, for ever.

    Right: both finish.
    """
    tier = make()
    rig = fake_rig(FULL, 7, [tier], policy=policy)
    asked = []
    for number, blocks in ((1, 4), (2, 3)):
        rig.serve(session(number, 16 * blocks))
        rig.evict_device()
    for number, blocks in ((1, 4), (2, 3)):
        asked.append((rig.add(session(number, 16 * blocks), 12), session(number, 16 * blocks)))
    rig.run(patience=10)
    for name, tokens in asked:
        check(rig, name, tokens, 12)
    rig.check_quiet()


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("silent_for", [0, 4, 40])
def test_d03_a_deferred_request_before_a_loaded_one(policy: Policy, silent_for: int) -> None:
    """D03, vllm PR#57841: A is deferred (the connector says later) and holds nothing; B behind it is loaded and holds.

    Then A needs more than is free.  Right: both finish.
    """
    host, disk = ScriptedTier(), kept()
    rig = fake_rig(FULL, 8, [host, disk], policy=policy)
    rig.serve(session(2, 64))
    rig.evict_device()
    probe = disk.probe
    disk.probe = lambda keys: None if disk.mood == "silent" else probe(keys)  # type: ignore[method-assign]
    disk.mood, rig.tick = "silent", 0.1
    host.mover.shut(LOAD)
    first, second = rig.add(session(1, 100), 4), rig.add([*session(2, 64), 1], 30)
    rig.step(2)
    disk.mood = "honest"
    rig.step()
    disk.mood = "silent"
    rig.step(silent_for)
    host.mover.open(LOAD)
    disk.mood = "honest"
    rig.run(patience=10)
    check(rig, first, session(1, 100), 4)
    check(rig, second, [*session(2, 64), 1], 30)
    rig.check_quiet()
