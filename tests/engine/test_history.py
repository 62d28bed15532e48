"""A request's phases, as it goes through them under a script."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from field.rig import Rig, fake_rig, layout_of
from field.scripted import LOAD, ScriptedTier
from ostinato.cache.kinds import Full
from ostinato.connectors.api import Ownership
from ostinato.hierarchy.timeline import Timelines
from ostinato.ids import RequestId
from ostinato.observe.timeline import RequestPhase, Span

QUEUED, LOOKUP, LOADING, PREFILL, DECODE = RequestPhase


class Watched:
    """A rig whose clock ticks once a step, and what its requests do."""

    def __init__(self, rig: Rig) -> None:
        rig.tick = 1.0
        self.rig = rig
        self.times = Timelines(rig.cache.requests, rig.clock)
        rig.cache.observers = (*rig.cache.observers, self.times)

    def add(self, tokens: list[int], count: int = 1, **more: Any) -> RequestId:
        name = RequestId(self.rig.add(tokens, count, **more))
        self.times.begin(name, self.rig.clock.now)
        return name

    def run(self, name: RequestId) -> list[tuple[RequestPhase, float, float]]:
        """To the end; phases with their starts and ends."""
        self.rig.run(lambda: name in self.rig.outputs)
        return spans(self.times.end(name, self.rig.clock.now))


def spans(found: tuple[Span, ...]) -> list[tuple[RequestPhase, float, float]]:
    assert all(span.end is not None for span in found)
    return [(span.phase, span.start, span.end or 0.0) for span in found]


def test_one_step_of_prefill_then_decode() -> None:
    watched = Watched(fake_rig(layout_of(Full()), 40))
    name = watched.add(list(range(40)), 4)
    assert watched.run(name) == [(QUEUED, 0, 0), (PREFILL, 0, 0), (DECODE, 0, 4)]


def test_a_long_prompt_takes_several_steps() -> None:
    watched = Watched(fake_rig(layout_of(Full()), 40, step_tokens=16))
    name = watched.add(list(range(64)), 2)
    assert watched.run(name) == [(QUEUED, 0, 0), (PREFILL, 0, 3), (DECODE, 3, 5)]


def test_it_waits_for_room() -> None:
    watched = Watched(fake_rig(layout_of(Full()), 6))
    watched.add(list(range(80)), 4)
    second = watched.add(list(range(500, 580)))
    found = watched.run(second)
    assert [phase for phase, _, _ in found] == [QUEUED, PREFILL, DECODE]
    assert found[0] == (QUEUED, 0, 5)  # the first one takes two steps for its prompt and three for its other tokens


@pytest.mark.parametrize("tier", [Ownership.OWNED, Ownership.SHARED], ids=lambda kind: kind.value)
def test_its_prefix_is_on_the_way(tier: Ownership) -> None:
    below = ScriptedTier("below", tier, slots=40)
    watched = Watched(fake_rig(layout_of(Full()), 40, [below]))
    watched.rig.serve(list(range(64)))
    watched.rig.evict_device()
    below.mover.shut(LOAD)
    start = watched.rig.clock.now
    name = watched.add(list(range(64)))
    watched.rig.step(3)
    assert [span.phase for span in watched.times.spans(name)] == [QUEUED, LOADING]
    below.mover.open(LOAD)
    phases = watched.run(name)
    assert [phase for phase, _, _ in phases] == [QUEUED, LOADING, PREFILL, DECODE]
    assert phases[1][1] == start
    assert phases[1][2] >= start + 3


def test_a_tier_takes_its_time_to_answer() -> None:
    store = ScriptedTier("store", Ownership.SHARED)
    watched = Watched(fake_rig(layout_of(Full()), 40, [store]))
    store.mood = "silent"
    name = watched.add(list(range(64)))
    phases = watched.run(name)
    assert [phase for phase, _, _ in phases] == [QUEUED, LOOKUP, PREFILL, DECODE]
    assert phases[1][2] - phases[1][1] == pytest.approx(5, abs=1)  # the deadline of answers


def test_a_preempted_request_is_queued_again() -> None:
    watched = Watched(fake_rig(layout_of(Full()), 8))
    watched.add(list(range(60)), 30)
    name = watched.add(list(range(500, 560)), 30)
    found = watched.run(name)
    assert [phase for phase, _, _ in found][:4] == [QUEUED, PREFILL, DECODE, QUEUED]
    assert found[-1][0] is DECODE
    for (_, _, end), (_, start, _) in pairwise(found):
        assert end == start
