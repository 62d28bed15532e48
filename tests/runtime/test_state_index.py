"""Where a step's recurrent states are read and written: from plans to index arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ostinato.ids import HOLE, SlotId
from ostinato.runtime.context import Span, build_groups, build_states
from ostinato.scheduler.plan import StatePlan

NO_ROWS = np.empty(0, dtype=np.int32)


def plan(read: int, *stops: tuple[int, int]) -> StatePlan:
    """Pages of group 1; group 0 keeps no state.  Group 2 lies 100 pages behind."""
    return StatePlan(_pages(read), tuple((tokens, _pages(page)) for tokens, page in stops))


def _pages(page: int) -> tuple[SlotId, ...]:
    return (HOLE, SlotId(page), HOLE if page == HOLE else SlotId(page + 100))


def span(start: int, count: int, state: StatePlan | None, row: tuple[int, ...] = (0, 1, 2, 3)) -> Span:
    return Span(start, count, (np.array(row, dtype=np.int32), NO_ROWS, NO_ROWS), state)


SPANS = (
    span(0, 5, plan(HOLE, (5, 9))),
    span(20, 1, plan(4, (21, 4))),
    span(10, 39, plan(12, (16, 17), (32, 18), (49, 30))),
)


def test_state_index() -> None:
    none, first, second = build_states(SPANS, 3, {1, 2})
    assert none is None
    assert first is not None
    assert second is not None
    assert first.cu_q.tolist() == [0, 5, 6, 45]
    assert first.read.tolist() == [-1, 4, 12]
    assert first.cu_stops.tolist() == [0, 1, 2, 5]
    assert first.stops.tolist() == [5, 6, 12, 28, 45]
    assert first.pages.tolist() == [9, 4, 17, 18, 30]
    assert second.read.tolist() == [-1, 104, 112]
    assert second.pages.tolist() == [109, 104, 117, 118, 130]
    for tensor in (first.cu_q, first.read, first.cu_stops, first.stops, first.pages):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def test_groups_of_states_have_no_rows() -> None:
    groups = build_groups(SPANS, [16, 16, 16], {1, 2})
    assert groups[0].slots.numel() == 45
    for group in groups[1:]:
        assert group.slots.numel() == 0
        assert (group.block_table == HOLE).all()
        assert group.query_lens == [5, 1, 39]
        assert group.context_lens == [0, 20, 10]


def test_a_model_without_states_needs_no_plan() -> None:
    assert build_states([span(0, 5, None)], 3, ()) == (None, None, None)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (span(0, 5, None), "needs a state plan"),
        (span(0, 5, plan(HOLE, (4, 9))), "Span"),
        (span(0, 5, plan(HOLE, (3, 1), (3, 2), (5, 9))), "Span"),
        (span(10, 5, plan(4, (10, 1), (15, 9))), "Span"),
        (span(0, 5, plan(HOLE)), "Span"),
        (span(0, 5, plan(HOLE, (5, HOLE))), "has no page"),
    ],
)
def test_a_plan_that_does_not_fit_its_chunk_is_a_bug(broken: Span, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        build_states([broken], 3, {1, 2})
