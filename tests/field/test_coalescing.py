"""Prefixes that are computed once, and loads that are not worth it: wishes 6 and 14 of the reports."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from field.rig import Rig, expected_tokens, fake_rig, layout_of
from field.scripted import LOAD, ScriptedTier, kept
from ostinato.cache.kinds import Full, State, Window
from ostinato.hierarchy.cost import BELIEVED_S
from ostinato.hierarchy.following import PATIENCE_S
from ostinato.ids import RequestId

LAYOUTS = {
    "full": layout_of(Full()),
    "window": layout_of(Full(), Window(32), Window(32)),
    "state": layout_of(Full(), State(), State()),
}
MODELS = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def session(number: int, length: int) -> list[int]:
    return [number * 10_000 + position for position in range(length)]


def computed(rig: Rig, prompts: Sequence[Sequence[int]], names: Sequence[str]) -> int:
    """Prompt tokens that were computed; every answer is the cold one."""
    total = 0
    for prompt, name in zip(prompts, names, strict=True):
        output = rig.outputs[name]
        assert output.outputs[0].token_ids == expected_tokens(prompt, len(output.outputs[0].token_ids))
        total += len(prompt) - output.cached_tokens
    return total


@MODELS
@pytest.mark.parametrize("apart", [0, 1, 3])
def test_wish_14_many_requests_one_prefill_of_what_they_share(layout: Any, apart: int) -> None:
    """splash PR#16, mstar PR#280: N cold requests with one prefix compute it N times.  Right: once."""
    rig = fake_rig(layout, 2000)
    prompts = [[*session(1, 512), *session(10 + number, 40)] for number in range(8)]
    names = []
    for prompt in prompts:
        names.append(rig.add(prompt))
        rig.step(apart)
    rig.run()
    assert computed(rig, prompts, names) <= 512 + 8 * 40 + 64
    rig.check_quiet()


@MODELS
def test_the_same_prompt_at_once(layout: Any) -> None:
    rig = fake_rig(layout, 2000)
    prompts = [session(1, 500)] * 6
    names = [rig.add(prompt) for prompt in prompts]
    rig.run()
    assert computed(rig, prompts, names) <= 500 + 5 * 20


def test_a_leader_that_leaves_does_not_take_its_followers_along() -> None:
    rig = fake_rig(LAYOUTS["window"], 400, step_tokens=300)
    leader, *followers = [rig.add([*session(1, 512), number]) for number in range(4)]
    rig.step(1)
    assert {rig.phase(name) for name in followers} <= {"waiting", "parked"}
    rig.engine.abort(leader)
    rig.run()
    prompts = [[*session(1, 512), number] for number in range(1, 4)]
    assert computed(rig, prompts, followers) <= 512 + 3 * 20
    rig.check_quiet()


def test_a_leader_that_is_preempted_is_not_waited_for() -> None:
    rig = fake_rig(LAYOUTS["full"], 400, step_tokens=300)
    names = [rig.add([*session(1, 512), number]) for number in range(2)]
    rig.step(1)
    assert rig.phase(names[1]) in ("waiting", "parked")
    scheduler = rig.engine.scheduler
    scheduler._preempt(scheduler.requests[RequestId(names[0])])
    rig.run()
    assert computed(rig, [[*session(1, 512), number] for number in range(2)], names) <= 512 + 2 * 64
    rig.check_quiet()


def test_a_leader_that_does_not_advance_is_left() -> None:
    """It waits for a load that does not come: whoever wants to hit what it computes afterwards goes on alone."""
    tier = kept()
    rig = fake_rig(LAYOUTS["full"], 400, [tier])
    rig.serve(session(1, 128))
    rig.evict_device()
    tier.mover.shut(LOAD)
    leader = rig.add([*session(1, 128), *session(2, 200)])
    rig.step(2)
    tier.mover.shut(LOAD)
    follower = rig.add([*session(1, 128), *session(2, 200), 7])
    rig.tick = 1.0
    rig.step(int(PATIENCE_S) + 4)
    assert not rig.cache.requests[RequestId(follower)].following
    tier.mover.open(LOAD)
    rig.run()
    prompts = [[*session(1, 128), *session(2, 200)], [*session(1, 128), *session(2, 200), 7]]
    computed(rig, prompts, [leader, follower])
    rig.check_quiet()


