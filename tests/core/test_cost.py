"""What loads and prefill take, as measured, and when a hit is given up for that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from field.scripted import Clock
from ostinato.hierarchy.cost import BELIEVED_S, Costs
from ostinato.ids import TierId

HOST, DISK = TierId("host"), TierId("disk")
MIB = 1 << 20


@given(st.floats(0.0, 1.0), st.floats(1e6, 1e11), st.lists(st.integers(1, 1 << 30), min_size=2, max_size=20))
def test_a_line_is_found(latency: float, speed: float, sizes: list[int]) -> None:
    costs = Costs(Clock())
    for size in sizes:
        costs.note_load(HOST, size, latency + size / speed)
    low, high = min(sizes), max(sizes)
    for size in (low, (low + high) // 2, high):
        expected = latency + size / speed
        if high > 2 * low:
            assert costs.load_seconds({HOST: size}) == pytest.approx(expected, rel=0.05)
        else:  # sizes that are much alike do not tell latency from speed
            assert expected * 0.4 < costs.load_seconds({HOST: size}) < expected * 2.5


@given(st.lists(st.tuples(st.integers(1, 1 << 34), st.floats(1e-9, 1e4)), min_size=1, max_size=50))
def test_no_measurements_give_nonsense(loads: list[tuple[int, float]]) -> None:
    costs = Costs(Clock())
    for size, seconds in loads:
        costs.note_load(HOST, size, seconds)
    (speed,) = costs.speeds()
    assert speed.latency_s >= 0.0
    assert speed.bytes_per_second > 0.0
    assert costs.load_seconds({HOST: 1 << 20}) >= 0.0


def test_what_is_not_known_costs_nothing() -> None:
    clock = Clock()
    costs = Costs(clock)
    assert costs.load_seconds({HOST: MIB}) == 0.0
    assert costs.compute_seconds(100) is None
    costs.note_load(HOST, MIB, 2.0)
    costs.note_load(HOST, MIB, 0.0)  # a mover that does not measure
    assert costs.load_seconds({HOST: MIB, DISK: MIB}) == pytest.approx(2.0)
    clock.now += BELIEVED_S
    assert costs.load_seconds({HOST: MIB}) == 0.0, "a tier that was slow once is tried again"


def test_two_tiers_load_side_by_side() -> None:
    costs = Costs(Clock())
    costs.note_load(HOST, MIB, 1.0)
    costs.note_load(DISK, MIB, 3.0)
    assert costs.load_seconds({HOST: MIB, DISK: MIB}) == pytest.approx(3.0)


def test_small_steps_say_nothing_of_prefill() -> None:
    costs = Costs(Clock())
    costs.note_step(8, 1.0)
    assert costs.compute_seconds(1000) is None
    costs.note_step(500, 0.5)
    costs.note_step(8, 1.0)
    assert costs.compute_seconds(1000) == pytest.approx(1.0)
