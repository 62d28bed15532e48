"""The smallest honest connector with a mover of its own, and one for each way to break the contract."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from ostinato.cache.keys import BlockKey
from ostinato.connectors.api import Capabilities, Connector, DevicePages, Hook, Ownership, Site
from ostinato.connectors.context import KVConnectorSchedulerContext, Pin
from ostinato.ids import HOLE, JobId, RequestId, Step, TierId
from ostinato.transfer.job import JobKind, Move, TransferOrder, TransferReport

Shelf = dict[Any, bytes]
"""What outlives a connector."""


class ShelfMover:
    """One thread.  Everything that a broken one does otherwise is a method."""

    def __init__(self, connector: ShelfConnector, device: DevicePages, notify: Callable[[], None]) -> None:
        self.connector = connector
        self.device = device
        self.notify = notify
        self.reports: deque[TransferReport] = deque()
        self.queue: SimpleQueue[TransferOrder | None] = SimpleQueue()
        self.thread = threading.Thread(target=self.run, name="shelf", daemon=True)
        self.thread.start()

    def submit(self, order: TransferOrder) -> None:
        self.queue.put(order)

    def poll(self) -> list[TransferReport]:
        return [self.reports.popleft() for _ in range(len(self.reports))]

    def cancel(self, job_id: JobId) -> None: ...

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join()

    def run(self) -> None:
        while (order := self.queue.get()) is not None:
            self.carry_out(order)

    def carry_out(self, order: TransferOrder) -> None:
        self.report(order, tuple(index for index, move in enumerate(order.moves) if not self.move(order.kind, move)))

    def report(self, order: TransferOrder, failed: tuple[int, ...]) -> None:
        self.reports.append(TransferReport(order.job_id, failed=failed, moved_bytes=order.total_bytes))
        self.notify()

    def span(self, move: Move) -> Any:
        return self.device.pages[move.device_slot, move.offset : move.offset + move.length]

    def move(self, kind: JobKind, move: Move) -> bool:
        shelf, name = self.connector.shelf, self.connector.name(move.key)
        if kind is JobKind.STORE:
            shelf[name] = self.span(move).numpy().tobytes()
            return True
        if (found := shelf.get(name)) is None:
            return False
        self.span(move).numpy()[:] = memoryview(found)
        return True


class ShelfConnector(Connector):
    mover: type[ShelfMover] = ShelfMover
    hooks: Iterable[Hook] = ()

    def __init__(self, shelf: Shelf) -> None:
        self.capabilities = Capabilities(TierId("shelf"), Ownership.KEPT, hooks=frozenset(self.hooks))
        self.shelf = shelf
        self.context: Any = None

    def open(self, site: Site) -> None:
        self.site = site

    def name(self, key: BlockKey) -> Any:
        return self.site.identity.namespace, key.group, key.digest

    def make_mover(self, device: DevicePages, notify: Callable[[], None]) -> ShelfMover:
        return self.mover(self, device, notify)

    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        return [self.name(key) in self.shelf for key in keys]

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return [self.name(key) not in self.shelf for key in keys]

    def refuted(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self.shelf.pop(self.name(key), None)

    def bind(self, context: KVConnectorSchedulerContext) -> None:
        self.context = context


def with_mover(name: str, **methods: Any) -> type[ShelfConnector]:
    return type(name, (ShelfConnector,), {"mover": type(f"{name}Mover", (ShelfMover,), methods)})


# ------------------------------------------------------------------------------------------------------ broken movers


def _twice(self: ShelfMover, order: TransferOrder, failed: tuple[int, ...]) -> None:
    for _ in range(2):
        ShelfMover.report(self, order, failed)


def _no_report_of_stores(self: ShelfMover, order: TransferOrder) -> None:
    if order.kind is JobKind.LOAD:
        ShelfMover.carry_out(self, order)


def _early(self: ShelfMover, order: TransferOrder) -> None:
    self.report(order, ())
    time.sleep(0.02)
    for move in order.moves:
        self.move(order.kind, move)


def _all_well(self: ShelfMover, order: TransferOrder, failed: tuple[int, ...]) -> None:
    ShelfMover.report(self, order, ())


def _sloppy(self: ShelfMover, kind: JobKind, move: Move) -> bool:
    """Reads a byte too few."""
    done = ShelfMover.move(self, kind, move)
    if kind is JobKind.LOAD and done:
        self.span(move)[-1] = 0
    return done


def _neighbour(self: ShelfMover, kind: JobKind, move: Move) -> bool:
    """Writes beyond the unit, into the next page."""
    done = ShelfMover.move(self, kind, move)
    if kind is JobKind.LOAD:
        self.device.pages[move.device_slot - 1, :3] = 7
    return done


def _foreign(self: ShelfMover, order: TransferOrder, failed: tuple[int, ...]) -> None:
    ShelfMover.report(self, replace(order, job_id=JobId(order.job_id + 10_000)), failed)


def _silent(self: ShelfMover, order: TransferOrder, failed: tuple[int, ...]) -> None:
    self.reports.append(TransferReport(order.job_id, failed=failed))


def _no_such_move(self: ShelfMover, order: TransferOrder, failed: tuple[int, ...]) -> None:
    ShelfMover.report(self, order, (*failed, len(order.moves)))


def _runs_on(self: ShelfMover) -> None:
    """Does not wait for its thread, which does not end."""


def _hangs(self: ShelfMover) -> None:
    time.sleep(2)
    ShelfMover.close(self)


def _slow_submit(self: ShelfMover, order: TransferOrder) -> None:
    ShelfMover.carry_out(self, order)
    time.sleep(0.03)


def _raises(self: ShelfMover, job_id: JobId) -> None:
    raise KeyError(job_id)


def _forgets_cancelled(self: ShelfMover, job_id: JobId) -> None:
    self.carry_out = lambda order: None  # type: ignore[method-assign]


ReportsTwice = with_mover("ReportsTwice", report=_twice)
NeverReports = with_mover("NeverReports", carry_out=_no_report_of_stores)
ReportsEarly = with_mover("ReportsEarly", carry_out=_early)
HidesFailures = with_mover("HidesFailures", report=_all_well)
CutsShort = with_mover("CutsShort", move=_sloppy)
WritesOutside = with_mover("WritesOutside", move=_neighbour)
ReportsOthers = with_mover("ReportsOthers", report=_foreign)
NotifiesNobody = with_mover("NotifiesNobody", report=_silent)
FailsUnknownMoves = with_mover("FailsUnknownMoves", report=_no_such_move)
LeavesThreads = with_mover("LeavesThreads", close=_runs_on)
HangsOnClose = with_mover("HangsOnClose", close=_hangs)
BlocksTheWorker = with_mover("BlocksTheWorker", submit=_slow_submit)
RaisesOnCancel = with_mover("RaisesOnCancel", cancel=_raises)
ForgetsCancelled = with_mover("ForgetsCancelled", cancel=_forgets_cancelled)


# -------------------------------------------------------------------------------------------------- broken connectors


class IgnoresNamespace(ShelfConnector):
    """Names records by their place alone, as if there were one model and one prompt."""

    def name(self, key: BlockKey) -> Any:
        return key.group


class ClaimsAll(ShelfConnector):
    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        return [True] * len(keys)


class NeverDelivers(ShelfConnector):
    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        return [False] * len(keys)


class NeverAnswers(ShelfConnector):
    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        return None


class AnswersTooFew(ShelfConnector):
    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return [True] * (len(keys) - 1)


class RaisesOnProbe(ShelfConnector):
    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        raise RuntimeError("no connection")


class ForgetsAtRestart(ShelfConnector):
    def __init__(self, shelf: Shelf) -> None:
        super().__init__({})


class BlocksTheScheduler(ShelfConnector):
    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        time.sleep(0.03)
        return super().probe(keys)


class GrowsPerRequest(ShelfConnector):
    hooks = (Hook.COMMIT,)
    notes: list[Any]

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        self.seen = [*getattr(self, "seen", ()), (request_id, bytes(500))]


class KeepsViews(ShelfConnector):
    hooks = (Hook.COMMIT,)

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        self.views = self.context.blocks(request_id)


class KeepsSlots(ShelfConnector):
    hooks = (Hook.COMMIT,)

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        self.rows = {request_id: [list(view) for view in self.context.blocks(request_id)]}


class KeepsPins(ShelfConnector):
    hooks = (Hook.COMMIT,)
    pin: Pin | None = None

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        if self.pin is None:
            self.pin = self.context.pin(slot for slot in self.context.blocks(request_id, 0) if slot != HOLE)


class RaisesInHook(ShelfConnector):
    hooks = (Hook.STEP_END,)

    def on_step_end(self, step: Step) -> None:
        raise RuntimeError("not now")


class CannotCloseUnopened(ShelfConnector):
    def close(self) -> None:
        self.site  # noqa: B018


class OneMoverOnly(ShelfConnector):
    made = False

    def make_mover(self, device: DevicePages, notify: Callable[[], None]) -> ShelfMover:
        if self.made:
            raise RuntimeError("one worker only")
        self.made = True
        return super().make_mover(device, notify)


class SharesReports(ShelfConnector):
    """All ranks' movers put their reports into one queue."""

    def make_mover(self, device: DevicePages, notify: Callable[[], None]) -> ShelfMover:
        mover = super().make_mover(device, notify)
        self.reports = getattr(self, "reports", mover.reports)
        mover.reports = self.reports
        return mover


