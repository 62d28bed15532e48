"""Reports about several holders and ranks, unequal groups, and connectors of other versions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from core.builders import plain_layout
from core.harness import AskedTier
from core.scenarios import EQUAL, STATES
from core.world import Setup, World
from field.rig import Rig, expected_tokens, fake_rig, layout_of, pins, shaped
from field.scripted import ScriptedTier, kept
from field.stores import ask, evict_device, real_rig
from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import Full, State, Window
from ostinato.cache.layout import CacheLayout
from ostinato.cache.pool import SlotState
from ostinato.connectors.api import Capabilities, Connector, Hook, Ownership
from ostinato.connectors.context import Pin
from ostinato.connectors.registry import make_connector
from ostinato.errors import ConnectorError
from ostinato.hierarchy.tiers import StoreMode
from ostinato.ids import DEVICE, RequestId, SlotId, TierId

FULL = layout_of(Full())
SMALL = layout_of(Full(), Window(32))
HYBRID = layout_of(Full(), Window(32), State())
EAGER, LAZY = StoreMode.EAGER, StoreMode.LAZY

Make = Callable[[], ScriptedTier]


def session(number: int, length: int) -> list[int]:
    return [number * 10_000 + position for position in range(length)]


def check(rig: Rig, name: str, tokens: Sequence[int], count: int = 1) -> int:
    """The answer is the cold one; returns what was reused."""
    output = rig.outputs[name]
    assert output.outputs[0].token_ids == expected_tokens(tokens, count)
    return output.cached_tokens


# ------------------------------------------------------------------------------------------------------------- holders


class Holder(ScriptedTier):
    """Pins what it sees of a request when it commits."""

    def __init__(self, name: str) -> None:
        super().__init__(name, Ownership.SHARED, hooks=[Hook.COMMIT])
        self.pins: list[Pin] = []

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return [False] * len(keys)

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        views = self.context.blocks(request_id) if self.context is not None else None
        if not self.pins and views is not None and self.context is not None:
            self.pins.append(self.context.pin({slot for view in views for slot in view if slot >= 0}))


@pytest.mark.parametrize("order", list(itertools.permutations(["one", "two", "request"])))
def test_l03_two_connectors_let_go_of_the_same_blocks(order: tuple[str, ...]) -> None:
    """L03, vllm-ascend#15990: two holders of one hit block and a race between them: the free queue is corrupt.

    Right: the ledger holds in every order.
    """
    one, two = Holder("one"), Holder("two")
    rig = fake_rig(SMALL, 30, [one, two])
    rig.serve(session(1, 64))
    for tier in (one, two):
        tier.pins.pop().release()
    name = rig.add([*session(1, 64), 5], 40)
    rig.run(until=lambda: bool(one.pins and two.pins))
    assert set(one.pins[0].slots) == set(two.pins[0].slots)
    for who in order:
        if who == "request":
            rig.engine.abort(name)
        else:
            {"one": one, "two": two}[who].pins[0].release()
        rig.cache.core.drop_idle()
        rig.cache.audit()
        rig.step()
    assert pins(rig) == 0
    rig.check_quiet()
    assert rig.pool.available == rig.pool.capacity


def recount(rig: Rig) -> None:
    """Each tier's counters are what a count of its slots gives; each slot is in one list, once."""
    for tier in (rig.cache.core.device, *rig.cache.core.lower.values()):
        pool = tier.pool
        states = [pool.state(SlotId(slot)) for slot in range(pool.capacity)]
        assert len(pool.free_slots) == len(set(pool.free_slots)) == states.count(SlotState.FREE)
        assert pool.available == states.count(SlotState.FREE) + states.count(SlotState.IDLE)
        assert len(tier.retention) == states.count(SlotState.IDLE)
    leases = list(rig.pool.leases)
    for slot in range(rig.pool.capacity):
        assert rig.pool.references(slot) == sum(slot in lease.slots for lease in leases)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("layout", [SMALL, HYBRID], ids=["small", "hybrid"])
def test_l02_l11_long_prompts_one_after_the_other(eager: bool, layout: CacheLayout) -> None:
    """L02, vllm#42085: the second of two prompts of 90 % of the pool finds free count and free list at odds.

    L11, TensorRT-LLM PR#12834: a block that is evicted to the host inside of an allocation is counted on the wrong
    level: used blocks are negative.  Right: they run; all counters are equal to a recount after each step.
    """
    tier = ScriptedTier(slots=30, eager=eager)
    rig = fake_rig(layout, 100, [tier])
    length = 16
    while layout.peak_pages(length + 16, 64) <= 90:
        length += 16
    for number in (1, 2, 1, 3):
        name = rig.add(session(number, length), 3)
        while rig.engine.has_work:
            rig.step()
            recount(rig)
        check(rig, name, session(number, length), 3)
    rig.settle()
    recount(rig)
    rig.check_quiet()


# --------------------------------------------------------------------------------------------------------------- ranks

PROMPT = [index % 9 for index in range(41)]


@pytest.mark.parametrize("layout", [EQUAL, STATES, plain_layout(Full(), State(), unit=4)])
@pytest.mark.parametrize("lower", [(("host", 80, EAGER),), (("host", 80, LAZY),), ()], ids=["eager", "lazy", "disk"])
def test_h16_two_ranks_hit_what_one_does(layout: CacheLayout, lower: Any) -> None:
    """H16, LMCache#2310: hits with one worker, none with two.  Right: the same hits."""
    hits = []
    for ranks in (1, 2):
        world = World(Setup(layout, 60, lower, () if lower else ("disk",), ranks=ranks))
        clients = []
        for tokens in (PROMPT, [3] * 50, PROMPT, PROMPT[:20] + [7] * 20, PROMPT):
            clients.append(world.serve(tokens, 2))
            world.run()
            world.cache.core.drop_idle(device_only=True)
        hits.append([client.hits for client in clients])
        world.check_quiet()
    assert hits[0] == hits[1]
    assert max(hits[0][4]) > 0 or (lower and lower[0][2] is LAZY)


