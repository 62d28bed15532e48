"""Single situations in the hierarchy, each with the outcome it must have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.builders import make_layout, plain_layout
from core.harness import AskedTier
from core.scenarios import EQUAL, STATES
from core.world import Setup, World
from ostinato.cache.kinds import Chunked, Full, Window
from ostinato.cache.pool import SlotState
from ostinato.hierarchy.residency import NoRoom, Parked, Ready
from ostinato.hierarchy.tiers import StoreMode
from ostinato.ids import HOLE, TierId
from ostinato.transfer.job import JobKind

HOST = TierId("host")
PROMPT = [index % 9 for index in range(41)]
EAGER_HOST = Setup(EQUAL, 60, (("host", 60, StoreMode.EAGER),))
DISK = Setup(EQUAL, 60, (), ("disk",))


def seeded(setup: Setup) -> World:
    """A world whose lower tiers hold ``PROMPT`` and whose device is empty."""
    world = World(setup)
    world.serve(PROMPT)
    world.run()
    world.cache.core.drop_idle(device_only=True)
    return world


def test_a_prompt_comes_back_from_the_host() -> None:
    world = seeded(EAGER_HOST)
    client = world.open(PROMPT)
    world.plan()
    assert world.parked == [client]
    (errand,) = world.worker.open_errands()
    assert errand.order.kind is JobKind.LOAD
    groups = [move.key.group for move in errand.order.moves]
    assert [groups.count(group) for group in range(3)] == [10, 3, 3], "windows load only what they need"
    world.run()
    assert client.hits == [40]
    assert world.cache.core.book.stats.failed_moves == 0
    world.check_quiet()


def test_a_second_request_joins_a_load_under_way() -> None:
    world = seeded(EAGER_HOST)
    first, second = world.open(PROMPT), world.open(PROMPT)
    world.plan()
    assert world.parked == [first, second]
    assert len(world.worker.errands) == 1
    world.close(first)
    world.run()
    assert second.hits == [40]
    world.check_quiet()


def test_joiners_of_a_failed_load_recompute() -> None:
    world = seeded(EAGER_HOST)
    clients = [world.open(PROMPT) for _ in range(3)]
    world.plan()
    world.worker.report(world.worker.open_errands()[0], frozenset({0}))
    world.apply()
    assert world.waiting
    assert not world.parked
    world.run()
    assert all(client.computed == 41 for client in clients)
    world.check_quiet()


def test_a_liar_is_refuted_and_then_left_alone() -> None:
    world = World(DISK)
    (disk,) = world.asked
    client = world.open(PROMPT)
    for _ in range(6):
        disk.mood = "liar"
        world.plan()
        for errand in list(world.worker.open_errands()):
            world.worker.report(errand)
        world.apply()
    assert client.hits[0] == 0
    assert disk.refutations > 0
    world.run()
    world.check_quiet()


def test_a_silent_tier_costs_one_deadline() -> None:
    world = World(DISK)
    world.asked[0].mood = "silent"
    client = world.open(PROMPT)
    for _ in range(3):
        world.plan()
        assert world.parked == [client]
        world.apply()
        assert world.waiting == [client]
    world.clock.now += 5.0
    world.plan()
    assert world.running == [client]
    world.run()
    world.check_quiet()


def test_a_silent_tier_is_not_waited_for_again_when_there_was_no_room() -> None:
    world = World(replace(DISK, device_slots=36))
    world.serve([8] * 20)
    holder = world.open([7] * 41, decode=10)
    world.plan()
    world.apply()
    world.asked[0].mood = "silent"
    client = world.open(PROMPT)
    assert isinstance(world.cache.admit(client.name), Parked)
    world.cache.settle(world.step, [])
    world.clock.now += 5.0
    assert isinstance(world.cache.admit(client.name), NoRoom)
    world.close(holder)
    assert isinstance(world.cache.admit(client.name), Ready)


def test_late_bytes_of_a_timed_out_load_hurt_nobody() -> None:
    world = seeded(EAGER_HOST)
    client = world.open(PROMPT)
    world.plan()
    (errand,) = world.worker.open_errands()
    world.clock.now += 11.0
    world.apply()
    device = world.cache.core.device.pool
    doubtful = [move.device_slot for move in errand.order.moves]
    assert {device.state(slot) for slot in doubtful} == {SlotState.QUARANTINE}
    world.plan()
    assert world.running == [client], "the tier is denied: the prompt is computed"
    world.worker.move(errand, frozenset(range(99)))
    world.apply()
    world.run()
    assert client in world.finished
    world.check_quiet()


def test_an_abort_leaves_the_store_of_its_blocks_alone() -> None:
    world = World(EAGER_HOST)
    client = world.open(PROMPT)
    world.plan()
    world.apply()
    world.close(client)
    world.plan()
    assert [errand.order.kind for errand in world.worker.errands] == [JobKind.STORE]
    pinned = {move.device_slot for move in world.worker.errands[0].order.moves}
    world.apply()
    assert {world.cache.core.device.pool.state(slot) for slot in pinned} == {SlotState.HELD}
    world.run()
    assert world.serve(PROMPT).hits[0] > 0
    world.run()
    world.check_quiet()


def test_queued_stores_give_way_to_a_request_that_needs_the_room() -> None:
    world = World(Setup(EQUAL, 40, (("host", 60, StoreMode.EAGER),), step_tokens=41))
    first = world.open(PROMPT)
    world.plan()
    world.apply()
    assert first in world.finished
    assert len(world.cache.core.book) == 1, "a store is queued"
    second = world.open([3] * 50)
    world.plan()
    assert world.running == [second]
    assert world.cache.core.book.stats.revoked == 1
    world.run()
    world.check_quiet()


def test_queued_stores_stay_when_taking_them_back_would_not_help() -> None:
    world = World(Setup(EQUAL, 50, (("host", 60, StoreMode.EAGER),), step_tokens=41))
    holder = world.open(PROMPT, decode=10)
    world.plan()
    world.apply()
    assert world.cache.core.book
    waiting = world.open([3] * 60)
    world.plan()
    assert world.waiting == [waiting]
    assert world.cache.core.book.stats.revoked == 0
    world.run()
    assert holder in world.finished


def test_an_idle_engine_comes_to_rest() -> None:
    """A host smaller than what the device would evict next: the two must not copy for ever."""
    for mode in StoreMode:
        world = World(Setup(EQUAL, 40, (("host", 5, mode),)))
        for number in range(4):
            world.serve([number] * 40)
        world.run(limit=60)
        assert not len(world.cache.core.book)


def test_stores_to_asked_tiers_pin_only_their_share() -> None:
    world = World(Setup(EQUAL, 40, (), ("disk",), step_tokens=40))
    world.open([1] * 40)
    world.plan()
    world.apply()
    pinned = {slot for job in world.cache.core.book for slot in job.device_lease.slots}
    assert 0 < len(pinned) <= 20


def test_a_preempted_prompt_is_marked_again() -> None:
    world = World(Setup(EQUAL, 60, step_tokens=64))
    client = world.open(PROMPT, decode=8)
    for _ in range(2):
        world.plan()
        world.apply()
        marked = sum(entry.boundary for entry in world.cache.core.directory)
        assert marked > 10, "windows at the prompt's end are boundaries"
        world.preempt(client)
        world.cache.core.drop_idle()
        assert len(world.cache.core.directory) == 0


def test_a_hit_at_a_chunk_boundary_takes_no_page_for_what_is_over() -> None:
    world = World(Setup(plain_layout(Full(), Chunked(16), unit=4), 60))
    world.serve(list(range(33)))
    client = world.open(list(range(33)))
    world.plan()
    assert client.hits == [32]
    rows = world.cache.table(client.name).rows
    assert [slot == HOLE for slot in rows[1]] == [True] * 8 + [False]
    world.run()
    world.check_quiet()


def test_a_cut_inside_a_page_copies_and_never_writes_the_shared_page() -> None:
    world = World(Setup(make_layout((Full(), 4, 4, 4), (Window(6), 4, 2, 4)), 40))
    world.serve(list(range(64)))
    client = world.open([*range(24), *[99] * 10])
    world.plan()
    assert client.hits == [24]
    assert world.in_flight is not None
    assert world.in_flight.copies
    world.run()
    assert world.serve(list(range(64))).hits == [60]
    world.check_quiet()


def test_salts_never_meet() -> None:
    world = World(EAGER_HOST)
    world.serve(PROMPT, salt="a")
    assert world.serve(PROMPT, salt="b").hits == [0]
    assert world.serve(PROMPT, salt="a").hits == [40]


def test_states_are_found_at_each_unit() -> None:
    world = World(Setup(STATES, 60))
    world.serve(PROMPT)
    assert world.serve([*PROMPT[:22], *[77] * 9]).hits == [20]
    world.check_quiet()


def test_an_empty_answer_of_all_tiers_is_a_miss() -> None:
    world = World(replace(DISK, asked=("disk", "store")))
    assert world.serve(PROMPT).hits == [0]
    disk = world.asked[0]
    assert isinstance(disk, AskedTier)
    world.run()
    world.cache.core.drop_idle(device_only=True)
    assert world.serve(PROMPT).hits == [40]
    disk.forget()
    world.cache.core.drop_idle(device_only=True)
    assert world.serve(PROMPT).hits == [40], "what one tier lost another one has"
    world.run()
    world.check_quiet()


@pytest.mark.parametrize("mode", StoreMode)
@pytest.mark.parametrize("step_tokens", [64, 128, 256])
def test_what_a_small_device_evicts_is_held_below(mode: StoreMode, step_tokens: int) -> None:
    """A prompt is pushed out by two of its length, at any step size; one that parts from it in the middle comes back.

    A lazy tier has to look further ahead than one step evicts: what is being copied cannot be evicted, so the pages
    behind it go instead.
    """
    layout = plain_layout(Full(), *[Window(128)] * 5, unit=16)
    stored = list(range(10, 2018))
    device = layout.peak_pages(len(stored) + 1, step_tokens) * 5 // 4
    world = World(Setup(layout, device, (("host", 4000, mode),), step_tokens=step_tokens, commit_first=True))
    for first in (0, 1, 2):
        world.serve([first, *stored])
    world.run()
    assert world.serve([0, *stored[:1000], 5, 6, 7]).hits == [992]