class MixesUpWhenFull(ShelfConnector):
    """Puts a new record in the place of an old one, and still finds it by the old name."""

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        if len(self.shelf) > 80:
            for old in list(self.shelf)[:40]:
                self.shelf[old] = bytes(len(self.shelf[old]))
        return super().offer(keys)


def _waits_for_work(self: ShelfMover) -> None:
    time.sleep(0.8)
    ShelfMover.close(self)


WaitsForWork = with_mover("WaitsForWork", close=_waits_for_work)


BROKEN: dict[type[ShelfConnector], str] = {
    ReportsTwice: "delivers_what_was_stored",
    ReportsEarly: "survives_much_traffic",
    HidesFailures: "takes_lies_for_misses",
    CutsShort: "delivers_what_was_stored",
    WritesOutside: "delivers_what_was_stored",
    ReportsOthers: "delivers_what_was_stored",
    NotifiesNobody: "delivers_what_was_stored",
    FailsUnknownMoves: "delivers_what_was_stored",
    LeavesThreads: "closes_in_time",
    HangsOnClose: "closes_in_time",
    BlocksTheWorker: "never_blocks",
    RaisesOnCancel: "reports_what_is_cancelled",
    IgnoresNamespace: "keeps_namespaces_apart",
    ClaimsAll: "knows_only_its_keys",
    NeverDelivers: "delivers_what_was_stored",
    AnswersTooFew: "delivers_what_was_stored",
    RaisesOnProbe: "delivers_what_was_stored",
    ForgetsAtRestart: "outlives_a_restart",
    BlocksTheScheduler: "never_blocks",
    GrowsPerRequest: "keeps_bounded_memory",
    KeepsViews: "keeps_no_blocks",
    KeepsSlots: "keeps_no_blocks",
    KeepsPins: "keeps_no_blocks",
    RaisesInHook: "gets_hooks_only_if_declared",
    CannotCloseUnopened: "starts_and_stops",
    OneMoverOnly: "serves_two_workers",
    SharesReports: "serves_two_workers",
    MixesUpWhenFull: "evicts_when_full",
    WaitsForWork: "closes_without_work",
}
"""The check that must find each of them, by itself."""
SLOW: dict[type[ShelfConnector], str] = {
    NeverReports: "delivers_what_was_stored",
    NeverAnswers: "knows_only_its_keys",
    ForgetsCancelled: "reports_what_is_cancelled",
}
"""Found by waiting for what does not come."""
