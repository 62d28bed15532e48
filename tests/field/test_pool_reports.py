"""Reports about pages: which goes first, what a short request pins, who keeps what, and what a step costs."""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from field.rig import DEVICE, Rig, expected_tokens, fake_rig, layout_of, shaped
from field.scripted import ScriptedTier, kept
from ostinato.cache import footprint, retention
from ostinato.cache.kinds import Full, State, Window
from ostinato.cache.layout import CacheLayout, LayerSpec, build_layout
from ostinato.cache.pool import SlotState
from ostinato.ids import HOLE, RequestId
from ostinato.scheduler.plan import StepPlan, StepResult

HYBRID = layout_of(Full(), Window(32), State())


def session(number: int, length: int) -> list[int]:
    return [number * 10_000 + position for position in range(length)]


# ------------------------------------------------------------------------------------------------ the order of eviction


def started(layout: CacheLayout) -> tuple[Rig, str]:
    """A request that decodes."""
    rig = fake_rig(layout, 100)
    name = rig.add(session(1, 150), 60)
    rig.run(until=lambda: len(rig.engine.scheduler.requests[RequestId(name)].tokens) == 170)
    return rig, name


def free_at_once(rig: Rig, name: str) -> None:
    rig.engine.abort(name)


def free_behind_a_fence(rig: Rig, name: str) -> None:
    """Aborted while a step that uses its pages is under way: they come free when it ends."""
    execute = rig.engine.executor.execute

    def abort_first(plan: StepPlan) -> StepResult:
        rig.engine.abort(name)
        assert any(rig.pool.state(slot) is SlotState.LIMBO for slot in range(rig.pool.capacity))
        return execute(plan)

    rig.engine.executor.execute = abort_first
    rig.step()
    rig.engine.executor.execute = execute


def order_of_eviction(rig: Rig) -> list[tuple[int, int, bool]]:
    """Group, ordinal and mark of each idle page, the first to go first."""
    core = rig.cache.core
    slots = core.device.retention.candidates(rig.pool.capacity)
    entries = [core.directory.contents(DEVICE, slot)[0] for slot in slots]
    return [(entry.key.group, entry.ordinal, entry.boundary) for entry in entries]


@pytest.mark.parametrize(
    "layout", [layout_of(Full(), Window(32)), layout_of(Full(), Full()), HYBRID], ids=["window", "full", "hybrid"]
)
def test_h08_deferred_frees_change_no_order(layout: CacheLayout) -> None:
    """H08, vllm PR#48532: pages that are freed behind a step are evicted in another order.

    Right: the same order in both paths, tail first within each group.
    """
    orders = []
    for free in (free_at_once, free_behind_a_fence):
        rig, name = started(layout)
        free(rig, name)
        rig.check_quiet()
        orders.append(order_of_eviction(rig))
        evicted = []
        for _ in orders[-1]:
            (slot,) = rig.cache.core.device.retention.candidates(1)
            entry = rig.cache.core.directory.contents(DEVICE, slot)[0]
            evicted.append((entry.key.group, entry.ordinal, entry.boundary))
            assert rig.pool.take(len(rig.pool.free_slots) + 1, "newcomer") is not None
        assert evicted == orders[-1]
    assert orders[0] == orders[1]
    full = [ordinal for group, ordinal, _ in orders[0] if group == 0]
    assert full == sorted(full, reverse=True)
    assert len(full) == 10
    for spec in layout.groups:
        for marked in (False, True):
            some = [ordinal for group, ordinal, boundary in orders[0] if (group, boundary) == (spec.group, marked)]
            assert some == sorted(some, reverse=True), (spec, marked)


# ------------------------------------------------------------------------------------------------------------ ownership


