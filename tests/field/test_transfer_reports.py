"""Reports about transfers under way: who may touch a block meanwhile, and what a failed, late or lost one means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from core.scenarios import EQUAL
from core.world import Setup, World
from field.rig import Rig, expected_tokens, fake_rig, layout_of, pins
from field.scripted import LOAD, STORE, ScriptedTier, kept
from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import Full, State, Window
from ostinato.cache.pool import SlotState
from ostinato.connectors.api import Hook, Ownership
from ostinato.hierarchy.residency import NoRoom, Parked
from ostinato.hierarchy.tiers import StoreMode
from ostinato.ids import DEVICE, JobId, RequestId, Step
from ostinato.scheduler.policy import Policy
from ostinato.transfer.job import JobKind, TransferReport

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


# ------------------------------------------------------------------------------------- who may write where, and when


@pytest.mark.parametrize("room", [True, False])
def test_w02_a_load_never_gets_blocks_that_a_running_step_reads(room: bool) -> None:
    """W02, vllm#47282: A finishes while its last step still runs; its blocks go to B's load, which writes at once.

    Right: A's step reads what a cold run would; a block is reused for a load only after the last step that had it.
    """
    prompt = [index % 9 for index in range(41)]
    pages = EQUAL.peak_pages(45, 16)
    world = World(Setup(EQUAL, 2 * pages if room else pages + 1, (("host", 90, StoreMode.EAGER),)))
    world.serve(prompt)
    world.run()
    world.cache.core.drop_idle(device_only=True)
    first = world.open([3] * 40, decode=4)
    world.run(until=lambda: bool(first in world.running and first.computed > 41 and not world.worker.errands))
    world.plan()
    assert world.in_flight is not None
    work = world.in_flight.sequences[first.name]
    rows = {slot for row in work.rows for slot in row}
    world.close(first)
    work.alive = True  # the step reads on, although nobody waits for what it samples
    second = world.open(prompt)
    answer = world.cache.admit(second.name)
    assert isinstance(answer, Parked if room else NoRoom)
    if room:
        world.parked.append(world.waiting.pop())
        orders, _ = world.cache.dispatch()
        world.worker.accept(orders)
        (errand,) = [errand for errand in world.worker.open_errands() if errand.order.kind is JobKind.LOAD]
        assert not rows & {move.device_slot for move in errand.order.moves}
        world.worker.move(errand)
    world.apply()
    world.run()
    assert second.hits == [40]
    world.check_quiet()


@below
def test_n03_a_block_is_not_reused_before_the_transfer_into_it_ends(make: Make) -> None:
    """N03, vllm PR#32255: an abort during a load frees its blocks early, and late data overwrites another request.

    Right: the blocks cannot be had until the transfer ends, however late it writes.
    """
    tier = make()
    rig = below_only(tier, session(1, 128), FULL, 12)
    tier.mover.shut(LOAD)
    name = rig.add([*session(1, 128), 5])
    rig.step(2)
    (order,) = tier.mover.waiting(LOAD)
    rig.engine.abort(name)
    small, big = rig.add(session(2, 40), 3), rig.add(session(3, 150), 2)
    rig.step(8)
    assert check(rig, small, session(2, 40), 3) == 0
    assert rig.phase(big) == "waiting"
    assert {rig.pool.state(move.device_slot) for move in order.moves} == {SlotState.HELD}
    tier.mover.broken = {(0, ordinal) for ordinal in range(8)}
    tier.mover.copy(order)
    tier.mover.finish(order)
    rig.run()
    check(rig, big, session(3, 150), 2)
    rig.check_quiet()


@below
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_l07_an_abort_during_a_load_and_then_its_end(make: Make, steps: int) -> None:
    """L07, vllm-ascend#16662: the late completion of an aborted load is dropped, and its blocks are held for ever.

    Right: they are free at the completion; reports of unknown ids are ignored.
    """
    tier = make()
    rig = below_only(tier, session(1, 128))
    tier.mover.shut(LOAD)
    name = rig.add([*session(1, 128), 5])
    rig.step(2)
    rig.engine.abort(name)
    rig.step(steps)
    assert pins(rig) > 0
    tier.mover.reports += [TransferReport(JobId(job), 0, (0, 99)) for job in (999, -1, 10**9)]
    rig.step()
    assert pins(rig) > 0
    tier.mover.open(LOAD)
    rig.step()
    assert pins(rig) == 0
    assert rig.cache.core.book.stats.late_reports == 3
    rig.check_quiet()


class Greedy(ScriptedTier):
    """Wants whatever it sees, in each hook: asks for a store of all blocks of all requests."""

    def __init__(self) -> None:
        super().__init__("greedy", Ownership.SHARED, hooks=Hook)
        self.known: list[RequestId] = []

    def _grab(self) -> None:
        for name in self.known:
            views = self.context.blocks(name) if self.context is not None else None
            if views is not None and self.context is not None:
                self.context.emit(self.tier, name, [range(len(view)) for view in views])

    def on_admit(self, request_id: RequestId, tokens: int) -> None:
        self.known.append(request_id)
        self._grab()

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        self._grab()

    def on_release(self, request_id: RequestId) -> None:
        self._grab()

    def on_step_end(self, step: Step) -> None:
        self._grab()


@pytest.mark.parametrize("other", [ScriptedTier, lambda: ScriptedTier(eager=False), lambda: kept("near"), Greedy])
def test_w17_nobody_stores_what_has_not_landed(other: Make) -> None:
    """W17, vllm#34526: the second connector of a MultiConnector stores blocks whose load by the first is under way.

    Right: it stores nothing until the first one reports, and what comes back from it equals a cold run.
    """
    far, near = kept("far"), other()
    rig = fake_rig(HYBRID, 60, [near, far])
    tokens = session(1, 128)
    rig.serve(tokens)
    rig.evict_device()
    rig.cache.core.drop_idle()
    near.stored.clear()
    cold = {key: content.numpy().tobytes() for key, content in far.stored.items()}
    far.mover.shut(LOAD)
    name, before = rig.add([*tokens, 5], 20), len(near.mover.submitted)
    rig.step(5)
    assert rig.phase(name) == "parked"
    assert len(near.mover.submitted) == before
    far.mover.open(LOAD)
    rig.run()
    check(rig, name, [*tokens, 5], 20)
    rig.add(session(2, 300))  # pressure: what is lazy stores now
    rig.run()
    rig.settle()
    near_bytes = {key: content.numpy().tobytes() for key, content in near.stored.items()}
    assert all(near_bytes[key] == cold[key] for key in near_bytes.keys() & cold.keys())
    far.stored.clear()
    rig.evict_device()
    for _ in range(2):
        assert rig.serve([*tokens, 5], 20).outputs[0].token_ids == expected_tokens([*tokens, 5], 20)
    rig.check_quiet()


@below
def test_w19_readers_wait_for_the_report_and_the_report_for_the_bytes(make: Make) -> None:
    """W19, sglang PR#8901: the counter of completed tokens moves before the page is written, and requests read.

    Right: whoever reads waits for the report, also when the bytes are there, and also those that joined.
    """
    tier = make()
    rig = below_only(tier, session(1, 128))
    tier.mover.shut(LOAD)
    names = [rig.add([*session(1, 128), number], 2) for number in range(3)]
    rig.step(3)
    (order,) = tier.mover.waiting(LOAD)
    for index, move in enumerate(order.moves):
        assert {rig.phase(name) for name in names} == {"parked"}, f"{index} of {len(order.moves)} units are there"
        tier.mover._move(order, move)
        rig.step()
    tier.mover.open(LOAD)
    rig.run()
    for number, name in enumerate(names):
        assert check(rig, name, [*session(1, 128), number], 2) == 128
    rig.check_quiet()


def test_w19_a_store_under_way_is_no_hit() -> None:
    """W19 for stores: the host's copy is found when it is complete, not when it was ordered."""
    tier = ScriptedTier()
    rig = fake_rig(SMALL, 100, [tier])
    tier.mover.shut(STORE)
    rig.add(session(1, 128))
    rig.run()
    rig.step()
    rig.cache.core.drop_idle(device_only=True)
    for key in [BlockKey(entry.key.group, entry.key.digest) for entry in rig.cache.core.directory]:
        rig.cache.core.directory.withdraw(key, DEVICE)  # as if the device had lost it meanwhile
    name = rig.add([*session(1, 128), 5])
    rig.step()
    assert rig.phase(name) == "running"
    assert not tier.mover.orders(LOAD)
    tier.mover.open(STORE)
    rig.run()
    check(rig, name, [*session(1, 128), 5])


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
