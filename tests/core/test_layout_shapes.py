"""The layouts of published models: little waste, few groups, and a short request that takes no giant page."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from core.builders import make_pool
from core.shapes import SHAPES, layers_of, mamba2
from core.shapes import kv as kv_parts
from ostinato.cache import footprint
from ostinato.cache.kinds import Chunked, Full, State, Window, keeps_checkpoints
from ostinato.cache.layout import CacheLayout, LayerSpec, build_layout
from ostinato.cache.table import BlockTable
from ostinato.ids import RequestId

MANY_GROUPS = 12
LONG, MEDIUM, SHORT = 32768, 2048, 12


@pytest.mark.parametrize("name", SHAPES)
def test_published_models(name: str) -> None:
    layout = build_layout(SHAPES[name])
    assert footprint.waste(layout, LONG) <= 0.04
    assert footprint.waste(layout, MEDIUM) <= 0.12
    assert footprint.waste(layout, SHORT) <= 0.3
    assert len(layout.groups) <= MANY_GROUPS
    assert layout.granularity == layout.base_unit == 16
    places = [(layer, spec.kind, spec.parts) for spec in layout.groups for layer in spec.layers]
    assert sorted(places, key=str) == sorted(((each.index, each.kind, each.parts) for each in SHAPES[name]), key=str)


@pytest.mark.parametrize("name", ["deepseek-v3", "mamba2-2.7b", "llama-3-70b"])
def test_models_of_one_kind_have_one_group(name: str) -> None:
    layout = build_layout(SHAPES[name])
    assert len(layout.groups) == 1
    assert layout.groups[0].page_units == 1
    assert footprint.waste(layout, MEDIUM) == 0


@pytest.mark.parametrize(
    ("name", "groups", "kib"),
    [
        ("gemma-3-270m", 6, 48),
        ("gemma-3-12b", 6, 1024),
        ("gemma-3n-e4b", 5, 128),
        ("gpt-oss-20b", 2, 384),
        ("llama-4-scout", 4, 768),
    ],
)
def test_models_whose_layers_divide_evenly_waste_nothing(name: str, groups: int, kib: int) -> None:
    layout = build_layout(SHAPES[name])
    assert (len(layout.groups), layout.page_bytes) == (groups, kib * 1024)
    assert {spec.page_units for spec in layout.groups} == {1}
    assert [footprint.waste(layout, tokens) for tokens in (1, MEDIUM, LONG)] == [0, 0, 0]


def test_big_states_are_spread_over_groups() -> None:
    layout = build_layout(SHAPES["qwen3-next-80b"])
    states = [spec for spec in layout.groups if keeps_checkpoints(spec.kind)]
    attention = [spec for spec in layout.groups if not keeps_checkpoints(spec.kind)]
    assert sum(len(spec.layers) for spec in states) == 36
    assert len(states) > 1
    assert len(attention) == 1
    assert attention[0].page_units > 1
    assert {spec.page_units for spec in states} == {1}


def test_the_search_is_quick() -> None:
    layers = layers_of(
        (Full(), 25, (4096, 4096)), (State(), 75, (98304, 1 << 20)), (Window(1000), 25, (1152,)), (Full(), 7, (512,))
    )
    build_layout(layers)
    took = []
    for _ in range(5):
        start = time.perf_counter()
        build_layout(layers)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.05


# ------------------------------------------------------------------------------------------------------- field reports


@pytest.mark.parametrize(
    "layers",
    [
        layers_of((Window(128), 1, (64,)), (Full(), 4, (64,)), (State(), 64, (1024,))),
        layers_of((Window(128), 8, (64,)), (Full(), 8, (256,)), (State(), 8, (65536,))),
        layers_of((Window(128), 8, (64,)), (Full(), 8, (256,)), (Window(64), 8, (4096,))),
    ],
    ids=["64 times the layers", "64 times the state", "64 times the window"],
)
def test_e03_a_short_request_takes_no_giant_page(layers: Sequence[LayerSpec]) -> None:
    """Kinds whose units are as 1 : 4 : 64."""
    layout = build_layout(layers)
    assert footprint.held_bytes(layout, SHORT) <= 1.3 * footprint.needed_bytes(layout, SHORT)
    assert layout.granularity == 16


def test_e03_a_single_layer_sets_the_least_page() -> None:
    """One layer is never split, so three single layers of 1 : 4 : 64 take three pages of the largest."""
    layout = build_layout(layers_of((Window(128), 1, (64,)), (Full(), 1, (256,)), (State(), 1, (65536,))))
    assert layout.page_bytes == 65536
    assert footprint.held_bytes(layout, SHORT) == 3 * 65536
    assert [spec.page_units for spec in layout.groups] == [64, 16, 1]
    assert footprint.waste(layout, LONG) <= 0.04


@pytest.mark.parametrize("states", [1, 28])
def test_h04_a_large_state_page_leaves_hits_fine(states: int) -> None:
    """A state of 64 times the bytes of a token of attention."""
    layout = build_layout(layers_of((Full(), 4, (64, 64)), (State(), states, (64 * 128 * 4,))))
    assert layout.granularity == layout.base_unit == 16
    assert {spec.hit_granularity for spec in layout.groups} == {16}
    assert max(spec.page_tokens for spec in layout.groups) > 16


def test_h05_a_context_shorter_than_a_page_is_no_problem() -> None:
    layout = build_layout(SHAPES["qwen3-next-80b"])
    assert max(spec.page_tokens for spec in layout.groups) > 32
    states = sum(keeps_checkpoints(spec.kind) for spec in layout.groups)
    assert layout.peak_pages(32, 512) == len(layout.groups) + states
    assert layout.peak_pages(16, 512) == len(layout.groups)
    pool = layout.peak_pages(32, 512) * layout.page_bytes
    assert footprint.longest_context(layout, pool, 512, limit=32) == 32


# ------------------------------------------------------------------------------------------------------------ promises


@pytest.mark.parametrize("name", ["gemma-3-4b", "gemma-4-31b", "llama-4-scout", "qwen3-next-80b", "lfm2-1.2b"])
def test_no_table_takes_more_than_the_peak(name: str) -> None:
    rng = random.Random(name)
    layout = build_layout(SHAPES[name])
    for _ in range(3):
        tokens, step = rng.randint(1, 20000), rng.choice((16, 100, 512, 4096))
        assert held_at_once(layout, tokens, step, rng) <= layout.peak_pages(tokens, step)


def test_no_table_of_coarse_pages_takes_more_than_the_peak() -> None:
    rng = random.Random(5)
    kinds = [Full(), Window(40), Window(300, 20), Chunked(128), Chunked(100), State()]
    for _ in range(150):
        parts = [(64,), (512,), (4096,)]
        layers = layers_of(*((rng.choice(kinds), rng.randint(1, 6), rng.choice(parts)) for _ in range(3)))
        layout = build_layout(layers, hash_unit=rng.choice((4, 16)))
        tokens, step = rng.randint(1, 1500), rng.randint(1, 200)
        assert held_at_once(layout, tokens, step, rng) <= layout.peak_pages(tokens, step)


def held_at_once(layout: CacheLayout, tokens: int, step: int, rng: random.Random) -> int:
    """Most pages that a table holds while ``tokens`` tokens are computed in steps of at most ``step``."""
    pool, _, _ = make_pool(layout.peak_pages(tokens, step) + 1000)
    lease = pool.take(0, "table")
    assert lease is not None
    table, done, peak = BlockTable(RequestId("r"), layout.groups, lease), 0, 0
    while done < tokens:
        stop = min(tokens, done + rng.choice((step, rng.randint(1, step))))
        boundary = tokens // layout.base_unit * layout.base_unit
        stops = [boundary, stop] if done < boundary < stop else [stop]
        taken = pool.take(table.missing_pages(done, stops), "more")
        assert taken is not None
        table.grow(done, stops, taken)
        peak = max(peak, table.held())
        table.trim(stop, None)
        assert table.held() <= layout.resident_pages(stop) + len(layout.groups)
        done = stop
    return peak


# ----------------------------------------------------------------------------------------------------------- footprint


def test_footprint_of_a_small_hybrid() -> None:
    layout = build_layout(layers_of((Full(), 4, kv_parts(2, 64)), (State(), 4, mamba2(8, 64, 64, 1))))
    states = [spec for spec in layout.groups if keeps_checkpoints(spec.kind)]
    assert footprint.checkpoint_bytes(layout, 4096) == len(states) * layout.page_bytes
    assert footprint.held_bytes(layout, 1) == len(layout.groups) * layout.page_bytes
    assert footprint.needed_bytes(layout, 1) == sum(spec.unit_bytes for spec in layout.groups)
    assert footprint.bytes_per_token(layout, 4096) == footprint.held_bytes(layout, 4096) / 4096
    # One token before the end of a unit, the last checkpoint is held beside the working state.
    most = footprint.held_bytes(layout, 2047)
    assert most == footprint.held_bytes(layout, 2048) + len(states) * layout.page_bytes
    assert footprint.requests_that_fit(layout, 10 * most, 2048) == 10


def test_longest_context_is_the_last_that_fits() -> None:
    layout = build_layout(SHAPES["gemma-3-270m"])
    longest = footprint.longest_context(layout, 64 << 20, 512, limit=1 << 20)
    pages = (64 << 20) // layout.page_bytes
    assert layout.peak_pages(longest, 512) <= pages < layout.peak_pages(longest + 1, 512)
    assert footprint.longest_context(layout, 64 << 20, 512, limit=100) == 100
    assert footprint.longest_context(layout, layout.page_bytes, 512, limit=100) == 0


def test_windows_count_as_the_price_of_a_checkpoint() -> None:
    layout = build_layout(SHAPES["gemma-3-270m"])
    assert footprint.checkpoint_bytes(layout, 4096) == 5 * 32 * layout.page_bytes
