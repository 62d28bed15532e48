"""A worker of virtual time: it carries out step plans by looking at the clock.

Owns: the simulated clock, how long a step takes, when a transfer has ended.  Does not own: what is planned.  There are
no bytes.  Each tier has one link per direction, which moves one order after the other.
"""

from __future__ import annotations

import heapq

from ostinato.ids import TierId
from ostinato.scheduler.plan import SampledToken, StepPlan, StepResult
from ostinato.simulate.machine import Link, Machine
from ostinato.simulate.shapes import ModelShape
from ostinato.transfer.job import JobKind, TransferOrder, TransferReport


class VirtualClock:
    """Seconds since the trace began."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class VirtualWorker:
    """Executes plans of one engine with the speeds of ``machine``."""

    def __init__(self, shape: ModelShape, machine: Machine, clock: VirtualClock) -> None:
        self._shape = shape
        self._machine = machine
        self._clock = clock
        self._free_at: dict[tuple[TierId, JobKind], float] = {}
        self._under_way: list[tuple[float, int, TransferReport]] = []
        self.computed_tokens = 0
        self.flops = 0.0
        self.busy_s = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        """Advances the clock by the step; reports are those of transfers that ended meanwhile."""
        flops, shape, began = 0.0, self._shape, self._clock.now
        for sequence in plan.sequences:
            count = len(sequence.tokens)
            flops += shape.flops(sequence.start, sequence.start + count)
            self.computed_tokens += count
        seconds = self._machine.step_seconds(shape, flops, len(plan.sequences))
        self.flops += flops
        self.busy_s += seconds
        self._clock.now = began + seconds
        for order in plan.transfers:
            # A store reads what this step computes.
            self._submit(order, self._clock.now if order.kind is JobKind.STORE else began)
        sampled = tuple(SampledToken(item.request_id, 0) for item in plan.sequences if item.sample)
        return StepResult(plan.step, sampled, self._reports())

    def next_report(self) -> float | None:
        """When the next transfer ends, if one is under way."""
        return self._under_way[0][0] if self._under_way else None

    def _submit(self, order: TransferOrder, now: float) -> None:
        link = self._machine.links.get(order.tier) or Link(float("inf"))
        begin = max(now, self._free_at.get((order.tier, order.kind), 0.0))
        end = begin + link.latency + order.total_bytes / link.bandwidth
        self._free_at[order.tier, order.kind] = end
        report = TransferReport(order.job_id, moved_bytes=order.total_bytes, seconds=end - now)
        heapq.heappush(self._under_way, (end, order.job_id, report))

    def _reports(self) -> tuple[TransferReport, ...]:
        reports = []
        while self._under_way and self._under_way[0][0] <= self._clock.now:
            reports.append(heapq.heappop(self._under_way)[2])
        return tuple(reports)