class RankZero(AskedTier):
    """Looks into the first worker's part alone."""

    def holds(self, key: BlockKey) -> bool:
        return (0, key) in self.stored


@pytest.mark.parametrize("lost", [0, 3, 9])
def test_f11_one_worker_has_lost_a_block(lost: int) -> None:
    """F11, LMCache#1467: rank 0 looks up and pins alone; another rank has evicted.

    Right: what counts is what all ranks have; nobody reads what one of them lacks.
    """
    world = World(Setup(plain_layout(Full()), 60, (), ("disk",), ranks=2))
    world.asked[0].__class__ = RankZero
    world.serve(PROMPT)
    world.run()
    ordinals = {entry.key: entry.ordinal for entry in world.cache.core.directory}
    world.cache.core.drop_idle(device_only=True)
    for key, ordinal in ordinals.items():
        if ordinal == lost:
            del world.asked[0].stored[1, key]
    client = world.open(PROMPT)
    world.run()
    assert client.hits == [4 * lost]
    assert world.asked[0].refutations == 1
    world.check_quiet()


def test_f10_one_worker_can_never_store() -> None:
    """F10, vllm#51762: some ranks fall back and others do not.  Right: one decision for all of them, never wrong."""
    world = World(Setup(EQUAL, 60, (("host", 60, EAGER),), ranks=2))
    for _ in range(3):
        client = world.open(PROMPT)
        for _ in range(60):
            world.plan()
            for errand in list(world.worker.open_errands()):
                broken = frozenset(range(len(errand.order.moves))) if errand.rank else frozenset()
                world.worker.report(errand, broken)
            world.apply()
        assert client.hits == [0]
        world.cache.core.drop_idle(device_only=True)
    assert not any(TierId("host") in entry.places for entry in world.cache.core.directory)
    world.check_quiet()


# ------------------------------------------------------------------------------------------------- shapes and versions


@pytest.mark.parametrize("make", [lambda: ScriptedTier(slots=1100), kept], ids=["host", "disk"])
def test_c10_blocks_of_4_64_and_3584_tokens(make: Make) -> None:
    """C10, vllm#54413: start is refused, because one group's block is smaller than the hash unit of all.

    Right: it starts, and each group has units of its own; here both as hash units and as pages of equal hash units.
    """
    prompt = session(1, 3600)
    for layout, hit in (
        (shaped((Full(), 4, 1), (Window(128), 64, 1), (State(), 3584, 1)), 3584),
        (shaped((Full(), 4, 896), (Window(128), 4, 16), (Full(), 4, 1)), 3600),
    ):
        rig = fake_rig(layout, 1100, [make()], step_tokens=1792, audited=False)
        for turn in range(2):
            output = rig.serve([*prompt, turn])
            assert output.cached_tokens == (hit if turn else 0)
            rig.evict_device()
        rows = [spec.page_tokens for spec in layout.groups]
        assert sorted(rows)[0] == 4
        assert sorted(rows)[-1] == 3584


class NoMover(Connector):
    """Made for an interface without movers."""

    def __init__(self, ownership: Ownership = Ownership.SHARED) -> None:
        self.capabilities = Capabilities(TierId("old"), ownership)


class NoCapabilities(Connector):
    """Made for an interface without capabilities."""


def test_c11_a_connector_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """C11, LMCache#3957: it can be imported, but does not run; there is no pair of versions that works.

    Right: what it lacks is found at start, and said.
    """
    old = NoMover()
    with pytest.raises(ConnectorError, match=r"NoMover.*make_mover"):
        fake_rig(FULL, 10, [old])  # type: ignore[list-item]
    with pytest.raises(ConnectorError, match=r"NoMover.*slots"):
        fake_rig(FULL, 10, [NoMover(Ownership.OWNED)])  # type: ignore[list-item]

    class Point:
        name, value = "old", "somewhere:factory"

        def __init__(self, made: Any) -> None:
            self.made = made

        def load(self) -> Any:
            return lambda spec: self.made

    for made, message in ((NoCapabilities(), "capabilities"), (object(), "no Connector")):
        monkeypatch.setattr("ostinato.connectors.registry.entry_points", lambda group, made=made: [Point(made)])
        with pytest.raises(ConnectorError, match=message):
            make_connector("old:")


def test_a_connector_with_nothing_but_a_mover_works() -> None:
    """C11, the other way round: methods that came later have defaults, so an old connector goes on."""

    class Plain(Connector):
        def __init__(self) -> None:
            self.capabilities = Capabilities(TierId("plain"), Ownership.KEPT)
            self.inner = kept("plain")

        def make_mover(self, device: Any, notify: Any) -> Any:
            return self.inner.make_mover(device, notify)

    with real_rig(SMALL, 60, [Plain()]) as rig:
        for _ in range(2):
            output = ask(rig, session(1, 64), 2)
            assert output.outputs[0].token_ids == expected_tokens(session(1, 64), 2)
            assert output.cached_tokens == 0
            evict_device(rig)
        assert rig.pool.tier == DEVICE
