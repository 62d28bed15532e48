"""What a prefix cache for hybrids must reach with one rule and no knob, on one small pool.

Rows from public reports against other engines: chats that take turns lose everything at once when their window tails
are evicted first (H01, vllm#48435); a shared system prompt is not found at its second use (H02, vllm#45238); a growing
chat never finds the answer it just generated (H03, vllm#50551).
"""

from __future__ import annotations

from typing import Final

import pytest

from core.builders import plain_layout
from core.world import Setup, World
from ostinato.cache.kinds import Full, State, Window
from ostinato.cache.layout import CacheLayout

WINDOWS: Final = plain_layout(Full(), *[Window(64)] * 5, unit=16)
STATES: Final = plain_layout(Full(), *[State()] * 5, unit=16)
PAGES: Final = 600


def session(number: int, length: int) -> list[int]:
    return [number * 1000 + position for position in range(length)]


def make_world(layout: CacheLayout, step_tokens: int = 512) -> World:
    return World(Setup(layout, PAGES, step_tokens=step_tokens))


both = pytest.mark.parametrize("layout", [WINDOWS, STATES], ids=["windows", "states"])


@both
@pytest.mark.parametrize("step_tokens", [32, 64, 96, 128, 256, 512])
def test_ten_chats_take_turns_and_all_hit(layout: CacheLayout, step_tokens: int) -> None:
    """Each needs 57 pages (32 + 5 x 5, two cuts apart by one page); 10 x 57 = 570 of 600.

    A step of 512 tokens alone would take 192 pages while it runs: it is cut into chunks that fit beside them.
    """
    world = make_world(layout, step_tokens)
    hits = [[world.serve(session(n, 512) + [7] * turn).hits[-1] for n in range(10)] for turn in range(3)]
    assert hits == [[0] * 10, [512] * 10, [512] * 10]
    world.check_quiet()


@both
def test_ten_chats_that_repeat_their_prompt(layout: CacheLayout) -> None:
    world = make_world(layout)
    hits = [[world.serve(session(n, 513)).hits[-1] for n in range(10)] for _ in range(3)]
    assert hits == [[0] * 10, [512] * 10, [512] * 10]


def test_boundaries_cost_what_was_promised() -> None:
    """After one cold prompt, 32 full pages and 5 of each window are marked as boundaries; the rest is interior."""
    world = make_world(WINDOWS)
    world.serve(session(1, 512))
    marked = [entry for entry in world.cache.core.directory if entry.boundary]
    assert len(marked) == 57
    assert len(world.cache.core.directory) == 6 * 32


@both
@pytest.mark.parametrize("shared", [256, 240, 208])
def test_a_shared_prefix_is_found_at_its_second_use(layout: CacheLayout, shared: int) -> None:
    """The cut lies in the middle of what was stored: nobody marked it before."""
    world = make_world(layout)
    hits = [world.serve(session(0, shared) + session(n, 256)).hits[-1] for n in range(1, 6)]
    assert hits == [0] + [shared] * 4


@both
def test_a_shared_prefix_survives_pressure_once_it_is_a_junction(layout: CacheLayout) -> None:
    """Interior pages of others go first; the junction stays."""
    world = make_world(layout, 64)
    for number in (1, 2):
        world.serve(session(0, 208) + session(number, 256))
    for number in range(10, 14):
        world.serve(session(number, 512))
    assert world.cache.core.device.retention.evictions > 0
    assert world.serve(session(0, 208) + session(3, 256)).hits == [208]


@both
def test_a_growing_chat_finds_its_own_answers(layout: CacheLayout) -> None:
    """300 tokens of prompt, turns of 100 generated and 40 new tokens: each turn resumes where the last one ended."""
    world = make_world(layout)
    tokens, hits, prompts = session(0, 300), [], []
    for turn in range(4):
        prompts.append(len(tokens))
        client = world.serve(tokens, decode=100)
        hits.append(client.hits[-1])
        tokens = client.tokens + session(50 + turn, 40)
    assert prompts == [300, 440, 580, 720]
    assert hits == [0, 400, 528, 672]


@both
def test_the_same_prompt_hits_all_but_its_last_token(layout: CacheLayout) -> None:
    world = make_world(layout)
    assert [world.serve(session(0, 512)).hits[-1] for _ in range(3)] == [0, 496, 496]
    assert [world.serve(session(1, 513)).hits[-1] for _ in range(3)] == [0, 512, 512]