@pytest.mark.parametrize("other", ["salt", "unlike"])
def test_nobody_waits_for_what_it_cannot_use(other: str) -> None:
    rig = fake_rig(LAYOUTS["full"], 400, step_tokens=128)
    rig.add(session(1, 512))
    second = rig.add(session(1, 512) if other == "salt" else [5, *session(1, 512)], salt="x" * (other == "salt"))
    rig.step(2)
    assert rig.phase(second) != "parked"
    rig.run()
    assert rig.outputs[second].cached_tokens == 0
    rig.check_quiet()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32), name=st.sampled_from(sorted(LAYOUTS)), pages=st.sampled_from([60, 90, 400]))
def test_random_families_of_prompts(seed: int, name: str, pages: int) -> None:
    """Prompts grown from each other, aborts, too little room: all are answered, none wrongly."""
    chance = random.Random(seed)
    rig = fake_rig(LAYOUTS[name], pages, step_tokens=chance.choice([32, 64, 128]), audited=False)
    prompts: list[list[int]] = [session(1, 200)]
    names: list[str] = []
    gone = set()
    for number in range(12):
        parent = chance.choice(prompts)
        prompt = [*parent[: chance.randrange(1, len(parent) + 1)], *session(20 + number, chance.randrange(1, 120))][
            :400
        ]
        prompts.append(prompt)
        names.append(rig.add(prompt, chance.randrange(1, 4)))
        rig.step(chance.randrange(3))
        if chance.random() < 0.2:
            victim = chance.choice(names)
            if victim not in rig.outputs and victim not in gone:
                rig.engine.abort(victim)
                gone.add(victim)
    rig.run()
    kept_names = [(p, n) for p, n in zip(prompts[1:], names, strict=True) if n not in gone]
    computed(rig, [p for p, _ in kept_names], [n for _, n in kept_names])
    rig.check_quiet()


# ----------------------------------------------------------------------------------------------- load, recompute, split


def below(tier: ScriptedTier, layout: Any, prompt: Sequence[int]) -> Rig:
    rig = fake_rig(layout, 400, [tier])
    rig.serve(prompt)
    rig.evict_device()
    return rig


@MODELS
@pytest.mark.parametrize(("slow", "reused"), [(0.001, True), (100.0, False)])
def test_wish_6_a_load_slower_than_computing_is_not_made(layout: Any, slow: float, reused: bool) -> None:
    """Reports F05, E15, LMCache#1061: loading from a slow store takes longer than computing.  Right: the faster one."""
    prompt = [*session(1, 256), 7]
    rig = below(tier := kept(), layout, prompt)
    rig.cache.costs.note_step(512, 0.5)
    rig.cache.costs.note_load(tier.tier, 1 << 10, slow)
    output = rig.serve(prompt)
    assert output.outputs[0].token_ids == expected_tokens(prompt, 1)
    assert (output.cached_tokens > 0) is reused
    assert rig.cache.costs.declined_tokens == (0 if reused else 256)


def test_a_slow_tail_is_computed_and_a_fast_head_is_loaded() -> None:
    """The split: the head of the prompt is in a fast tier, the rest in a slow one."""
    fast, slow = kept("fast"), kept("slow")
    rig = fake_rig(LAYOUTS["window"], 400, [fast, slow])
    prompt = [*session(1, 512), 7]
    rig.serve(prompt[:256])
    head = set(fast.stored)
    rig.serve(prompt)
    rig.evict_device()
    fast.stored = {key: content for key, content in fast.stored.items() if key in head}
    rig.cache.costs.note_step(512, 0.5)
    rig.cache.costs.note_load(fast.tier, 1 << 10, 0.001)
    rig.cache.costs.note_load(slow.tier, 1 << 10, 100.0)
    output = rig.serve(prompt)
    assert output.outputs[0].token_ids == expected_tokens(prompt, 1)
    assert output.cached_by_tier == {"fast": 256}


def test_a_slow_tier_is_tried_again() -> None:
    prompt = [*session(1, 256), 7]
    rig = below(tier := kept(), LAYOUTS["full"], prompt)
    rig.cache.costs.note_step(512, 0.5)
    rig.cache.costs.note_load(tier.tier, 1 << 10, 100.0)
    rig.clock.now += BELIEVED_S
    assert rig.serve(prompt).cached_tokens == 256
