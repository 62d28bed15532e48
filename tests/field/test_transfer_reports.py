"""Reports about transfers under way: who may touch a block meanwhile, and when others may read it."""

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
