"""Where checkpoints of recurrent state are kept, what they may push out, and where copies of them go."""

from __future__ import annotations

import itertools
from typing import Final

import pytest

from core.builders import plain_layout
from core.world import Setup, World
from ostinato.cache.kinds import Full, State, keeps_checkpoints
from ostinato.hierarchy.checkpoints import grid_step
from ostinato.hierarchy.tiers import StoreMode
from ostinato.ids import DEVICE, TierId

UNIT: Final = 4
HYBRID: Final = plain_layout(Full(), State(), State(), unit=UNIT)


def tokens_of(number: int, length: int) -> list[int]:
    return [number * 100_000 + position for position in range(length)]


def kept(world: World, tier: str = DEVICE, boundaries_only: bool = False) -> list[int]:
    """Positions of the first state group's checkpoints in ``tier``."""
    return sorted(
        (entry.ordinal + 1) * UNIT
        for entry in world.cache.core.directory
        if entry.key.group == 1 and TierId(tier) in entry.places and (entry.boundary or not boundaries_only)
    )


def test_the_grid_is_dense_at_first_and_never_coarser_than_a_sixteenth() -> None:
    positions = [cut for cut in range(1, 5000) if cut % grid_step(cut) == 0]
    assert positions[:33] == [*range(1, 33), 34]
    assert all(later - earlier <= max(1, earlier / 16) for earlier, later in itertools.pairwise(positions))
    assert len(positions) < 32 + 16 * 8


def test_a_prompt_keeps_the_grid_and_its_end() -> None:
    world = World(Setup(HYBRID, 3000, step_tokens=100))
    world.serve(tokens_of(0, 4 * 70 + 3))
    assert kept(world) == [*range(4, 132, 4), *range(136, 256, 8), *range(256, 280, 16), 280]
    assert kept(world, boundaries_only=True) == [256, 280], "the prompt's end, and one cut per doubling"


def test_any_shared_prefix_resumes_near_its_end() -> None:
    for shared in (3, 4, 61, 127, 128, 200, 333, 500):
        world = World(Setup(HYBRID, 3000, step_tokens=64))
        world.serve(tokens_of(0, 512))
        hit = world.serve(tokens_of(0, shared) + tokens_of(1, 40)).hits[0]
        assert shared - max(UNIT, shared // 16) - UNIT < hit <= shared, (shared, hit)


def test_where_prompts_part_the_next_one_finds_a_checkpoint() -> None:
    """460 is not on the grid: the second prompt resumes at 448 and leaves a checkpoint there for the third."""
    world = World(Setup(HYBRID, 3000, step_tokens=512))
    hits = [world.serve(tokens_of(0, 460) + tokens_of(n, 60)).hits[0] for n in (1, 2, 3)]
    assert hits == [0, 448, 460]
    assert 460 in kept(world, boundaries_only=True)


def test_the_end_of_an_answer_is_kept_wherever_it_is() -> None:
    for decode in range(1, 14):
        world = World(Setup(HYBRID, 200, step_tokens=64))
        client = world.serve(tokens_of(0, 21), decode=decode)
        resumed = world.serve([*client.tokens, 7])
        assert resumed.hits == [(21 + decode) // UNIT * UNIT]


def test_checkpoints_on_the_way_never_push_out_a_boundary() -> None:
    """A pool that the boundaries of its sessions fill: a newcomer's grid takes what is left, and no more."""
    world = World(Setup(HYBRID, 90, step_tokens=64))
    for number in range(3):
        world.serve(tokens_of(number, 64))
    before = {entry.key for entry in world.cache.core.directory if entry.boundary}
    world.serve(tokens_of(9, 40))
    after = {entry.key for entry in world.cache.core.directory if entry.boundary}
    assert before <= after
    assert [world.serve([*tokens_of(number, 64), 5]).hits[0] for number in range(3)] == [64, 64, 64]
    world.check_quiet()


@pytest.mark.parametrize("mode", [StoreMode.EAGER, StoreMode.LAZY])
def test_only_boundary_states_are_copied_down(mode: StoreMode) -> None:
    world = World(Setup(HYBRID, 80, (("host", 400, mode),), step_tokens=32))
    for number in range(4):
        world.serve(tokens_of(number, 64), decode=9)
    world.run(until=lambda: not len(world.cache.core.book))
    stored = [
        entry
        for entry in world.cache.core.directory
        if TierId("host") in entry.places and keeps_checkpoints(HYBRID.groups[entry.key.group].kind)
    ]
    assert stored
    assert all(entry.boundary for entry in stored)


def test_an_asked_tier_gets_the_end_of_the_answer() -> None:
    """It is offered a block once, and what is a boundary is known only when the answer ends."""
    world = World(Setup(HYBRID, 200, (), ("disk",), step_tokens=32))
    client = world.serve(tokens_of(0, 30), decode=20)
    world.run(until=lambda: not len(world.cache.core.book))
    world.cache.core.drop_idle()
    assert world.serve([*client.tokens, 5]).hits == [48]


def test_a_model_of_states_alone() -> None:
    world = World(Setup(plain_layout(State(), unit=UNIT), 60, step_tokens=16))
    client = world.serve(tokens_of(0, 30), decode=5)
    assert world.serve([*client.tokens, 1, 2]).hits == [32]
    assert world.serve(tokens_of(0, 13)).hits == [12]
    world.check_quiet()
