"""Reports about numbers that said something else than what happened (O02, O03, O08, O09, O10)."""

from __future__ import annotations

import logging

import pytest

from field.rig import Rig, fake_rig, layout_of
from field.scripted import LOAD, STORE, ScriptedTier
from ostinato.cache.kinds import Full, Window
from ostinato.connectors.api import Ownership
from ostinato.hierarchy.stats import snapshot
from ostinato.transfer.job import JobKind

PROMPT = list(range(1000, 1064))


def tokens_of(rig: Rig, tokens: list[int]) -> dict[str, int]:
    return dict(rig.serve(tokens).cached_by_tier)


def test_o02_a_full_tier_that_nobody_uses_is_full_of_cached_blocks_and_not_in_use() -> None:
    host = ScriptedTier(slots=8)
    rig = fake_rig(layout_of(Full()), 40, [host])
    for start in (0, 100, 200):
        rig.serve(list(range(start, start + 64)))
    device, below = snapshot(rig.cache).tiers
    assert (below.blocks, below.free, below.idle, below.held) == (8, 0, 8, 0)
    assert (device.idle, device.held) == (12, 0)
    # A gate that is shut shows what transfers pin, in both tiers, as what it is: held, not cached.
    host.mover.shut(LOAD, STORE)
    rig.add(list(range(500, 564)))
    rig.run()
    rig.step()
    device, below = snapshot(rig.cache).tiers
    assert device.held == 4
    assert below.held == 4
    assert below.free + below.idle + below.held == 8
    host.mover.open(LOAD, STORE)
    rig.check_quiet()


def test_o03_a_prompt_below_the_shortest_hit_is_told_from_one_that_missed() -> None:
    rig = fake_rig(layout_of(Full(), Window(40)), 40)
    granularity = rig.cache.core.layout.granularity
    assert granularity == 16
    short = PROMPT[:granularity]  # its last token is always computed, so that no whole unit is left
    assert tokens_of(rig, short) == tokens_of(rig, short) == {}
    assert tokens_of(rig, [*short, 7]) == {"device": granularity}


@pytest.mark.parametrize("local", [64, 16], ids=["the device has more", "the device has less"])
def test_o08_what_a_tier_answered_is_counted_whether_or_not_it_is_loaded(local: int) -> None:
    remote = ScriptedTier("remote", Ownership.SHARED)
    rig = fake_rig(layout_of(Full()), 40, [remote])
    prompt = list(range(65))
    rig.serve(prompt)
    rig.evict_device()
    if local == 16:
        remote.mood, rig.tick = "silent", 1.0
        rig.serve(prompt[:17])
        remote.mood = "honest"
    else:
        rig.serve(prompt)
    counts, flow = rig.cache.core.answers[remote.tier], rig.cache.core.book.flows[JobKind.LOAD, remote.tier]
    before = (counts.held, flow.units)
    found = tokens_of(rig, prompt)
    # A question costs a store something, so only what the device lacks is asked about: then all of it is counted.
    asked, loaded = counts.held - before[0], flow.units - before[1]
    assert asked == loaded == (64 - local) // 16
    assert found.get("remote", 0) == 64 - local
    assert sum(found.values()) == 64


def test_o08_answers_of_no_use_are_counted_all_the_same() -> None:
    remote = ScriptedTier("remote", Ownership.SHARED)
    rig = fake_rig(layout_of(Full()), 40, [remote])
    rig.serve(list(range(65)))
    rig.evict_device()
    counts = rig.cache.core.answers[remote.tier]
    assert (counts.held, counts.absent) == (0, 4)
    first = next(key for key in remote.stored if rig.cache.core.layout)
    del remote.stored[first]  # the first unit: what is behind it is of no use
    assert tokens_of(rig, list(range(65))) == {}
    assert counts.held == 3
    assert counts.absent == 5


def test_o10_a_hit_that_comes_to_nothing_is_told_as_computed(caplog: pytest.LogCaptureFixture) -> None:
    host = ScriptedTier(slots=20)
    rig = fake_rig(layout_of(Full()), 40, [host])
    rig.serve(PROMPT)
    rig.evict_device()
    host.mover.broken = {(0, ordinal) for ordinal in range(4)}
    with caplog.at_level(logging.INFO, "ostinato.engine.loop"):
        output = rig.serve(PROMPT)
    assert (output.cached_tokens, dict(output.cached_by_tier)) == (0, {})
    assert any(f"{output.request_id} finished" in line and "reused none" in line for line in caplog.messages)
    assert rig.cache.core.book.flows[JobKind.LOAD, host.tier].failed == 3


def test_o09_after_a_reset_nothing_is_warm_anywhere() -> None:
    host = ScriptedTier(slots=20)
    rig = fake_rig(layout_of(Full(), Window(40)), 40, [host])
    rig.serve(PROMPT)
    assert tokens_of(rig, PROMPT) == {"device": 48}
    rig.cache.core.drop_idle()
    assert tokens_of(rig, PROMPT) == {}