@pytest.mark.parametrize(
    "make", [None, lambda: ScriptedTier(slots=40), lambda: ScriptedTier(slots=40, eager=False), kept]
)
@pytest.mark.parametrize("layout", [HYBRID, shaped((Full(), 16, 4), (Window(40), 16, 2), (State(), 16, 1))])
def test_l08_churn_over_holes_leaks_no_page(layout: CacheLayout, make: Callable[[], ScriptedTier] | None) -> None:
    """L08, sglang PR#27586: inserts that overlap a prefix whose window pages are gone leak a page each time.

    Right: every slot is free, idle or held by someone, in each pool and after each step; and all can be had in the end.
    """
    rng = random.Random(8)
    tier = make() if make else None
    rig = fake_rig(layout, layout.peak_pages(200, 48) * 3, [tier] if tier else [], step_tokens=48)
    holes = 0
    for _ in range(80):
        number, shared = rng.randrange(4), rng.choice((32, 48, 100, 170))
        tokens = session(number, shared) + session(rng.randrange(10, 13), rng.randrange(1, 30))
        name = rig.add(tokens, rng.randint(1, 8))
        if rng.random() < 0.3:
            rig.step(rng.randint(1, 4))
        if rng.random() < 0.1:
            rig.engine.abort(name)
        if rng.random() < 0.5:
            rig.run()
            holes += holes_behind_full(rig)
    rig.run()
    rig.check_quiet()
    assert holes > 5, "no window was evicted from a prefix that stayed"
    assert rig.cache.core.device.retention.evictions > 100
    for owned in (rig.cache.core.device, *rig.cache.core.lower.values()):
        owned.pool.drop_idle()
        assert len(owned.pool.free_slots) == owned.pool.capacity
    if tier is None or tier.tier in rig.cache.core.lower:
        assert not len(rig.cache.core.directory)
    assert rig.pool.take(rig.pool.capacity, "all") is not None


def holes_behind_full(rig: Rig) -> int:
    """Units of full attention on the device whose window is not there any more."""
    units = [
        {entry.ordinal for entry in rig.cache.core.directory if entry.key.group == group and DEVICE in entry.places}
        for group in (0, 1)
    ]
    return len(units[0] - units[1])


def let_finish(rig: Rig, name: str) -> None:
    rig.run(until=lambda: name in rig.outputs)


@pytest.mark.parametrize("leave", [let_finish, free_at_once, free_behind_a_fence])
@pytest.mark.parametrize("cut", [75, 100, 127])
@pytest.mark.parametrize("page_units", [1, 4])
def test_l09_a_fork_takes_nothing_from_the_other(page_units: int, cut: int, leave: Callable[[Rig, str], None]) -> None:
    """L09, sglang PR#27038: the copy-on-write path releases locks of a prefix that another request still holds.

    Two requests share a prefix, the second parts from it inside a window (and a page).  Right: what the first one
    holds is the same before, while and after the second one lives.
    """
    layout = shaped((Full(), 16, page_units), (Window(50), 16, page_units), (State(), 16, 1))
    rig = fake_rig(layout, 200)
    requests, answered = rig.engine.scheduler.requests, expected_tokens(session(1, 140), 40)
    first = rig.add(session(1, 140), 40)
    rig.run(until=lambda: len(requests[RequestId(first)].tokens) > 142)
    table = rig.cache.table(RequestId(first))
    held = set(table.lease.slots)
    assert {rig.pool.references(slot) for slot in held} == {1}
    tokens = session(1, cut) + session(2, 30)
    second = rig.add(tokens, 3)
    rig.step()
    assert rig.cache.requests[RequestId(second)].hit.tokens == cut // 16 * 16
    others = set(rig.cache.table(RequestId(second)).lease.slots)
    assert held & others, "they share what they have in common"
    for slot in held & set(table.lease.slots):
        assert rig.pool.references(slot) == 1 + (slot in others)
    leave(rig, second)
    rig.run(until=lambda: second not in requests)
    assert {rig.pool.references(slot) for slot in table.lease.slots} == {1}
    assert {slot for row in table.rows for slot in row} - {HOLE} == set(table.lease.slots)
    rig.run()
    assert rig.outputs[first].outputs[0].token_ids == answered
    if leave is let_finish:
        assert rig.outputs[second].outputs[0].token_ids == expected_tokens(tokens, 3)
    rig.check_quiet()


# ---------------------------------------------------------------------------------------------------------------- sizes


GIANTS = {
    "64 times the layers": [(Window(128), 1, 64), (Full(), 4, 64), (State(), 64, 1024)],
    "64 times the state": [(Window(128), 8, 64), (Full(), 8, 256), (State(), 8, 65536)],
    "64 times the window": [(Window(128), 8, 64), (Full(), 8, 256), (Window(64), 8, 4096)],
}
"""Kind, layers and bytes of each: their units are as 1 : 4 : 64."""


