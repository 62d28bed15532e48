"""Orders that a connector emits itself: what they carry, what they pin, when there is nothing to emit."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.observer import session
from field.rig import Rig, fake_rig, layout_of
from field.scripted import STORE, ScriptedTier
from ostinato.cache.kinds import Full, State, Window
from ostinato.connectors.api import Hook, Ownership
from ostinato.connectors.context import BoundaryState
from ostinato.errors import ConnectorError
from ostinato.ids import HOLE, RequestId

LAYOUT = layout_of(Full(), Window(32), State())


class Emitting(ScriptedTier):
    """Emits everything of a request whenever it commits; is offered nothing."""

    def __init__(self, **options: Any) -> None:
        super().__init__(ownership=Ownership.SHARED, hooks=(Hook.COMMIT, Hook.STEP_END), **options)
        self.rows: list[list[list[int]]] = []
        self.states: list[tuple[BoundaryState, ...]] = []
        self.emitted: list[Any] = []

    def offer(self, keys: Any) -> Any:
        return [False] * len(keys)

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        assert self.context is not None
        views = self.context.blocks(request_id)
        assert views is not None
        self.rows.append([list(view) for view in views])
        positions = [range(len(view)) for view in views]
        self.emitted.append(self.context.emit(self.tier, request_id, positions))

    def on_step_end(self, step: Any) -> None:
        assert self.context is not None
        self.states.append(tuple(self.context.boundary_states()))


def emitting(pages: int = 120, **options: Any) -> tuple[Emitting, Rig]:
    tier = Emitting()
    return tier, fake_rig(LAYOUT, pages, [tier], **options)


def test_an_order_has_all_groups_by_position_and_pins_each_page_once() -> None:
    tier, rig = emitting(step_tokens=128)
    tier.mover.shut(STORE)
    rig.add(session(1, 100), 2)
    rig.step(2)
    (order,) = tier.mover.waiting(STORE)[:1]
    assert [list(row) for row in order.blocks] == tier.rows[0]
    full, window, state = order.blocks
    assert len(full) == len(window) == len(state) == 7
    assert HOLE not in full
    moved = [move.device_slot for move in order.moves]
    assert len(moved) == len(set(moved))
    assert HOLE not in moved
    assert {move.ordinal for move in order.moves if move.key.group == 0} == set(range(6)), "the last page is not full"
    (job,) = [job for job in rig.cache.core.book if job.job_id == order.job_id]
    assert set(job.device_lease.slots) == set(moved)
    assert all(rig.pool.references(slot) >= 1 for slot in moved)


def test_holes_stay_where_they_are() -> None:
    tier, rig = emitting(step_tokens=32)
    rig.serve(session(1, 128))
    rows = tier.rows[-1]
    assert [slot == HOLE for slot in rows[1]].count(True) >= 4
    orders = tier.mover.orders(STORE)
    assert [[list(row) for row in order.blocks] for order in orders] == tier.rows
    for order in orders:
        held = {slot for row in order.blocks for slot in row if slot != HOLE}
        assert {move.device_slot for move in order.moves} <= held


def test_what_was_emitted_is_found_again() -> None:
    tier, rig = emitting(step_tokens=64)
    rig.serve(session(1, 100))
    rig.run()
    rig.evict_device()
    hit = rig.serve([*session(1, 100), 7, 8])
    assert hit.cached_by_tier == {str(tier.tier): 96}


def test_nothing_to_emit() -> None:
    tier, rig = emitting()
    context = tier.context
    assert context is not None
    assert context.emit(tier.tier, RequestId("nobody"), [range(3)] * 3) is None
    name = RequestId(rig.add(session(1, 20), 1))
    assert context.emit(tier.tier, name, [range(3)] * 3) is None, "it waits: it has no table"
    rig.run()
    for bad in (range(-1, 3), range(0, 4, 2)):
        with pytest.raises(ConnectorError, match="positions"):
            context.emit(tier.tier, name, [bad] * 3)


def test_stores_may_pin_only_a_share() -> None:
    """Half of the device: beyond that an order is not taken, and nothing waits for it."""
    tier, rig = emitting(pages=60, step_tokens=64)
    tier.mover.shut(STORE)
    rig.add(session(1, 200), 40)
    for _ in range(30):
        rig.step()
    assert None in tier.emitted
    tier.mover.open(STORE)
    rig.run()
    rig.cache.audit()


def test_boundary_states_are_shown_in_the_step_that_made_them_so() -> None:
    tier, rig = emitting(step_tokens=128)
    rig.add(session(1, 100), 20)
    rig.step()
    (seen,) = [states for states in tier.states if states][-1:]
    assert {(state.group, state.tokens) for state in seen} == {(2, 80), (2, 96)}
    slot = seen[0].slot
    assert slot in tier.rows[0][2]
    rig.step()
    assert not tier.states[-1], "only the states of this step"
    rig.run()
    assert rig.serve([*session(1, 100), 3]).cached_tokens == 96
