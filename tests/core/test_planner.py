"""Which pages of a hit are shared, copied or loaded."""

from __future__ import annotations

import random

from core.builders import PAGE_BYTES, Shape, make_layout, random_shape
from core.masks import needed_units
from ostinato.cache.kinds import Full, State, Window
from ostinato.cache.layout import CacheLayout
from ostinato.cache.presence import HitPlan, Source
from ostinato.ids import DEVICE, HOLE, JobId, SlotId, TierId
from ostinato.transfer.planner import AdmissionPlan, plan_admission

HOST = TierId("host")


def on_device(slot: int, job: int | None = None) -> Source:
    return Source(DEVICE, SlotId(slot), None if job is None else JobId(job))


def on_host(slot: int) -> Source:
    return Source(HOST, SlotId(slot), None)


def plan_one(shape: Shape, tokens: int, sources: dict[int, Source]) -> AdmissionPlan:
    return plan_admission(make_layout(shape), HitPlan(tokens, (sources,)))


def test_whole_pages_on_the_device_are_shared() -> None:
    plan = plan_one((Full(), 4, 2, 4), 16, {0: on_device(7), 1: on_device(7), 2: on_device(3), 3: on_device(3)})
    assert plan.shared_slots == [7, 3]
    assert plan.private_pages == 0
    assert plan.copied_slots == []


def test_a_cut_inside_a_page_copies_the_covered_units() -> None:
    plan = plan_one((Full(), 4, 2, 4), 12, {0: on_device(7), 1: on_device(7), 2: on_device(3)})
    assert plan.shared_slots == [7]
    assert plan.private_pages == 1
    assert plan.copied_slots == [3]


def test_a_page_from_two_places_is_private() -> None:
    mixed = plan_one((Full(), 4, 2, 4), 8, {0: on_device(7), 1: on_host(1)})
    assert mixed.shared_slots == []
    assert mixed.private_pages == 1
    assert mixed.copied_slots == [7]
    two_slots = plan_one((Full(), 4, 2, 4), 8, {0: on_device(7), 1: on_device(8)})
    assert two_slots.private_pages == 1
    assert two_slots.copied_slots == [7, 8]


def test_loads_under_way_are_joined() -> None:
    plan = plan_one((Full(), 4, 1, 4), 8, {0: on_device(7, job=5), 1: on_device(8, job=6)})
    assert plan.joins == {5, 6}
    assert plan.shared_slots == [7, 8]


def test_a_window_takes_pages_only_for_what_it_needs() -> None:
    plan = plan_one((Window(8), 4, 1, 4), 40, {8: on_host(0), 9: on_host(1)})
    assert [page.page for page in plan.pages] == [8, 9]
    assert plan.private_pages == 2
    state = plan_one((State(), 8, 1, 8), 40, {4: on_host(0)})
    assert [page.page for page in state.pages] == [4]


def test_half_a_page_behind_a_window_is_shared_when_the_cut_is_beyond_it() -> None:
    plan = plan_one((Window(6), 4, 4, 4), 16, {2: on_device(7), 3: on_device(7)})
    assert plan.shared_slots == [7]


def random_sources(rng: random.Random, layout: CacheLayout, tokens: int) -> tuple[dict[int, Source], ...]:
    sources = []
    for spec in layout.groups:
        units = sorted(needed_units(spec.kind, tokens, spec.hash_unit))
        slots = {unit: unit // spec.page_units * 10 + spec.group + rng.choice((0, 0, 0, 5)) for unit in units}
        sources.append({u: rng.choice((on_device(slots[u]), on_device(slots[u]), on_host(slots[u]))) for u in units})
    return tuple(sources)


def test_random_hits_fill_every_required_unit_and_never_write_a_shared_page() -> None:
    rng = random.Random(4)
    for _ in range(2000):
        layout = make_layout(*(random_shape(rng) for _ in range(rng.randint(1, 3))))
        assert layout.page_bytes == PAGE_BYTES
        tokens = layout.granularity * rng.randint(0, 6)
        if tokens > 200:
            continue
        hit = HitPlan(tokens, random_sources(rng, layout, tokens))
        plan = plan_admission(layout, hit)
        for spec in layout.groups:
            pages = [page for page in plan.pages if page.group == spec.group]
            assert [page.page for page in pages] == sorted(
                {unit // spec.page_units for unit in hit.sources[spec.group]}
            )
            assert {unit: source for page in pages for unit, source in page.units} == hit.sources[spec.group]
            for page in pages:
                if page.share != HOLE:
                    assert (page.page + 1) * spec.page_tokens <= tokens, "tokens after the cut would be written into it"
                    assert {source.slot for _, source in page.units} == {page.share}
        assert len(plan.shared_slots) + plan.private_pages == len(plan.pages)
