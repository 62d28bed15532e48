"""What the outcome of a transfer means: keys become hittable or are withdrawn, parked requests wake.

Owns: the conclusions.  Movers only report facts.  A fault of any kind is a miss: the request it was for gives up its
table and is admitted again, at the last boundary that is still proven over all groups.  Thread: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ostinato.cache.directory import Place
from ostinato.hierarchy.cost import Costs
from ostinato.hierarchy.residency import Residency, Woken
from ostinato.hierarchy.tiers import Core
from ostinato.ids import DEVICE, JobId, RequestId, TierId
from ostinato.transfer.book import release
from ostinato.transfer.job import JobKind, JobState, Move, TransferJob, TransferReport


class Settlement:
    """Applies reports and deadlines.  ``requests`` is the hierarchy's own map."""

    def __init__(self, core: Core, requests: Mapping[RequestId, Residency], costs: Costs) -> None:
        self._core = core
        self._costs = costs
        self._requests = requests
        self._cancelled: list[JobId] = []

    def apply(self, reports: Iterable[TransferReport]) -> None:
        for report in reports:
            job = self._core.book.report(report)
            if job is None:
                continue
            if job.state is not JobState.IN_DOUBT:
                self._conclude(job, job.failed)
                if job.order.kind is JobKind.LOAD and not job.failed:
                    self._costs.note_load(job.order.tier, job.order.total_bytes, report.seconds)
            release(job)

    def expire(self, now: float) -> None:
        """Deadlines: nothing of a job in doubt is believed, and whoever waits for it stops waiting."""
        for job in self._core.book.expire(now):
            self._cancelled.append(job.job_id)
            self._conclude(job, set(range(len(job.order.moves))))

    def take_cancelled(self) -> tuple[JobId, ...]:
        """Jobs that movers should give up, since the last call."""
        cancelled, self._cancelled = tuple(self._cancelled), []
        return cancelled

    def wake(self) -> list[Woken]:
        """Parked requests whose tickets are due, in the order in which they were opened."""
        woken = []
        for request in self._requests.values():
            ticket = request.ticket
            if ticket is None or (ticket.jobs and not ticket.failed):
                continue
            request.ticket = None
            woken.append(Woken(request.request_id, ok=request.table is not None and not ticket.failed))
        return woken

    def _conclude(self, job: TransferJob, failed: set[int]) -> None:
        order = job.order
        target = DEVICE if order.kind is JobKind.LOAD else order.tier
        lost = []
        for index, move in enumerate(order.moves):
            entry = self._core.directory.get(move.key)
            place = entry.places.get(target) if entry is not None else None
            ours = place is not None and place.job == order.job_id
            if index in failed:
                lost.append(move)
                if entry is not None and order.kind is JobKind.STORE:
                    entry.failed_stores += 1
                if ours:
                    self._core.directory.withdraw(move.key, target)
            elif ours and entry is not None:
                self._core.directory.confirm(entry, target)
        if order.kind is JobKind.LOAD:
            if lost:
                self._refute(order.tier, lost)
            self._tell_waiters(job, bool(lost))

    def _refute(self, tier: TierId, moves: list[Move]) -> None:
        """The tier did not have what it (or our directory) said."""
        probe = self._core.asked.get(tier)
        if probe is not None:
            probe.refuted([move.key for move in moves])
            return
        for move in moves:
            place: Place | None = self._core.directory.place(move.key, tier)
            if place is not None and place.slot == move.tier_slot:
                self._core.directory.withdraw(move.key, tier)

    def _tell_waiters(self, job: TransferJob, failed: bool) -> None:
        for request in self._requests.values():
            ticket = request.ticket
            if ticket is None or job.job_id not in ticket.jobs:
                continue
            ticket.jobs.discard(job.job_id)
            if failed:
                ticket.failed = True
                request.failures += 1
                if job.state is JobState.IN_DOUBT or request.failures >= self._core.config.max_load_failures:
                    request.denied.add(job.order.tier)
