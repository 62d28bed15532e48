"""A connector under watch: each call is timed and its answer looked at; after a hook, what it kept.

Owns: what was seen.  Does not own: what follows from it (``checks``), faults (``connectors.faulty``, which goes around
this).  A mover that breaks the rules of reporting raises :class:`Violation` where it does so; what a connector raises
would be swallowed by the engine, so it is noted and raised by :meth:`Watch.complain`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from ostinato.cache.keys import BlockKey
from ostinato.conformance.kept import find_kept
from ostinato.conformance.verdict import Violation
from ostinato.connectors.api import Connector, DevicePages, Mover, Site
from ostinato.connectors.forwarding import ForwardingConnector
from ostinato.ids import JobId, RequestId, Step, TierId
from ostinato.transfer.job import TransferOrder, TransferReport

SILENT_S: Final = 5.0
"""How long a question may be answered by *ask again*: the engine waits no longer."""
REMEMBERED: Final = 1 << 14
"""Orders whose reports are remembered, to tell a second one."""


class Watch:
    """What was seen of one connector.  ``looks``: walk the connector's objects after every call (slow)."""

    def __init__(self, tier: TierId, looks: bool) -> None:
        self.tier = tier
        self.looks = looks
        self.seconds: dict[str, list[float]] = defaultdict(list)
        """Duration of each call on the scheduler's or worker's thread, by the call's name."""
        self.control: list[float] = []
        """How long it took, right after each, to let other threads go first: the machine's share of the above."""
        self.kept: list[str] = []
        self.faults: list[str] = []
        self.stored = 0
        self.loaded = 0
        """Moves that were reported as done."""
        self.reports = 0
        self._silent: float | None = None

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except Violation:
            raise
        except Exception as error:
            self.faults.append(f"{name}() raised {type(error).__name__}: {error}")
            raise
        finally:
            end = time.perf_counter()
            self.seconds[name].append(end - start)
            time.sleep(0)
            self.control.append(time.perf_counter() - end)

    def answered(self, name: str, answer: Sequence[bool] | None, count: int) -> None:
        now = time.monotonic()
        if answer is None:
            if name != "probe":
                self.faults.append(f"{name}() answered None")
            self._silent = now if self._silent is None else self._silent
            if now - self._silent > SILENT_S:
                self.faults.append(f"probe() has said *ask again* for {SILENT_S:.0f} s: it must come to an answer")
            return
        self._silent = None
        if len(answer) != count:
            self.faults.append(f"{name}() answered {count} keys with {len(answer)} values")

    def look(self, roots: Sequence[object], after: str) -> None:
        if self.looks:
            self.kept += [f"after {after}: {what}" for what in find_kept(roots)]

    def complain(self) -> None:
        """Raise the first thing that was noted."""
        if self.faults:
            raise Violation(f"tier {self.tier}: {self.faults[0]}")


class WatchedConnector(ForwardingConnector):
    """``inner`` under watch."""

    def __init__(self, inner: Connector, looks: bool = False) -> None:
        super().__init__(inner)
        self.watch = Watch(inner.tier, looks)
        self.parts: list[object] = [inner]
        """The connector and its movers."""

    def open(self, site: Site) -> None:
        super().open(site)
        self.capabilities = self.inner.capabilities

    def make_mover(self, device: DevicePages, notify: Callable[[], None]) -> Mover:
        mover = self.inner.make_mover(device, notify)
        self.parts.append(mover)
        return WatchedMover(mover, self.watch)

    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        with self.watch.call("probe"):
            answer = self.inner.probe(keys)
        self.watch.answered("probe", answer, len(keys))
        self.watch.look(self.parts, "probe()")
        return answer

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        with self.watch.call("offer"):
            answer = self.inner.offer(keys)
        self.watch.answered("offer", answer, len(keys))
        self.watch.look(self.parts, "offer()")
        return answer

    def refuted(self, keys: Sequence[BlockKey]) -> None:
        with self.watch.call("refuted"):
            self.inner.refuted(keys)

    def on_admit(self, request_id: RequestId, tokens: int) -> None:
        with self.watch.call("on_admit"):
            self.inner.on_admit(request_id, tokens)
        self.watch.look(self.parts, "on_admit()")

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        with self.watch.call("on_commit"):
            self.inner.on_commit(request_id, computed)
        self.watch.look(self.parts, "on_commit()")

    def on_release(self, request_id: RequestId) -> None:
        with self.watch.call("on_release"):
            self.inner.on_release(request_id)
        self.watch.look(self.parts, "on_release()")

    def on_step_end(self, step: Step) -> None:
        with self.watch.call("on_step_end"):
            self.inner.on_step_end(step)
        self.watch.look(self.parts, "on_step_end()")


class WatchedMover:
    """One rank's mover under watch: each order is reported once, and by what it was."""

    def __init__(self, inner: Mover, watch: Watch) -> None:
        self.inner = inner
        self._watch = watch
        self._open: dict[JobId, TransferOrder] = {}
        self._ended: dict[JobId, None] = {}

    def submit(self, order: TransferOrder) -> None:
        self._open[order.job_id] = order
        with self._watch.call("submit"):
            self.inner.submit(order)

    def poll(self) -> list[TransferReport]:
        with self._watch.call("poll"):
            reports = self.inner.poll()
        for report in reports:
            self._check(report)
        return reports

    def cancel(self, job_id: JobId) -> None:
        with self._watch.call("cancel"):
            self.inner.cancel(job_id)

    def close(self) -> None:
        self.inner.close()

    def _check(self, report: TransferReport) -> None:
        tier = self._watch.tier
        if not isinstance(report, TransferReport):
            raise Violation(f"tier {tier}: poll() returned {report!r}, which is no TransferReport")
        order = self._open.pop(report.job_id, None)
        if order is None:
            again = report.job_id in self._ended
            what = "was reported a second time: one report per order" if again else "was reported, but never ordered"
            raise Violation(f"tier {tier}: job {report.job_id} {what}")
        self._ended[report.job_id] = None
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        count = len(order.moves)
        wrong = [index for index in report.failed if type(index) is not int or not 0 <= index < count]
        if wrong:
            raise Violation(
                f"tier {tier}: a report names move {wrong[0]} as failed; the order has {count} moves, from 0"
            )
        self._watch.reports += 1
        done = count - len(set(report.failed))
        if order.kind.value == "load":
            self._watch.loaded += done
        else:
            self._watch.stored += done
