"""Pins of a connector, the facts it may ask for, and which of its hooks are called when."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from connectors.observer import LAYOUT, NAMES, Observer, bare_context, observed, session
from core.builders import make_pool
from field.rig import fake_rig, layout_of
from ostinato.cache.directory import Place
from ostinato.cache.keys import BlockKey, KeyChain
from ostinato.cache.kinds import Full
from ostinato.cache.table import BlockTable
from ostinato.connectors.api import Hook
from ostinato.connectors.context import BoundaryState, KVConnectorSchedulerContext, PoolStats, Source
from ostinato.errors import ConnectorError, StaleViewError
from ostinato.ids import DEVICE, HOLE, GroupId, Ordinal, SlotId


class TestPins:
    def test_holes_are_refused_and_nothing_is_held(self) -> None:
        context, pool, _ = bare_context()
        pool.take(2, "table")
        with pytest.raises(ConnectorError, match="hole"):
            context.pin([SlotId(0), HOLE])
        assert pool.references(0) == 1

    @pytest.mark.parametrize("slot", [5, 8, 10**6, -2])
    def test_slots_that_nobody_holds_are_refused(self, slot: int) -> None:
        context, pool, _ = bare_context()
        pool.take(2, "table")
        with pytest.raises(ConnectorError, match=str(slot)):
            context.pin([SlotId(0), SlotId(slot)])
        assert pool.references(0) == 1
        assert len(pool.leases) == 1

    def test_duplicates_count_once(self) -> None:
        context, pool, _ = bare_context()
        table = pool.take(3, "table")
        pin = context.pin([SlotId(0), SlotId(1), SlotId(0), SlotId(1)])
        assert list(pin.slots) == [0, 1]
        assert [pool.references(slot) for slot in range(3)] == [2, 2, 1]
        table.release()
        assert pool.available == 6
        assert pin.release()
        assert pool.available == 8

    def test_counts_down_by_rank(self) -> None:
        context, pool, _ = bare_context(ranks=3)
        pool.take(1, "table")
        pin = context.pin([SlotId(0)])
        assert not pin.release(2)
        with pytest.raises(ConnectorError, match="rank 2"):
            pin.release(2)
        with pytest.raises(ConnectorError, match="rank 3"):
            pin.release(3)
        assert not pin.release(0)
        assert pool.references(0) == 2
        assert pin.release(1)
        assert pool.references(0) == 1
        with pytest.raises(ConnectorError):
            pin.release(0)

    def test_a_pin_outlives_its_request_and_keeps_the_bytes(self) -> None:
        tier, rig = observed(slots=20)
        pins: list[Any] = []

        def act(hook: str, subject: Any) -> None:
            if hook == "release" and not pins:
                blocks = tier.context.blocks(subject, 0)
                pins.append(tier.context.pin(blocks))

        tier.act = act
        rig.serve(session(1, 64))
        content = rig.engine.executor.pages[list(pins[0].slots)].clone()
        for number in range(2, 8):
            rig.serve(session(number, 100))
        assert (rig.engine.executor.pages[list(pins[0].slots)] == content).all()
        rig.cache.audit()
        assert pins[0].release()
        rig.check_quiet()

    def test_a_leak_is_seen(self) -> None:
        tier, rig = observed()
        tier.act = lambda hook, subject: (
            tier.context.pin(tier.context.blocks(subject, 0)) if hook == "release" else None
        )
        rig.serve(session(1, 64))
        assert [lease.owner for lease in rig.pool.leases] == ["pin"]
        assert tier.context.pool_stats().available == 100 - 4
        rig.cache.audit()
        with pytest.raises(AssertionError, match="pin"):
            rig.check_quiet()


class TestFacts:
    def test_pool_stats(self) -> None:
        tier, rig = observed()
        assert tier.context.pool_stats() == PoolStats(100, 100, 100)
        rig.serve(session(1, 64))
        assert tier.context.pool_stats() == PoolStats(100, 100, 92)
        rig.add(session(2, 30), 5)
        rig.step()
        assert tier.context.pool_stats() == PoolStats(100, 96, 88)

    def test_cached_says_what_is_ready(self) -> None:
        context, pool, directory = bare_context()
        pool.take(2, "table")
        keys = [BlockKey(GroupId(0), bytes([number]) * 32) for number in range(3)]
        directory.write(keys[0], Ordinal(0), DEVICE, Place(SlotId(0), 1, None), True)
        directory.write(keys[1], Ordinal(1), DEVICE, Place(SlotId(1), 1, 7), True)
        assert context.cached(keys) == [True, False, False]
        assert context.cached(iter(())) == []

    def test_cached_knows_the_keys_of_a_prompt(self) -> None:
        tier, rig = observed()
        rig.serve(session(1, 64))
        chain = KeyChain(rig.cache._seed(""), 16)
        chain.update(session(1, 80))
        keys = [BlockKey(GroupId(0), digest) for digest in chain.digests]
        assert tier.context.cached(keys) == [True] * 4 + [False]

    def test_eviction_candidates_page_by_page(self) -> None:
        tier, rig = observed()
        rig.serve(session(1, 64))
        rig.serve(session(2, 64))
        everything, end = tier.context.eviction_candidates(0, 1000)
        assert end == len(everything) == 16
        pages, cursor = [], 0
        while True:
            slots, cursor = tier.context.eviction_candidates(cursor, 5)
            if not slots:
                break
            pages += slots
        assert pages == everything
        taken = rig.pool.take(84 + 3, "somebody")
        assert list(taken.slots)[84:] == everything[:3]

    def test_boundary_states_can_be_read_by_all(self) -> None:
        pool, retention, directory = make_pool(4)
        states = [BoundaryState(NAMES[0], GroupId(1), 64, SlotId(2))]
        context = KVConnectorSchedulerContext(Source({}.get, lambda: states), pool, retention, directory)
        assert list(context.boundary_states()) == list(context.boundary_states()) == states

    def test_there_is_no_way_to_allocate_or_free(self) -> None:
        public = {name for name in dir(KVConnectorSchedulerContext) if not name.startswith("_")}
        assert public == {
            "blocks", "digests", "pin", "emit", "boundary_states", "cached", "eviction_candidates", "pool_stats",
            "expire",
        }  # fmt: skip


class TestHooks:
    def test_order_in_one_request(self) -> None:
        tier, rig = observed(step_tokens=32)
        rig.add(session(1, 40), 2)
        rig.run()
        calls = [call for call in tier.calls if call[0] != "step_end"]
        assert calls == [
            ("commit", (NAMES[0], 32)),
            ("commit", (NAMES[0], 40)),
            ("commit", (NAMES[0], 41)),
            ("release", NAMES[0]),
        ]
        assert [step for hook, step in tier.calls if hook == "step_end"] == [1, 2, 3]

    def test_only_declared_hooks_are_called(self) -> None:
        tier = Observer(hooks=[Hook.RELEASE])
        rig = fake_rig(LAYOUT, 100, [tier])
        rig.serve(session(1, 40), 3)
        assert tier.calls == [("release", NAMES[0])]

    def test_a_connector_without_hooks_adds_no_observer(self) -> None:
        tier = Observer(hooks=[])
        rig = fake_rig(LAYOUT, 100, [tier])
        assert rig.cache.observers == ()
        assert tier.context is not None
        rig.serve(session(1, 40), 3)
        assert tier.calls == []

    @pytest.mark.parametrize("where", ["commit", "release", "step_end"])
    def test_a_raising_hook_hurts_nobody(self, where: str, caplog: pytest.LogCaptureFixture) -> None:
        bad, good = Observer(), Observer()
        good.capabilities = type(good.capabilities)(
            type(good.tier)("good"), good.capabilities.ownership, hooks=frozenset(Hook)
        )
        rig = fake_rig(LAYOUT, 100, [bad, good])
        bad.act = lambda hook, subject: 1 // 0 if hook == where else None
        with caplog.at_level(logging.ERROR):
            outputs = [rig.serve(session(number, 40), 3) for number in range(3)]
        assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3, 3]
        assert len([record for record in caplog.records if "hooks are off" in record.message]) == 1
        assert sum(hook == where for hook, _ in bad.calls) == 1
        assert sum(hook == "release" for hook, _ in good.calls) == 3
        rig.check_quiet()

    def test_a_view_is_stale_after_a_hook_that_raised(self) -> None:
        tier, rig = observed()
        kept: list[Any] = []

        def act(hook: str, subject: Any) -> None:
            kept.extend(tier.context.blocks(NAMES[0]) or ())
            raise RuntimeError

        tier.act = act
        rig.add(session(1, 40), 2)
        rig.run()
        for view in kept:
            with pytest.raises(StaleViewError):
                len(view)


def borrow_seconds(blocks: int) -> float:
    """Least time of a borrow of everything and of a slice, for a request of ``blocks`` blocks."""
    pool, retention, directory = make_pool(blocks)
    table = BlockTable(NAMES[0], layout_of(Full()).groups, pool.take(blocks, "table"))
    table.rows[0].extend(table.lease.slots)
    context = KVConnectorSchedulerContext(Source({NAMES[0]: table}.get), pool, retention, directory)
    best = 1.0
    for _ in range(200):
        start = time.perf_counter()
        for _ in range(20):
            context.blocks(NAMES[0])
            context.blocks(NAMES[0], 0, blocks - 4)
            context.expire()
        best = min(best, time.perf_counter() - start)
    return best


def test_a_borrow_costs_the_same_for_any_context() -> None:
    assert borrow_seconds(100_000) < 3 * borrow_seconds(10)
