"""Every transfer that is under way: its leases, its deadline, who has reported.

Owns: jobs from order to last report; the leases they hold.  Does not own: what a result means for keys and requests
(``hierarchy``), moving bytes (movers).  Invariants: a job's leases are released exactly once, when no mover can touch
the slots any more; a report for a job that is not open is counted and dropped.  Thread: the scheduler's only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ostinato.cache.pool import Lease
from ostinato.ids import JobId, SlotId, TierId
from ostinato.observe.counts import FlowCounts
from ostinato.transfer.job import JobKind, JobState, TransferJob, TransferOrder, TransferReport


@dataclass(slots=True)
class BookStats:
    """Totals since start."""

    bytes_loaded: int = 0
    bytes_stored: int = 0
    late_reports: int = 0
    duplicate_reports: int = 0
    in_doubt: int = 0
    revoked: int = 0
    failed_moves: int = 0


class Book:
    """Open jobs.  ``world_size``: worker ranks that must all report before a job is closed."""

    def __init__(self, world_size: int = 1) -> None:
        self.stats = BookStats()
        self.flows: defaultdict[tuple[JobKind, TierId], FlowCounts] = defaultdict(FlowCounts)
        self.world_size = world_size
        self._open: dict[JobId, TransferJob] = {}
        self._queue: dict[JobId, TransferJob] = {}
        self._stored: Counter[SlotId] = Counter()
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[TransferJob]:
        return iter(self._open.values())

    @property
    def stored_slots(self) -> Mapping[SlotId, int]:
        """Device slots that open stores read, and how many do."""
        return self._stored

    def new_id(self) -> JobId:
        """Ids are never used twice, so that a late report cannot be taken for another job's."""
        self._next_id += 1
        return JobId(self._next_id)

    def open(self, order: TransferOrder, device: Lease, tier: Lease | None, patience: float) -> TransferJob:
        """Queue a job that owns both leases from now on."""
        job = TransferJob(order, device, tier, patience)
        self._open[order.job_id] = self._queue[order.job_id] = job
        if order.kind is JobKind.STORE:
            self._stored.update(list(device.slots))
        return job

    def get(self, job_id: JobId) -> TransferJob | None:
        return self._open.get(job_id)

    def dispatch(self, now: float) -> tuple[TransferOrder, ...]:
        """Orders that go to the movers with the next plan; their deadlines begin."""
        jobs, self._queue = self._queue, {}
        for job in jobs.values():
            job.state, job.deadline = JobState.STARTED, now + job.patience
        return tuple(job.order for job in jobs.values())

    def report(self, report: TransferReport) -> TransferJob | None:
        """Note one rank's report; the job, closed and with its leases still held, when it was the last one due.

        Ranks are joined: a move has failed when it failed anywhere.
        """
        job = self._open.get(report.job_id)
        if job is None or job.state is JobState.QUEUED:
            self.stats.late_reports += 1
            return None
        if report.rank in job.reported or not 0 <= report.rank < self.world_size:
            self.stats.duplicate_reports += 1
            return None
        job.reported.add(report.rank)
        job.failed.update(index for index in report.failed if 0 <= index < len(job.order.moves))
        if len(job.reported) < self.world_size:
            return None
        self._close(job)
        self._count(job, report.seconds)
        if job.state is JobState.STARTED:
            job.state = JobState.FAILED if job.failed else JobState.DONE
        return job

    def _close(self, job: TransferJob) -> None:
        del self._open[job.job_id]
        if job.order.kind is JobKind.STORE:
            for slot in job.device_lease.slots:
                self._stored[slot] -= 1
                if not self._stored[slot]:
                    del self._stored[slot]

    def _count(self, job: TransferJob, seconds: float) -> None:
        self.stats.failed_moves += len(job.failed)
        moved = sum(move.length for index, move in enumerate(job.order.moves) if index not in job.failed)
        flow = self._flow(job)
        flow.bytes += moved
        flow.units += len(job.order.moves) - len(job.failed)
        flow.failed += len(job.failed)
        flow.seconds.add(seconds)
        if job.order.kind is JobKind.LOAD:
            self.stats.bytes_loaded += moved
        else:
            self.stats.bytes_stored += moved

    def _flow(self, job: TransferJob) -> FlowCounts:
        return self.flows[job.order.kind, job.order.tier]

    def expire(self, now: float) -> list[TransferJob]:
        """Jobs whose deadline has passed: IN_DOUBT, slots in quarantine until the last report arrives."""
        expired = [job for job in self._open.values() if job.state is JobState.STARTED and job.deadline <= now]
        for job in expired:
            job.state = JobState.IN_DOUBT
            self.stats.in_doubt += 1
            self._flow(job).late += len(job.order.moves)
            for lease in (job.device_lease, job.tier_lease):
                if lease is not None:
                    lease.quarantine()
        return expired

    def revoke(self, kind: JobKind) -> list[TransferJob]:
        """Take back the queued jobs of ``kind``: no mover has seen them.  The caller releases their leases."""
        revoked = [job for job in self._queue.values() if job.order.kind is kind]
        for job in revoked:
            del self._queue[job.job_id]
            self._close(job)
            job.state = JobState.REVOKED
            self.stats.revoked += 1
            self._flow(job).revoked += len(job.order.moves)
        return revoked


def release(job: TransferJob) -> None:
    """End a closed job's claims.  No fence: its mover is quiet."""
    job.device_lease.release()
    if job.tier_lease is not None:
        job.tier_lease.release()
