"""Block tables: grow, trim, and how much one request holds at once."""

from __future__ import annotations

import math
import random

import pytest

from core.builders import PAGE_BYTES, make_group, make_layout, make_pool, plain_layout, random_shape
from core.masks import needed_units, read_units
from ostinato.cache.audit import audit_tables
from ostinato.cache.kinds import Chunked, Full, State, Window, keeps_checkpoints
from ostinato.cache.layout import CacheLayout
from ostinato.cache.pool import SlotPool, SlotState
from ostinato.cache.table import BlockTable, StatePlan, page_ranges
from ostinato.errors import AuditError
from ostinato.ids import HOLE, RequestId, Step


def make_table(layout: CacheLayout, pool: SlotPool) -> BlockTable:
    lease = pool.take(0, "table")
    assert lease is not None
    return BlockTable(RequestId("r"), layout.groups, lease)


def grow(table: BlockTable, pool: SlotPool, tokens: int, start: int = 0) -> StatePlan | None:
    taken = pool.take(table.missing_pages(start, (tokens,)), "more")
    assert taken is not None
    return table.grow(start, (tokens,), taken)


def test_rows_grow_by_page_and_trim_behind_the_window() -> None:
    layout = plain_layout(Full(), Window(6), unit=4)
    pool, _, _ = make_pool(20)
    table = make_table(layout, pool)
    grow(table, pool, 10)
    assert [len(row) for row in table.rows] == [3, 3]
    assert table.missing_pages(10, (12,)) == 0
    table.trim(10, None)
    assert [row.count(HOLE) for row in table.rows] == [0, 1]
    grow(table, pool, 20)
    table.trim(20, None)
    assert [slot == HOLE for slot in table.rows[1]] == [True, True, True, False, False]
    assert table.slot(1, 0) == HOLE
    assert table.slot(1, 99) == HOLE
    assert table.held() == 7 == sum(pool.state(slot) is SlotState.HELD for slot in range(20))
    audit_tables([table])


def test_trim_respects_sinks_and_fences() -> None:
    layout = plain_layout(Window(4, 2), unit=4)
    pool, _, _ = make_pool(10)
    table = make_table(layout, pool)
    grow(table, pool, 24)
    table.trim(24, fence=Step(3))
    assert [slot == HOLE for slot in table.rows[0]] == [False, True, True, True, True, False]
    assert pool.available == 4
    pool.settle(Step(3))
    assert pool.available == 8


@pytest.mark.parametrize(("kind", "step"), [(Chunked(8), 8), (Chunked(4), 16), (Window(1), 4), (Window(1, 2), 8)])
def test_steps_that_end_where_nothing_is_live_still_trim(kind: Chunked | Window, step: int) -> None:
    """At the end of a chunk no token is needed any more; steps that all end there must not keep the whole prompt."""
    layout = plain_layout(kind, unit=4)
    pool, _, _ = make_pool(64)
    table = make_table(layout, pool)
    for tokens in range(step, 160, step):
        grow(table, pool, tokens, tokens - step)
        assert table.held() <= layout.peak_pages(160, step)
        table.trim(tokens, None)


def test_skipped_pages_never_get_a_slot() -> None:
    layout = make_layout((Chunked(8), 4, 1, 4), (Full(), 4, 2, 4))
    pool, _, _ = make_pool(8)
    table = make_table(layout, pool)
    table.skip(12)
    assert [len(row) for row in table.rows] == [3, 1], "the page that the cut is in is not skipped"
    assert table.missing_pages(8, (16,)) == 2


def test_grow_wants_the_exact_number() -> None:
    layout = plain_layout(Full(), unit=4)
    pool, _, _ = make_pool(8)
    table, taken = make_table(layout, pool), pool.take(3, "more")
    assert taken is not None
    with pytest.raises(AssertionError, match="more slots"):
        table.grow(0, (8,), taken)


def test_page_ranges() -> None:
    spec = make_group(0, (Full(), 4, 3, 4))
    assert page_ranges(spec, ((0, 1), (4, 7), (8, 8))) == ((0, 1), (1, 3))


