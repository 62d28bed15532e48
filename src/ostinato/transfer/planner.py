"""From a hit to pages: what is shared, what is copied on the device, what is loaded from where.

Owns: the decision page by page.  Does not own: slots (none is taken here), jobs.  Pure functions.

A page is shared when the cut covers it whole and one device slot holds all its required units.  Any other page gets a
slot of its own, filled unit by unit: copied on the device, or loaded from the source that ``presence`` chose.  A shared
page is never written, so a cut *inside* a page always makes a private copy.

::

    page of 4 units, cut after unit 1:   [u0 u1 | .. ..]   u0 copied from slot 9, u1 loaded from host -> private page
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.cache.presence import HitPlan, Source
from ostinato.ids import DEVICE, HOLE, JobId, SlotId


@dataclass(frozen=True, slots=True)
class PagePlan:
    """One page of a hit.  ``share`` is the device slot to share, or HOLE: take a slot and fill ``units`` from it."""

    group: int
    page: int
    share: SlotId
    units: tuple[tuple[int, Source], ...]


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """All pages that a hit requires, and the loads already under way that it can join."""

    hit: HitPlan
    pages: tuple[PagePlan, ...]
    joins: frozenset[JobId] = field(default_factory=frozenset)

    @property
    def shared_slots(self) -> list[SlotId]:
        return [page.share for page in self.pages if page.share != HOLE]

    @property
    def private_pages(self) -> int:
        return sum(page.share == HOLE for page in self.pages)

    @property
    def copied_slots(self) -> list[SlotId]:
        """Device slots that private pages are filled from."""
        sources = (source for page in self.pages if page.share == HOLE for _, source in page.units)
        return [source.slot for source in sources if source.tier == DEVICE]


def plan_admission(layout: CacheLayout, hit: HitPlan) -> AdmissionPlan:
    pages = [page for spec in layout.groups for page in _plan_group(spec, hit)]
    joins = frozenset(source.job for sources in hit.sources for source in sources.values() if source.job is not None)
    return AdmissionPlan(hit, tuple(pages), joins)


def _plan_group(spec: GroupSpec, hit: HitPlan) -> list[PagePlan]:
    by_page: dict[int, list[tuple[int, Source]]] = {}
    for ordinal, source in hit.sources[spec.group].items():
        by_page.setdefault(ordinal // spec.page_units, []).append((ordinal, source))
    plans = []
    for page, units in sorted(by_page.items()):
        covered = (page + 1) * spec.page_tokens <= hit.tokens
        slots = {source.slot if source.tier == DEVICE else HOLE for _, source in units}
        share = slots.pop() if covered and len(slots) == 1 else HOLE
        plans.append(PagePlan(spec.group, page, share, tuple(units)))
    return plans
