"""Cache kinds against the attention mask."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.builders import make_pool, plain_layout, random_kind
from core.masks import attends, needed_units, reach
from ostinato.cache.kinds import (
    Chunked,
    Full,
    Kind,
    State,
    Window,
    ceil_div,
    contains,
    describe,
    keeps_interior,
    peak_units,
)
from ostinato.cache.table import BlockTable
from ostinato.ids import RequestId

KINDS = st.one_of(
    st.just(Full()),
    st.builds(Window, st.integers(1, 40), st.integers(0, 9)),
    st.builds(Chunked, st.integers(1, 40)),
    st.just(State()),
)


def ordinals(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [ordinal for low, high in ranges for ordinal in range(low, high)]


@given(KINDS, st.integers(1, 9), st.integers(0, 30))
def test_required_is_what_the_mask_needs(kind: Kind, unit: int, units: int) -> None:
    n = units * unit
    found = ordinals(kind.required(n, unit))
    assert len(found) == len(set(found)), "ranges overlap"
    assert found == sorted(found)
    assert set(found) == needed_units(kind, n, unit)


@given(KINDS, st.integers(1, 9), st.integers(1, 30), st.data())
def test_the_law_requirements_only_shrink(kind: Kind, unit: int, units: int, data: st.DataObject) -> None:
    n = units * unit
    smaller = data.draw(st.integers(0, units)) * unit
    kept = set(ordinals(kind.required(smaller, unit)))
    for ordinal in ordinals(kind.required(n, unit)):
        if ordinal < smaller // unit:
            assert ordinal in kept


@given(KINDS, st.integers(1, 9), st.integers(0, 200))
def test_live_covers_whatever_a_later_token_may_read(kind: Kind, unit: int, n: int) -> None:
    """Also inside a unit: the unit that is being filled stays, and so does all that the mask still reaches."""
    live = kind.live(n, unit)
    if isinstance(kind, State):
        assert all(contains(live, ordinal) for ordinal in needed_units(kind, n // unit * unit, unit))
        return
    for token in range(n):
        read = any(attends(kind, position, token) for position in range(n, n + reach(kind)))
        assert contains(live, token // unit) or not read, f"token {token} is still read at {n}"


@given(KINDS, st.integers(1, 9), st.integers(0, 200))
def test_live_is_not_wasteful(kind: Kind, unit: int, n: int) -> None:
    """A unit is live only when one of its tokens may still be read (sinks and the unit being filled aside)."""
    for ordinal in ordinals(kind.live(n, unit)):
        tokens = range(ordinal * unit, min(n, (ordinal + 1) * unit))
        ahead = range(n, n + reach(kind))
        if not isinstance(kind, State) and (ordinal + 1) * unit <= n:
            assert any(attends(kind, position, token) for token in tokens for position in ahead)


def held_peak(kind: Kind, tokens: int, step: int, unit: int, rng: random.Random) -> int:
    """Most pages a real table of one group holds while a prompt is computed in chunks of at most ``step``."""
    layout = plain_layout(kind, unit=unit)
    pool, _, _ = make_pool(ceil_div(tokens, unit) + 1)
    empty = pool.take(0, "table")
    assert empty is not None
    table = BlockTable(RequestId("r"), layout.groups, empty)
    done = peak = 0
    while done < tokens:
        stop = min(tokens, done + rng.choice((step, rng.randint(1, step))))
        cut = (tokens - 1) // unit * unit
        stops = (cut, stop) if done < cut < stop else (stop,)
        taken = pool.take(table.missing_pages(done, stops), "table")
        assert taken is not None
        table.grow(done, stops, taken)
        peak = max(peak, table.held())
        table.trim(stop, None)
        done = stop
    return peak


def test_peak_units_bounds_a_real_table() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        kind, unit, step = random_kind(rng), rng.randint(1, 6), rng.randint(1, 40)
        tokens = rng.randint(1, 120)
        bound = peak_units(kind, tokens, step, unit)
        peak = held_peak(kind, tokens, step, unit, rng)
        assert peak <= bound, f"{describe(kind)}: {tokens} tokens, unit {unit}, steps of {step}: {peak} > {bound}"


@pytest.mark.parametrize("kind", [Window(20), Chunked(16), State()])
def test_peak_units_does_not_grow_with_the_prompt(kind: Kind) -> None:
    assert peak_units(kind, 1_000, 32, 4) == peak_units(kind, 1_000_000, 32, 4)


@pytest.mark.parametrize("make", [lambda: Window(0), lambda: Window(4, -1), lambda: Chunked(0)])
def test_impossible_kinds_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=r"at least|needs"):
        make()


def test_descriptions_differ() -> None:
    kinds = [Full(), Window(4), Window(5), Window(4, 1), Chunked(4), Chunked(5), State()]
    assert len({describe(kind) for kind in kinds}) == len(kinds)
    assert [keeps_interior(kind) for kind in kinds] == [True] + [False] * 6
