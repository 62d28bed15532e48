"""The data plane's side of a step: copies, transfers, forward pass, reports.

Owns: the order of those inside a step, and the hand-over of transfer orders to the movers of their tiers.  Does not
own: what is planned, how a mover moves bytes, which threads it uses.

::

    plan -> cancel -> copies -> submit orders that may start -> forward + sample -> submit the others -> poll -> result

Thread: ``execute`` and ``wait`` on the engine's one worker thread; ``notify`` from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from ostinato.ids import JobId, Step, TierId
from ostinato.runtime.arena import Arena
from ostinato.runtime.runner import ModelRunner
from ostinato.scheduler.plan import StepPlan, StepResult
from ostinato.transfer.job import TransferOrder, TransferReport

log: Final = logging.getLogger(__name__)
T = TypeVar("T")


class MoverPort(Protocol):
    """What the worker needs of a mover (a connector's worker half)."""

    def submit(self, order: TransferOrder) -> None:
        """Take an order whose device pages may be touched from now on; returns at once."""

    def poll(self) -> Sequence[TransferReport]:
        """Reports that arrived since the last call."""

    def cancel(self, job_id: JobId) -> None:
        """Give the job up early if that is still possible; it is reported in any case."""

    def close(self) -> None:
        """Stop; nothing is touched after this returns."""


class Worker:
    """Executes step plans over one arena.

    Movers call :meth:`notify` when a report is ready.  They need ``arena`` to be built, so they may also be attached
    after the worker was made, before the first plan.
    """

    def __init__(self, runner: ModelRunner, arena: Arena, movers: Mapping[TierId, MoverPort]) -> None:
        self.arena = arena
        self._runner = runner
        self._movers = dict(movers)
        self._jobs: dict[JobId, TierId] = {}
        self._later: list[TransferOrder] = []
        self._refused: list[TransferReport] = []
        self._arrived = threading.Event()

    def attach(self, tier: TierId, mover: MoverPort) -> None:
        """Serve ``tier`` with ``mover`` from now on."""
        assert tier not in self._movers, tier
        self._movers[tier] = mover

    def notify(self) -> None:
        """A mover has a report ready: end a :meth:`wait`.  Any thread."""
        self._arrived.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until a mover notifies or ``timeout`` seconds passed; whether there is something to collect."""
        return self._arrived.wait(timeout)

    def execute(self, plan: StepPlan) -> StepResult:
        """Do everything that ``plan`` says and collect what arrived meanwhile."""
        for job_id in plan.cancelled:
            self._cancel(job_id)
        for copy in plan.copies:
            self.arena.copy(copy)
        self._later.extend(plan.transfers)
        # An order may wait for the rows of a step: of an earlier one (done), or of this one (done after the forward).
        self._submit(finished=Step(plan.step - 1))
        computed = self._runner.run(plan)
        self._submit(finished=plan.step)
        return StepResult(plan.step, computed.sampled, self._collect(), computed.prompts)

    def close(self) -> None:
        """Close all movers, also when one of them raises."""
        for tier, mover in self._movers.items():
            self._guarded(tier, mover.close)

    def _submit(self, finished: Step) -> None:
        ready = [order for order in self._later if order.after_step <= finished]
        self._later = [order for order in self._later if order.after_step > finished]
        for order in ready:
            self._jobs[order.job_id] = order.tier
            try:
                self._movers[order.tier].submit(order)
            except Exception:
                log.exception("tier %s refused job %d; its blocks are computed again", order.tier, order.job_id)
                self._refused.append(TransferReport(order.job_id, failed=tuple(range(len(order.moves)))))

    def _cancel(self, job_id: JobId) -> None:
        if (tier := self._jobs.get(job_id)) is not None:
            self._guarded(tier, lambda: self._movers[tier].cancel(job_id))

    def _collect(self) -> tuple[TransferReport, ...]:
        # Cleared before polling: a report that arrives in between sets it again and is found next time.
        self._arrived.clear()
        reports, self._refused = self._refused, []
        for tier, mover in self._movers.items():
            for report in self._guarded(tier, mover.poll) or ():
                if _is_sound(report):
                    reports.append(report)
                else:
                    log.error("the mover of tier %s reported %r, which is no report; it is ignored", tier, report)
        for report in reports:
            self._jobs.pop(report.job_id, None)
        return tuple(reports)

    def _guarded(self, tier: TierId, call: Callable[[], T]) -> T | None:
        """A mover that raises is as good as one that says nothing: its jobs run into their deadlines."""
        try:
            return call()
        except Exception:
            log.exception("the mover of tier %s failed", tier)
            return None


def _is_sound(report: Any) -> bool:
    """Movers are other people's code: what they hand over is looked at before it is believed."""
    if not isinstance(report, TransferReport):
        return False
    failed: object = report.failed
    numbers: list[object] = [report.job_id, report.rank, *(failed if isinstance(failed, tuple) else [None])]
    return all(type(number) is int for number in numbers)
