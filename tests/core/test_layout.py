"""Grouping layers: every layer once, equal pages, little waste."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.builders import PAGE_BYTES, make_group, make_layout
from core.shapes import layers_of
from ostinato.cache.footprint import waste
from ostinato.cache.kinds import Chunked, Full, Kind, State, Window, keeps_checkpoints
from ostinato.cache.layout import ALIGNMENT, CacheLayout, LayerSpec, build_layout, unit_size

KINDS = st.sampled_from([Full(), Window(64), Window(64, 4), Chunked(128), State()])
PARTS = st.sampled_from([(64,), (128, 128), (96, 32), (7,), (1152,)])


def padding(layout: CacheLayout) -> float:
    used = sum(spec.unit_bytes * spec.page_units for spec in layout.groups)
    return 1 - used / (layout.page_bytes * len(layout.groups))


@settings(max_examples=200)
@given(st.lists(st.tuples(KINDS, st.integers(1, 9), PARTS), min_size=1, max_size=4), st.integers(1, 32), st.data())
def test_any_model_gets_a_sound_layout(
    counts: list[tuple[Kind, int, tuple[int, ...]]], unit: int, data: st.DataObject
) -> None:
    layers = layers_of(*counts)
    most = data.draw(st.integers(1, 4) | st.just(256))
    layout = build_layout(layers, unit, most)
    assert layout == build_layout(layers, unit, most)
    assert layout.fingerprint() == build_layout(layers, unit, most).fingerprint()
    assert sorted(layer for spec in layout.groups for layer in spec.layers) == [layer.index for layer in layers]
    for index, spec in enumerate(layout.groups):
        assert spec.group == index
        assert spec.page_bytes == layout.page_bytes
        assert spec.unit_stride % ALIGNMENT == 0
        assert spec.unit_bytes <= spec.unit_stride
        members = [layers[layer] for layer in spec.layers]
        assert {layer.kind for layer in members} == {spec.kind}
        assert len({layer.parts for layer in members}) == 1
        assert spec.unit_bytes == sum(unit_size(layer.kind, layer.parts, unit) for layer in members)
        assert 1 <= spec.page_units <= (1 if keeps_checkpoints(spec.kind) else most)


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(KINDS, st.integers(1, 60), st.sampled_from([(64,), (256, 256), (1024, 128), (2048, 2048), (49152,)])),
        min_size=1,
        max_size=4,
    )
)
def test_no_model_is_much_worse_off_than_with_a_page_per_layer(counts: list[tuple[Kind, int, tuple[int, ...]]]) -> None:
    """A page of the largest layer always works, at the price of a group per layer."""
    layers = layers_of(*counts)
    layout = build_layout(layers)
    sizes = [unit_size(layer.kind, layer.parts, 16) for layer in layers]
    kinds = len({(layer.kind, layer.parts) for layer in layers})
    largest = max(sizes)
    plain = len(layers) * largest / sum(sizes) - 1
    assert waste(layout, 1) <= max(plain, 0.3) + 0.1
    assert layout.page_bytes <= max(2 * largest, 1.3 * sum(sizes) / kinds + ALIGNMENT)
    if any(layer.kind == Full() for layer in layers):
        assert waste(layout, 32768) <= 0.75


def test_gemma_3_270m_wastes_nothing() -> None:
    parts = (256 * 2, 256 * 2)
    kinds = [Full() if index % 6 == 5 else Window(512) for index in range(18)]
    layout = build_layout([LayerSpec(index, kind, parts) for index, kind in enumerate(kinds)])
    assert [len(spec.layers) for spec in layout.groups] == [3] * 6
    assert sum(spec.kind == Full() for spec in layout.groups) == 1
    assert {spec.page_tokens for spec in layout.groups} == {16}
    assert layout.page_bytes == 3 * sum(parts) * 16
    assert padding(layout) == 0
    assert layout.base_unit == layout.granularity == 16


def test_layers_of_different_size_share_a_pool() -> None:
    layers = layers_of((Full(), 2, (512, 512)), (Window(64), 4, (128, 128)))
    coarse, fine = build_layout(layers, 16, 1), build_layout(layers, 16, 8)
    assert padding(fine) <= padding(coarse)
    mixed = build_layout(layers_of((Full(), 1, (1024,)), (Window(64), 1, (256,))), 16, 8)
    assert padding(mixed) == 0
    assert sorted(spec.page_units for spec in mixed.groups) == [1, 4]


def test_a_model_without_caches_is_refused() -> None:
    with pytest.raises(ValueError, match="no layer"):
        build_layout([])


def test_fingerprints_differ_when_anything_differs() -> None:
    base = make_group(0, (Window(8), 4, 2, 4))
    variants = [
        replace(base, kind=Window(9)),
        replace(base, kind=Window(8, 1)),
        replace(base, kind=Chunked(8)),
        replace(base, layers=(1,)),
        replace(base, layers=(0, 1)),
        replace(base, hash_unit=8, hit_granularity=8),
        replace(base, page_units=1, unit_stride=PAGE_BYTES),
        replace(base, hit_granularity=8),
        replace(base, unit_bytes=base.unit_bytes - 1),
    ]
    layouts = [CacheLayout((spec,), PAGE_BYTES) for spec in (base, *variants)]
    layouts.append(CacheLayout((base, replace(base, group=1)), PAGE_BYTES))
    layouts.append(CacheLayout((replace(base, unit_stride=PAGE_BYTES),), 2 * PAGE_BYTES))
    assert len({layout.fingerprint() for layout in layouts}) == len(layouts)
    assert CacheLayout((base,), PAGE_BYTES).fingerprint() == layouts[0].fingerprint()


def test_inconsistent_layouts_are_refused() -> None:
    spec = make_group(0, (Full(), 4, 1, 4))
    with pytest.raises(ValueError, match="at least one"):
        CacheLayout((), PAGE_BYTES)
    with pytest.raises(ValueError, match="bytes"):
        CacheLayout((spec,), PAGE_BYTES * 2)
    with pytest.raises(ValueError, match="granularity"):
        CacheLayout((replace(spec, hit_granularity=6),), PAGE_BYTES)


def test_units_of_a_mixed_layout() -> None:
    layout = make_layout((Full(), 4, 2, 8), (Window(9), 6, 1, 12), (State(), 12, 1, 12))
    assert layout.base_unit == 2
    assert layout.granularity == 24
    assert [spec.pages(25) for spec in layout.groups] == [4, 5, 3]