def test_random_prefills_hold_what_the_mask_reads_and_never_more_than_the_peak() -> None:
    rng = random.Random(11)
    for _ in range(1200):
        groups = tuple(make_group(index, random_shape(rng)) for index in range(rng.randint(1, 3)))
        layout, tokens, step = CacheLayout(groups, PAGE_BYTES), rng.randint(1, 100), rng.randint(1, 30)
        pool, _, _ = make_pool(sum(spec.pages(tokens) for spec in groups))
        table, done = make_table(layout, pool), 0
        peak = layout.peak_pages(tokens, step)
        while done < tokens:
            stop = min(tokens, done + rng.choice((step, rng.randint(1, step))))
            plan = grow(table, pool, stop, done)
            for spec in groups:
                if keeps_checkpoints(spec.kind):
                    assert plan is not None
                    assert (plan.read[spec.group] == HOLE) == (done == 0)
                    continue
                for unit in read_units(spec.kind, done, stop, spec.hash_unit):
                    assert table.slot(spec.group, unit // spec.page_units) != HOLE
            assert table.held() <= peak, (groups, tokens, step)
            table.trim(stop, None)
            done = stop
        audit_tables([table])


def test_what_a_later_cut_needs_is_still_there() -> None:
    """After trimming at n, all that resuming at n needs is held (States: at the last whole unit)."""
    rng = random.Random(12)
    for _ in range(300):
        kind, unit = rng.choice((Full(), Window(9, 2), Chunked(10), State())), rng.randint(1, 5)
        layout, tokens = plain_layout(kind, unit=unit), rng.randint(1, 80)
        pool, _, _ = make_pool(math.ceil(tokens / unit))
        table = make_table(layout, pool)
        cut = tokens // unit * unit
        stops = (cut, tokens) if 0 < cut < tokens else (tokens,)
        taken = pool.take(table.missing_pages(0, stops), "more")
        assert taken is not None
        table.grow(0, stops, taken)
        table.trim(tokens, None)
        for ordinal in needed_units(kind, tokens // unit * unit if kind == State() else tokens, unit):
            assert table.slot(0, ordinal) != HOLE


def test_a_state_page_is_carried_until_its_unit_is_full() -> None:
    """Unfinished: written in place, at the position where the chunk stops.  Finished: left behind, never written."""
    layout = plain_layout(Full(), State(), unit=4)
    pool, _, _ = make_pool(20)
    table = make_table(layout, pool)

    first = grow(table, pool, 6)
    assert first is not None
    assert first.read == (HOLE, HOLE)
    ((stop, (_, working)),) = first.stops
    assert (stop, table.rows[1]) == (6, [HOLE, working])
    second = grow(table, pool, 12, 6)
    assert second is not None
    assert second.read == (HOLE, working)
    assert second.stops == ((12, (HOLE, working)),), "the unfinished page is written in place"
    assert table.rows[1] == [HOLE, HOLE, working]
    third = grow(table, pool, 13, 12)
    assert third is not None
    assert third.read == (HOLE, working)
    assert third.stops[0][1][1] != working, "a finished page is a checkpoint"
    table.trim(13, None)
    assert table.rows[1][2] == working, "the last checkpoint is kept beside the working state"
    audit_tables([table])


def test_a_chunk_with_checkpoints_on_the_way() -> None:
    layout = plain_layout(State(), unit=4)
    pool, _, _ = make_pool(20)
    table = make_table(layout, pool)
    grow(table, pool, 6)
    (working,) = table.lease.slots
    stops = (8, 16, 18)
    assert table.missing_pages(6, stops) == 2
    taken = pool.take(2, "more")
    assert taken is not None
    a, b = taken.slots
    plan = table.grow(6, stops, taken)
    assert plan == StatePlan((working,), ((8, (working,)), (16, (a,)), (18, (b,))))
    assert table.rows[0] == [HOLE, working, HOLE, a, b]
    table.trim(18, None)
    assert table.rows[0] == [HOLE, HOLE, HOLE, a, b]
    assert table.new_pages([0]) == ((),)


def test_the_audit_compares_table_and_lease() -> None:
    layout = plain_layout(Full(), unit=4)
    pool, _, _ = make_pool(8)
    table = make_table(layout, pool)
    grow(table, pool, 8)
    table.rows[0][0] = table.rows[0][1]
    with pytest.raises(AuditError, match="twice"):
        audit_tables([table])
    table.rows[0][0] = HOLE
    with pytest.raises(AuditError, match="differ"):
        audit_tables([table])
