"""The loop where something goes wrong between two steps, or between two batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from field.rig import expected_tokens, fake_rig, layout_of
from field.scripted import LOAD, STORE, ScriptedTier, kept
from ostinato.cache.kinds import Full, Window
from ostinato.engine.live import Prompt
from ostinato.errors import CapacityError, OstinatoError
from ostinato.sampling_params import SamplingParams

HYBRID = layout_of(Full(), Window(20))


def session(number: int, length: int) -> list[int]:
    return [number * 10_000 + position for position in range(length)]


# A tier that never works.


@pytest.mark.parametrize("eager", [True, False])
def test_stores_that_always_fail_come_to_an_end(eager: bool) -> None:
    """A block that fails to be stored is on the device still, about to be evicted still: it is not tried for ever."""
    tier = ScriptedTier(eager=eager)
    rig = fake_rig(HYBRID, 30, [tier])
    tier.mover.broken = set(itertools.product(range(2), range(100)))
    for number in range(3):
        tokens = session(number, 100)
        name = rig.add(tokens, 20)
        rig.run()
        assert rig.outputs[name].outputs[0].token_ids == expected_tokens(tokens, 20)
    rig.step(40)
    orders = len(tier.mover.submitted)
    rig.step(10)
    assert len(tier.mover.submitted) == orders
    rig.check_quiet()


def test_a_store_that_failed_once_is_tried_again() -> None:
    tier = ScriptedTier()
    rig = fake_rig(HYBRID, 30, [tier])
    tier.mover.shut(STORE)
    rig.add(session(1, 40))
    rig.run()
    rig.step()
    for order in tier.mover.waiting(STORE):
        tier.mover.fail(order)
    tier.mover.open(STORE)
    rig.evict_device()
    assert rig.serve(session(1, 40)).cached_by_tier == {"host": 32}


# Time between two batches.


def test_a_store_ordered_by_the_last_step_has_its_time_when_the_next_batch_comes() -> None:
    tier = ScriptedTier()
    rig = fake_rig(HYBRID, 30, [tier])
    tier.mover.shut(STORE)
    rig.add(session(1, 40))
    rig.run()
    assert not tier.mover.waiting(STORE), "it goes out with the next step"
    rig.clock.now += 3600
    rig.add(session(2, 40))
    rig.step(2)
    tier.mover.open(STORE)
    rig.run()
    rig.check_quiet()
    assert rig.cache.core.book.stats.in_doubt == 0


def test_each_request_has_its_own_time_to_wait_for_room() -> None:
    """Whoever waited before, and gave up, says nothing about the next one."""
    tier = ScriptedTier()
    rig = fake_rig(HYBRID, 12, [tier])
    tier.mover.shut(STORE)
    rig.add(session(1, 60))
    rig.run()
    rig.step()
    first = rig.add(session(2, 60))
    rig.step(3)
    assert rig.phase(first) == "waiting", "stores hold what it needs"
    assert rig.engine.abort(first)
    rig.clock.now += 50
    tokens = session(3, 60)
    second = rig.add(tokens)
    rig.step()
    rig.clock.now += 20
    rig.step(3)
    assert rig.phase(second) == "waiting"
    tier.mover.open(STORE)
    rig.run()
    assert rig.outputs[second].outputs[0].token_ids == expected_tokens(tokens, 1)
    rig.check_quiet()


def test_those_behind_a_starved_request_are_not_given_up_with_it() -> None:
    tier = ScriptedTier()
    rig = fake_rig(HYBRID, 12, [tier])
    tier.mover.shut(STORE)
    rig.add(session(1, 60))
    rig.run()
    rig.step()
    first, second = rig.add(session(2, 60)), rig.add(session(3, 60))
    rig.step()
    assert (rig.phase(first), rig.phase(second)) == ("waiting", "waiting")
    rig.clock.now += rig.engine.scheduler.config.stall_s
    with pytest.raises(CapacityError, match=first):
        rig.step()
    rig.step(2)
    assert rig.phase(second) == "waiting"
    tier.mover.open(STORE)
    rig.run()
    rig.check_quiet()


# Interrupted steps.


@pytest.mark.parametrize("where", ["plan", "execute", "apply"])
def test_an_interrupted_step_ends_the_engine_wherever_it_was(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = fake_rig(HYBRID, 30, [ScriptedTier()])
    rig.add(session(1, 40), 5)
    rig.step(2)
    part: Any = {
        "plan": (rig.cache, "dispatch"),
        "execute": (rig.engine.executor, "execute"),
        "apply": (rig.cache, "settle"),
    }[where]

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*part, interrupt)
    with pytest.raises(KeyboardInterrupt):
        rig.step()
    monkeypatch.undo()
    with pytest.raises(OstinatoError, match="interrupted; make a new one"):
        rig.step()
    with pytest.raises(OstinatoError, match="interrupted; make a new one"):
        rig.add(session(2, 40))
    rig.engine.close()
    assert not rig.engine.has_work


# Prompts that are scored.


@pytest.mark.parametrize("make", [ScriptedTier, kept])
def test_a_prompt_that_is_scored_loads_nothing_and_is_stored(make: Callable[[], ScriptedTier]) -> None:
    tier = make()
    rig = fake_rig(HYBRID, 30, [tier])
    tokens = session(1, 70)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    for name in ("first", "again"):
        rig.engine.add(name, Prompt(None, tokens), params)
        rig.run()
        rig.settle()
        assert rig.outputs[name].cached_tokens == 0
        assert rig.outputs[name].outputs[0].token_ids == expected_tokens(tokens, 2)
        rig.evict_device()
    assert not tier.mover.orders(LOAD)
    assert rig.serve(tokens).cached_tokens == 64
    rig.check_quiet()
