"""Whose copy is loaded when several tiers have one."""

from __future__ import annotations

import pytest

from field.rig import fake_rig, layout_of
from field.scripted import LOAD, ScriptedTier, kept
from ostinato.cache.kinds import Full


@pytest.mark.parametrize("asked_first", [False, True])
def test_our_own_tier_comes_before_one_that_must_be_asked(asked_first: bool) -> None:
    """Whatever the order in which they are given: what we hold needs no question, and none is asked."""
    host, disk = ScriptedTier("host"), kept("disk")
    rig = fake_rig(layout_of(Full()), 60, [disk, host] if asked_first else [host, disk])
    prompt = list(range(160))
    rig.serve(prompt)
    rig.evict_device()
    assert len(host.stored) == len(disk.stored) == 10
    asked = []
    probe = disk.probe
    disk.probe = lambda keys: asked.extend(keys) or probe(keys)  # type: ignore[method-assign,func-returns-value]
    output = rig.serve([*prompt, 7])
    assert dict(output.cached_by_tier) == {"host": 160}
    assert not disk.mover.orders(LOAD)
    assert not asked


def test_of_asked_tiers_the_first_one_given_is_loaded_from() -> None:
    first, second = kept("first"), kept("second")
    rig = fake_rig(layout_of(Full()), 60, [first, second])
    prompt = list(range(160))
    rig.serve(prompt)
    rig.evict_device()
    assert dict(rig.serve([*prompt, 7]).cached_by_tier) == {"first": 160}
    assert not second.mover.orders(LOAD)
