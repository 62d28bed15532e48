"""Proof that the random games can lose: each known way to break the core is noticed within a few games."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

import ostinato.hierarchy.admission as admission
import ostinato.transfer.planner as planner
from core.scenarios import SETUPS, Player
from core.world import World
from ostinato.cache.directory import Entry, Place
from ostinato.cache.kinds import Range, Window, keeps_checkpoints
from ostinato.cache.layout import GroupSpec
from ostinato.cache.presence import HitPlan
from ostinato.cache.table import BlockTable
from ostinato.errors import AuditError
from ostinato.hierarchy.admission import Admitter
from ostinato.hierarchy.boundaries import Boundaries
from ostinato.hierarchy.residency import Admission, Residency
from ostinato.hierarchy.settlement import Settlement
from ostinato.ids import DEVICE, HOLE, JobId, SlotId, Step
from ostinato.transfer.book import Book, release
from ostinato.transfer.job import TransferJob, TransferReport
from ostinato.transfer.planner import PagePlan

Patch = pytest.MonkeyPatch


def free_doubtful_slots(patch: Patch) -> None:
    """A transfer that timed out gives its slots back at once."""
    expire = Settlement.expire

    def careless(self: Settlement, now: float) -> None:
        book = self._core.book
        doubtful = [job for job in book if job.deadline <= now and job.state.value == "started"]
        expire(self, now)
        for job in doubtful:
            del book._open[job.job_id]
            release(job)

    patch.setattr(Settlement, "expire", careless)


def publish_before_arrival(patch: Patch) -> None:
    """Loaded units are hittable before their bytes are there."""

    class Ready(Place):
        def __init__(self, slot: SlotId, generation: int, job: JobId | None) -> None:
            super().__init__(slot, generation, None)

    patch.setattr(admission, "Place", Ready)


def believe_failures(patch: Patch) -> None:
    """A failed move counts as moved."""
    conclude = Settlement._conclude

    def trusting(self: Settlement, job: TransferJob, failed: set[int]) -> None:
        conclude(self, job, set())

    patch.setattr(Settlement, "_conclude", trusting)


def believe_the_first_rank(patch: Patch) -> None:
    """One rank's report closes the job of two."""
    init = Book.__init__
    patch.setattr(Book, "__init__", lambda self, world_size=1: init(self, 1))


def forget_copy_sources(patch: Patch) -> None:
    """What a private page is copied from may be reused before the copy was made."""
    admit = Admitter.admit

    def early(self: Admitter, request: Residency, step: Step) -> Admission:
        answer = admit(self, request, step)
        if request.copy_lease is not None:
            request.copy_lease.release()
            request.copy_lease = None
        return answer

    patch.setattr(Admitter, "admit", early)


def trim_too_much(patch: Patch) -> None:
    """A window is one token shorter than its mask."""
    live = Window.live

    def short(self: Window, n: int, unit: int) -> tuple[Range, ...]:
        return live(Window(max(1, self.window - unit), self.sinks), n, unit)

    patch.setattr(Window, "live", short)


def demand_too_little(patch: Patch) -> None:
    """A hit is accepted without the first unit of its window."""
    required = Window.required

    def short(self: Window, n: int, unit: int) -> tuple[Range, ...]:
        return required(Window(max(1, self.window - unit), self.sinks), n, unit)

    patch.setattr(Window, "required", short)


def write_shared_pages(patch: Patch) -> None:
    """A cut inside a page shares the page instead of copying it."""
    plan_group = planner._plan_group

    def sharing(spec: GroupSpec, hit: HitPlan) -> list[PagePlan]:
        pages = plan_group(spec, hit)
        slots = [{source.slot for _, source in page.units if source.tier == DEVICE} for page in pages]
        return [
            replace(page, share=min(held)) if len(held) == 1 else page for page, held in zip(pages, slots, strict=True)
        ]

    patch.setattr(planner, "_plan_group", sharing)


def leak_on_trim(patch: Patch) -> None:
    """Stale pages leave the table but not the lease."""
    drop = BlockTable.trim

    def leaky(self: BlockTable, tokens: int, fence: Step | None) -> None:
        before = [list(row) for row in self.rows]
        drop(self, tokens, fence)
        for row, old in zip(self.rows, before, strict=True):
            for page, slot in enumerate(old):
                if row[page] != slot and self.lease.is_open:
                    self.lease.slots[slot] = None

    patch.setattr(BlockTable, "trim", leaky)


def write_over_checkpoints(patch: Patch) -> None:
    """A finished state page is carried along like an unfinished one."""
    take = BlockTable._take_unfinished

    def greedy(self: BlockTable, spec: GroupSpec, start: int) -> SlotId | None:
        if start and start % spec.hash_unit == 0:
            row, position = self.rows[spec.group], start // spec.hash_unit - 1
            slot, row[position] = row[position], HOLE
            return slot
        return take(self, spec, start)

    def count(self: BlockTable, start: int, stops: Sequence[int]) -> int:
        states = sum(keeps_checkpoints(spec.kind) for spec in self.groups)
        return missing(self, start, stops) - (states if start and start % self.groups[0].hash_unit == 0 else 0)

    missing = BlockTable.missing_pages
    patch.setattr(BlockTable, "_take_unfinished", greedy)
    patch.setattr(BlockTable, "missing_pages", count)


def publish_unfinished_states(patch: Patch) -> None:
    """The state in the middle of a unit passes for the one at the unit's end."""
    publish = Boundaries.publish

    def early(self: Boundaries, request: Residency, table: BlockTable) -> list[Entry]:
        computed, unit = request.computed, request.chain.unit
        request.computed = min(len(request.tokens), -(-computed // unit) * unit)
        published = publish(self, request, table)
        request.computed = computed
        return published

    patch.setattr(Boundaries, "publish", early)


def accept_late_reports(patch: Patch) -> None:
    """A report that arrives twice counts for two ranks."""
    report = Book.report

    def loose(self: Book, item: TransferReport) -> TransferJob | None:
        job = self.get(item.job_id)
        if job is not None and item.rank in job.reported:
            item = TransferReport(item.job_id, 1 - item.rank, item.failed)
        return report(self, item)

    patch.setattr(Book, "report", loose)


SABOTAGE: dict[Callable[[Patch], None], str] = {
    free_doubtful_slots: "pages of several units",
    publish_before_arrival: "eager host",
    believe_failures: "pages of several units",
    believe_the_first_rank: "lazy host, two ranks",
    forget_copy_sources: "one group, coarse pages",
    write_shared_pages: "one group, coarse pages",
    trim_too_much: "eager host",
    demand_too_little: "eager host",
    leak_on_trim: "device only",
    accept_late_reports: "different hash units",
    write_over_checkpoints: "windows, states and a host",
    publish_unfinished_states: "windows, states and a host",
}


@pytest.mark.parametrize("sabotage", SABOTAGE, ids=lambda item: item.__name__)
def test_a_broken_core_is_noticed(sabotage: Callable[[Patch], None], monkeypatch: Patch) -> None:
    sabotage(monkeypatch)
    for seed in range(40):
        try:
            player = Player(World(SETUPS[SABOTAGE[sabotage]]), seed)
            player.play(300, audit_every=5)
            player.world.run()
            player.world.check_quiet()
        except (AssertionError, AuditError, KeyError):
            return
    pytest.fail("40 games, and nobody noticed")
