"""Reports about the seam to connectors: what is asked, read and handed over, and what is kept."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

import pytest

from field.rig import Rig, expected_tokens, fake_rig, layout_of
from field.scripted import LOAD, STORE, ScriptedTier, kept
from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import Chunked, Full, State, Window
from ostinato.cache.layout import CacheLayout
from ostinato.connectors.api import Ownership
from ostinato.connectors.multi import MultiConnector, expand
from ostinato.hierarchy.tiers import StoreMode

FULL = layout_of(Full())
SMALL = layout_of(Full(), Window(32))
HYBRID = layout_of(Full(), Window(32), State())
SCRIPTED = {"host": ScriptedTier, "lazy": lambda: ScriptedTier(eager=False), "disk": kept}
EAGER, LAZY = StoreMode.EAGER, StoreMode.LAZY

Make = Callable[[], ScriptedTier]


def session(number: int, length: int) -> list[int]:
    return [number * 10_000 + position for position in range(length)]


def check(rig: Rig, name: str, tokens: Sequence[int], count: int = 1) -> int:
    """The answer is the cold one; returns what was reused."""
    output = rig.outputs[name]
    assert output.outputs[0].token_ids == expected_tokens(tokens, count)
    return output.cached_tokens


# ----------------------------------------------------------------------------------------------- what is asked and read


def test_h15_only_what_can_be_part_of_a_hit_is_read() -> None:
    """H15, vllm#51439: a look-up in a far tier loads every key that exists, also those that cannot help.

    The tier has blocks 0 to 9 of both groups, but for block 3 of full attention; the window needs the last 2 only.
    """
    for kinds, missing, read in (
        ((Full(), Window(32)), {(0, 3)}, {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)}),
        ((Window(32), Window(16)), {(0, 3)}, {(0, 8), (0, 9), (1, 9)}),
        ((Full(), Window(32)), {(1, 9)}, {(0, m) for m in range(9)} | {(1, 7), (1, 8)}),
    ):
        disk = kept()
        rig = fake_rig(layout_of(*kinds), 100, [disk])
        disk.mover.broken = missing
        rig.serve(session(1, 161))
        rig.evict_device()
        disk.mover.broken = set()
        rig.serve([*session(1, 160), 5])
        loaded = {(move.key.group, move.ordinal) for order in disk.mover.orders(LOAD) for move in order.moves}
        assert loaded == read


class Counted(ScriptedTier):
    """Notes how often each key was asked about."""

    def __init__(self) -> None:
        super().__init__("disk", Ownership.KEPT)
        self.asked: list[BlockKey] = []
        self.offered: list[BlockKey] = []

    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        self.asked += keys
        return super().probe(keys)

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        self.offered += keys
        return super().offer(keys)


def test_n10_one_question_per_admission_and_new_tokens_only() -> None:
    """N10, vllm PR#18232: asked again after its load; it returns all tokens where the new ones are meant.

    Local hit 16 tokens, external 24 (blocks of 8).  Right: one question, 8 tokens loaded.
    """
    disk = Counted()
    rig = fake_rig(layout_of(Full(), unit=8), 100, [disk])
    rig.serve(session(1, 24))
    rig.evict_device()
    rig.serve([*session(1, 16), 9])
    disk.asked.clear()
    before = len(disk.mover.orders(LOAD))
    disk.mover.shut(LOAD)
    name = rig.add([*session(1, 24), 5, 6], 20)
    rig.step(5)
    disk.mover.open(LOAD)
    rig.run()
    output = rig.outputs[name]
    assert output.cached_by_tier == {"device": 16, "disk": 8}
    (order,) = disk.mover.orders(LOAD)[before:]
    assert [move.ordinal for move in order.moves] == [2]
    assert len(disk.asked) == len(set(disk.asked)) == 1
    check(rig, name, [*session(1, 24), 5, 6], 20)


@pytest.mark.parametrize("silent", [False, True])
def test_d09_an_external_hit_that_is_shorter_than_the_local_one(silent: bool, caplog: pytest.LogCaptureFixture) -> None:
    """D09, LMCache#2106: 'tokens to load' becomes negative: endless rescheduling, one log line thousands of times.

    Right: it counts as nothing, the request runs.
    """
    disk = kept()
    rig = fake_rig(SMALL, 100, [disk])
    rig.serve(session(1, 64))
    disk.offer = lambda keys: [False] * len(keys)  # type: ignore[method-assign]
    rig.serve(session(1, 192))
    if silent:
        disk.mood = "silent"
    caplog.clear()
    name = rig.add([*session(1, 192), 5], 2)
    rig.run(patience=3)
    assert check(rig, name, [*session(1, 192), 5], 2) == 192
    assert rig.outputs[name].cached_by_tier == {"device": 192}
    assert not disk.mover.orders(LOAD)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    rig.check_quiet()


@pytest.mark.parametrize("layout", [FULL, SMALL, HYBRID, layout_of(State(), Chunked(32))])
@pytest.mark.parametrize("tier", list(SCRIPTED))
def test_n11_the_whole_prompt_is_in_the_tier(layout: CacheLayout, tier: str) -> None:
    """N11, LMCache PR#3322: a prompt of exactly k blocks that are all there: nothing to compute, an assertion.

    Right: the last token is computed, so the hit ends one block earlier; the output equals a cold run.
    """
    for blocks in range(1, 6):
        rig = fake_rig(layout, 60, [SCRIPTED[tier]()])
        for turn in range(3):
            output = rig.serve(session(blocks, 16 * blocks), 3)
            assert output.outputs[0].token_ids == expected_tokens(session(blocks, 16 * blocks), 3)
            assert output.cached_tokens < 16 * blocks
            assert not turn or tier == "lazy" or output.cached_tokens == 16 * (blocks - 1)
            rig.evict_device()
        rig.check_quiet()


# ---------------------------------------------------------------------------------------------------- what is kept


NO_CUT = pytest.mark.xfail(
    strict=True, reason="windows (states) inside of a chain go first: where its tail is lost, no other cut is left"
)


@pytest.mark.parametrize("layout", [FULL, pytest.param(SMALL, marks=NO_CUT), pytest.param(HYBRID, marks=NO_CUT)])
def test_h07_a_prompt_again_after_another_one(layout: CacheLayout) -> None:
    """H07, vllm#42948: A, A, B, A in a pool of 1.3 A: hits are all or nothing.

    Right: the 4th is at least what the ideal least-recently-used list of tokens keeps: the 0.3 that B leaves.
    """
    length = 1600
    pages = layout.peak_pages(length + 1, 64) * 13 // 10
    rig = fake_rig(layout, pages, audited=False)
    hits = [rig.serve([*session(number, length), 5]).cached_tokens for number in (1, 1, 2, 1)]
    assert hits[1] == length
    assert hits[3] >= length * 3 // 10 // 16 * 16


@pytest.mark.parametrize("layout", [FULL, SMALL, HYBRID])
def test_h07_with_a_host_tier(layout: CacheLayout) -> None:
    """H07 with what B pushes out in the host: the 4th request hits all of it."""
    length = 800
    pages = layout.peak_pages(length + 1, 64) * 13 // 10
    rig = fake_rig(layout, pages, [ScriptedTier(slots=500)], audited=False)
    assert [rig.serve([*session(number, length), 5]).cached_tokens for number in (1, 1, 2, 1)] == [0, 800, 0, 800]


SLOW = "slow stores, small pool"


H11 = [*itertools.product(["host", "disk"], ["prompt", "slow", SLOW]), ("lazy", SLOW)]


@pytest.mark.parametrize(("tier", "stores"), H11)
def test_h11_every_block_of_a_long_prompt_is_stored(tier: str, stores: str) -> None:
    """H11, vllm#53498: 44 % of the blocks are never stored: nobody walks the backlog when prefill has ended.

    185 blocks in chunks of 4, stores as quick as the prefill or not.  Right: all full blocks are stored and found.
    """
    prompt = session(1, 185 * 16)
    scripted = kept() if tier == "disk" else ScriptedTier(slots=3000, eager=tier == "host")
    rig = fake_rig(SMALL, 2 * 185 + 20 if stores == SLOW else 800, [scripted], step_tokens=64, audited=False)
    if stores != "prompt":
        scripted.mover.shut(STORE)
    rig.add([*prompt, 5])
    rig.run()
    scripted.mover.open(STORE)
    rig.step(3)
    rig.settle()
    if tier != "disk" and stores == SLOW:
        for number in range(2, 5):  # copied before they are evicted
            rig.serve(session(number, 165 * 16))
    else:
        assert len({key for key in scripted.stored if key.group == 0}) == 185
        rig.evict_device()
    assert rig.serve([*prompt, 6]).cached_tokens == 185 * 16
    rig.check_quiet()


def test_h11_what_is_put_off_is_no_debt() -> None:
    """H11 while the store takes nothing and prompts come and go: what is evicted meanwhile is forgotten."""
    disk = kept()
    rig = fake_rig(SMALL, 40, [disk])
    disk.mover.shut(STORE)
    for number in range(8):
        name = rig.add(session(number, 200), 2)
        rig.run()
        check(rig, name, session(number, 200), 2)
    assert 0 < len(disk.mover.waiting(STORE)[0].moves) <= 20
    disk.mover.open(STORE)
    rig.settle()
    for number in range(8):
        name = rig.add([*session(number, 200), 5], 2)
        rig.run()
        check(rig, name, [*session(number, 200), 5], 2)
    assert all(len(waiting) <= 40 for waiting in rig.cache._stores._put_off.values())
    rig.check_quiet()


def test_two_tiers_share_what_stores_pin() -> None:
    """H11, H14: a page that two tiers take is pinned once, so that neither takes the other's share."""
    host, disk = ScriptedTier(), kept()
    rig = fake_rig(SMALL, 40, [host, disk], step_tokens=256)
    for tier in (host, disk):
        tier.mover.shut(STORE)
    rig.add(session(1, 150))
    rig.run()
    rig.step()
    for tier in (host, disk):
        assert sum(len(order.moves) for order in tier.mover.waiting(STORE)) == 9 + 9
    assert len(rig.cache.core.book.stored_slots) == 18
    for tier in (host, disk):
        tier.mover.open(STORE)
    rig.settle()
    assert not rig.cache.core.book.stored_slots
    rig.check_quiet()


