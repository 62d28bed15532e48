"""Stores that pressure took back before a mover had seen them."""

from __future__ import annotations

import pytest

from field.rig import fake_rig, layout_of
from field.scripted import kept
from ostinato.cache.kinds import Full


@pytest.mark.parametrize("pages", [20, 24])
def test_what_an_asked_tier_had_to_give_back_is_stored_when_there_is_room(pages: int) -> None:
    tier = kept()
    rig = fake_rig(layout_of(Full()), pages, [tier], step_tokens=512)
    first, second = [*range(192)], [*range(1000, 1000 + 16 * 16 - 1)]
    rig.add(first)
    rig.step()  # its 12 units are to be stored with the next plan
    rig.add(second)
    rig.run()
    rig.settle()
    assert rig.cache.core.book.stats.revoked == 1
    units = {key.digest for key in tier.stored}
    evicted = 12 + 16 - pages
    # All 15 units of the second, and of the first what the device did not have to evict.
    assert len(units) >= 15 + 12 - evicted - 1
    rig.check_quiet()