@pytest.mark.parametrize("name", GIANTS)
def test_e03_a_short_request_pins_no_giant_pages(name: str) -> None:
    """E03, vllm#54458: every request pins some 23 giant pages; a prompt of 12 tokens uses a third of the pool.

    Right: what it pins is at most 1.3 times what its groups need, at any time of its life.
    """
    shapes = [(kind, size) for kind, layers, size in GIANTS[name] for _ in range(layers)]
    layout = build_layout([LayerSpec(index, kind, (size,)) for index, (kind, size) in enumerate(shapes)])
    rig = fake_rig(layout, 4 * layout.peak_pages(15, 64))
    needed = footprint.needed_bytes(layout, 12)
    request = rig.add(session(1, 12), 4)
    while rig.engine.has_work:
        rig.step()
        if request not in rig.outputs:
            assert rig.cache.table(RequestId(request)).held() * layout.page_bytes <= 1.3 * needed
    assert rig.outputs[request].outputs[0].token_ids == expected_tokens(session(1, 12), 4)
    rig.check_quiet()


def test_e03_many_short_requests_share_a_pool() -> None:
    """E03: a pool of 20 short requests' pages runs 20 short requests at a time."""
    shapes = [(kind, size) for kind, layers, size in GIANTS["64 times the state"] for _ in range(layers)]
    layout = build_layout([LayerSpec(index, kind, (size,)) for index, (kind, size) in enumerate(shapes)])
    rig = fake_rig(layout, 20 * int(1.3 * footprint.needed_bytes(layout, 12) / layout.page_bytes), step_tokens=512)
    names = [rig.add(session(number, 12), 4) for number in range(20)]
    rig.step()
    assert {rig.phase(name) for name in names} == {"running"}
    rig.run()
    rig.check_quiet()


# ------------------------------------------------------------------------------------------------------- cost of a step


class Counted:
    """``heapq`` that counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(heapq, name)


class Operations:
    """Counts the interpreter's instructions, whatever the machine is doing beside."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Operations:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self._trace


def costs(prefixes: int, tiers: list[ScriptedTier], monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], int]:
    """Instructions of each of many steps in a pool that ``prefixes`` prefixes fill, and heap operations in all."""
    rig = fake_rig(layout_of(Full(), State()), 5 * prefixes, tiers, step_tokens=512, audited=False)
    number = 0
    while not rig.cache.core.device.retention.evictions:
        number += 64
        for one in range(number, number + 64):
            rig.add([one, *range(32)], 1)
        rig.run()
    while len(rig.pool.free_slots) > 10:
        number += 1
        rig.serve([number + 10**8, *range(32)])
    assert number >= prefixes
    assert len(rig.cache.core.directory) > 3 * prefixes
    heap, steps = Counted(), []
    monkeypatch.setattr(retention, "heapq", heap)
    evictions = rig.cache.core.device.retention.evictions
    for one in range(30):
        rig.add([10**9 + one, *range(32)], 2)
        while rig.engine.has_work:
            with Operations() as operations:
                rig.step()
            steps.append(operations.count)
    assert rig.cache.core.device.retention.evictions - evictions > 60
    monkeypatch.undo()
    return sorted(steps), heap.calls


@pytest.mark.parametrize("prefixes", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("eager", [None, True, False], ids=["device", "eager host", "lazy host"])
def test_d13_a_step_costs_the_same_beside_ten_thousand_prefixes(
    prefixes: int, eager: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D13, sglang#30314: the loop stands still for 222 s while one state is evicted from among 10,000 prefixes.

    Right: a step's cost does not grow with what is cached.  Counted are instructions and heap operations, not seconds.
    """
    seen = []
    for count in (100, prefixes):
        tiers = [] if eager is None else [ScriptedTier(slots=3 * count, eager=eager)]
        seen.append(costs(count, tiers, monkeypatch))
    (few, few_heap), (many, many_heap) = seen
    assert many[len(many) * 99 // 100] <= 1.5 * few[len(few) * 99 // 100]
    assert many_heap <= 1.5 * few_heap