@pytest.mark.parametrize("write", ["all", "first"])
@pytest.mark.parametrize("make", [*SCRIPTED.values()], ids=list(SCRIPTED))
def test_h14_a_connector_behind_one_that_has_nothing(make: Make, write: str) -> None:
    """H14, vllm PR#46865: blocks are handed only to the connector that won the look-up; the others store nothing.

    Right: B gets the real blocks of a cold request, and stores them.
    """
    first, second = kept("first"), make()
    first.offer = lambda keys: [False] * len(keys)  # type: ignore[method-assign]
    rig = fake_rig(SMALL, 40, expand([MultiConnector([first, second], write)]))  # type: ignore[arg-type]
    rig.serve([*session(1, 128), 5])
    for number in range(2, 6):
        rig.serve(session(number, 300))  # pressure
    rig.evict_device()
    output = rig.serve([*session(1, 128), 6], 2)
    assert output.cached_by_tier == {second.tier: 128}
    assert output.outputs[0].token_ids == expected_tokens([*session(1, 128), 6], 2)
    rig.check_quiet()


def test_n12_a_hit_of_two_connectors() -> None:
    """N12, vllm#20609: the first hit wins and the rest is computed again; loads are not counted.

    A has blocks 0 to 3, B has 0 to 9.  Right: 10 blocks are loaded, in order; the request goes on when both are done.
    """
    first, second = kept("first"), kept("second")
    rig = fake_rig(FULL, 60, expand([MultiConnector([first, second])]))  # type: ignore[arg-type]
    rig.serve(session(1, 160))
    for order in first.mover.orders(STORE):
        for move in order.moves:
            if move.ordinal > 3:
                del first.stored[move.key]
    for early, late in ((first, second), (second, first)):
        rig.evict_device()
        for tier in (first, second):
            tier.mover.shut(LOAD)
            tier.mover.submitted.clear()
        name = rig.add([*session(1, 160), 5], 2)
        rig.step(2)
        for tier, ordinals in ((first, [0, 1, 2, 3]), (second, [4, 5, 6, 7, 8, 9])):
            (order,) = tier.mover.orders(LOAD)
            assert [move.ordinal for move in order.moves] == ordinals
        early.mover.open(LOAD)
        rig.step(3)
        assert rig.phase(name) == "parked"
        late.mover.open(LOAD)
        rig.run()
        assert check(rig, name, [*session(1, 160), 5], 2) == 160
        assert rig.outputs[name].cached_by_tier == {"first": 64, "second": 96}
    rig.check_quiet()
