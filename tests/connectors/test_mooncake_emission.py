"""What the Mooncake connector chooses to store: enough to resume where it should, and not much more."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from connectors.observer import session
from field.rig import Rig, fake_rig, layout_of, shaped
from field.scripted import STORE, ScriptedTier
from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import Chunked, Full, State, Window
from ostinato.cache.layout import CacheLayout
from ostinato.connectors.api import Hook, Ownership
from ostinato.connectors.context import KVConnectorSchedulerContext
from ostinato.connectors.mooncake_emission import Emission
from ostinato.ids import HOLE, JobId, RequestId

LAYOUTS = {
    "full": layout_of(Full()),
    "window": layout_of(Full(), Window(40)),
    "state": layout_of(Full(), Window(33), State()),
    "chunked": layout_of(Full(), Chunked(48)),
    "pages": shaped((Full(), 16, 4), (Window(50), 16, 2)),
    "only state": layout_of(State()),
    "only window": layout_of(Window(32)),
}


class Emitter(ScriptedTier):
    """The connector's choice over a tier that can be looked into."""

    def __init__(self, layout: CacheLayout) -> None:
        super().__init__("tier", Ownership.SHARED, hooks=(Hook.COMMIT, Hook.RELEASE))
        self.layout = layout
        self.ready = True
        self.owners: dict[JobId, RequestId] = {}

    def bind(self, context: KVConnectorSchedulerContext) -> None:
        super().bind(context)
        self.emission = Emission(self.tier, self.layout, context, lambda: self.ready, self.owners.__setitem__)

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        self.emission.news(keys)
        return [False] * len(keys)

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        self.emission.commit(request_id, computed)

    def on_release(self, request_id: RequestId) -> None:
        self.emission.release(request_id)

    def held(self, group: int) -> list[int]:
        """Ordinals that were stored, in order; each once."""
        moves = [move for order in self.mover.orders(STORE) for move in order.moves if move.key.group == group]
        return [move.ordinal for move in moves]


def emitting(name: str, pages: int = 200, **options: Any) -> tuple[Emitter, Rig]:
    tier = Emitter(LAYOUTS[name])
    return tier, fake_rig(tier.layout, pages, [tier], **options)


def resumed(rig: Rig, prompt: Sequence[int]) -> int:
    """Tokens of ``prompt`` that come back when the device is empty; what the probe stores is forgotten again."""
    rig.evict_device()
    tier = rig.cache.core.asked[rig.cache.core.order[-1]]._connector  # type: ignore[attr-defined]
    before = dict(tier.stored)
    tokens = rig.serve(prompt).cached_tokens
    tier.stored = before
    return tokens


def whole(tokens: int) -> int:
    return tokens // 16 * 16


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("step", [16, 37, 200])
def test_resumes_at_the_prompts_end_and_at_the_answers(name: str, step: int) -> None:
    for length, count in ((1, 1), (17, 3), (47, 20), (48, 17), (96, 1), (97, 33), (160, 2)):
        if step == 16 and length % 48 == 0 and name == "chunked":
            continue  # its chunk has gone before anybody knows that the prompt ends
        tier, rig = emitting(name, step_tokens=step)
        prompt = session(1, length)
        answer = list(rig.serve(prompt, count).outputs[0].token_ids)
        assert resumed(rig, prompt) == whole(length - 1), (length, count)
        assert resumed(rig, [*prompt, 7]) == whole(length), (length, count)
        assert resumed(rig, [*prompt, *answer, 7]) == whole(length + count - 1), (length, count)
        rig.check_quiet()
        assert set(tier.owners) == {order.job_id for order in tier.mover.orders(STORE)}


@pytest.mark.parametrize("name", ["window", "state", "chunked", "pages"])
def test_resumes_where_two_prompts_part(name: str) -> None:
    """The second one found the junction on the device; a third one finds it in the store."""
    _, rig = emitting(name, step_tokens=48)
    shared = session(1, 96)
    for tail in range(2):
        rig.serve([*shared, *session(2 + tail, 60)])
    rig.serve([*shared, *session(5, 60)])
    assert resumed(rig, [*shared, *session(6, 30)]) == 96


def test_windows_store_little_of_a_long_prompt() -> None:
    tier, rig = emitting("window", step_tokens=64)
    rig.serve(session(1, 640))
    assert tier.held(0) == list(range(40))
    assert len(tier.held(1)) <= 16, "all 40 were stored"


def test_states_store_boundaries_only() -> None:
    tier, rig = emitting("state", step_tokens=64)
    rig.serve(session(1, 330), 20)
    assert set(tier.held(2)) == {19, 20}, "320: the prompt's end; 336: the answer's"


def test_each_unit_goes_once() -> None:
    for name in ("full", "state", "chunked"):
        tier, rig = emitting(name, step_tokens=40)
        rig.serve(session(1, 200), 50)
        for group in range(len(tier.layout.groups)):
            held = tier.held(group)
            assert len(held) == len(set(held)), (name, group, held)


def test_what_a_hit_brought_is_not_stored_again() -> None:
    tier, rig = emitting("full", step_tokens=64)
    turn = session(1, 200)
    first = rig.serve(turn, 10)
    before = len(tier.held(0))
    rig.serve([*turn, *first.outputs[0].token_ids, *session(2, 50)])
    assert tier.held(0)[before:] == list(range(13, 16)), "only what is new"


def test_orders_have_blocks_by_position_with_holes() -> None:
    tier, rig = emitting("state", step_tokens=64)
    rig.serve(session(1, 200), 30)
    for order in tier.mover.orders(STORE):
        assert len(order.blocks) == 3
        held = [slot for row in order.blocks for slot in row if slot != HOLE]
        assert {move.device_slot for move in order.moves} <= set(held)


def test_no_room_is_tried_again() -> None:
    """Nothing is lost when stores may pin nothing for a while."""
    tier, rig = emitting("full", pages=60, step_tokens=64)
    tier.mover.shut(STORE)
    rig.add(session(1, 300), 100)
    rig.step(12)
    assert len(rig.cache.core.book), "a store is under way"
    tier.mover.open(STORE)
    rig.run()
    rig.settle()
    assert sorted(set(tier.held(0))) == list(range(24))
    rig.check_quiet()


def test_a_pool_for_hardly_one_request() -> None:
    """An order for all that is new would pin more than stores may: it is cut."""
    tier, rig = emitting("full", pages=24, step_tokens=320)
    rig.serve(session(1, 320), 30)
    assert set(tier.held(0)) >= set(range(12))
    rig.check_quiet()


def test_a_store_in_trouble_is_left_alone() -> None:
    tier, rig = emitting("window")
    tier.ready = False
    rig.add(session(1, 100), 60)
    rig.step(20)
    assert not tier.mover.orders(STORE)
    tier.ready = True
    rig.run()
    rig.settle()
    assert tier.held(0) == list(range(9))
    rig.check_quiet()


@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_of_requests_ends_with_them(name: str) -> None:
    """Also with preemption: the pool is too small for all answers together."""
    tier, rig = emitting(name, pages=60, step_tokens=64)
    source = random.Random(1)
    for number in range(12):
        rig.add(session(number, source.randint(1, 200)), source.randint(1, 60))
    rig.run(patience=400)
    assert not tier.emission._progress
    rig.check_quiet()


def test_the_prompt_is_there_while_the_answer_is_being_computed() -> None:
    tier, rig = emitting("state", step_tokens=64)
    rig.add(session(1, 105), 100)
    rig.step(6)
    assert set(tier.held(0)) == set(range(6))
    assert {4, 5} <= set(tier.held(1))
    assert {5} <= set(tier.held(2))
    rig.run()


def test_the_end_is_one_more_try() -> None:
    tier, rig = emitting("window", step_tokens=64)
    tier.ready = False
    rig.add(session(1, 100), 3)
    rig.step(3)
    tier.ready = True
    rig.run()
    rig.settle()
    assert tier.held(0) == list(range(6))
    assert resumed(rig, session(1, 100)) == 96
