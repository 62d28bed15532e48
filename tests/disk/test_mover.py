"""The worker half: batches, cancellation, closing; and many threads on one small store."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from disk.support import CLEAR, close, get, key, open_path, payload, put
from ostinato.connectors.disk.codec import Item
from ostinato.connectors.disk.mover import BATCH_RECORDS, DiskMover
from ostinato.ids import HOLE, JobId, Ordinal, SlotId, Step, TierId
from ostinato.transfer.job import JobKind, Move, TransferOrder, TransferReport


class Pages:
    def __init__(self, count: int, size: int) -> None:
        self.pages = torch.zeros((count, size), dtype=torch.uint8)

    def copy(self, source: object, target: object, source_index: Sequence[int], target_index: Sequence[int]) -> None:
        raise AssertionError


class Scripted:
    """``gate``: calls wait for it."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[int] = []
        self.error: Exception | None = None

    def write(self, items: Sequence[Item]) -> list[bool]:
        self.calls.append(len(items))
        self.gate.wait()
        if self.error is not None:
            raise self.error
        return [item.ordinal % 2 == 0 for item in items]

    read = write


def order(kind: JobKind, count: int, job: int = 1, length: int = 64) -> TransferOrder:
    moves = tuple(Move(key(n), Ordinal(n), SlotId(n % 8), HOLE, 0, length) for n in range(count))
    return TransferOrder(JobId(job), kind, TierId("disk"), moves, Step(1))


def wait(mover: DiskMover) -> TransferReport:
    deadline = time.monotonic() + 10
    while True:
        for report in mover.poll():
            return report
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_batches_and_failures_are_reported_once() -> None:
    told = threading.Event()
    store = Scripted()
    mover = DiskMover(Pages(8, 64), told.set, store, 5.0)
    mover.submit(order(JobKind.STORE, BATCH_RECORDS + 10))
    report = wait(mover)
    assert told.is_set()
    assert store.calls == [BATCH_RECORDS, 10]
    assert report.failed == tuple(range(1, BATCH_RECORDS + 10, 2))
    store.error = RuntimeError("broken")
    mover.submit(order(JobKind.LOAD, 3, job=2))
    assert wait(mover).failed == (0, 1, 2)
    store.error = None
    mover.submit(order(JobKind.LOAD, 3, job=3))
    assert wait(mover).failed == (1,)
    mover.close()
    assert mover.poll() == []


def test_a_load_does_not_wait_for_a_store() -> None:
    class Half(Scripted):
        def read(self, items: Sequence[Item]) -> list[bool]:
            return [True] * len(items)

    store = Half()
    store.gate.clear()
    mover = DiskMover(Pages(8, 64), lambda: None, store, 5.0)
    mover.submit(order(JobKind.STORE, 1, job=1))
    mover.submit(order(JobKind.LOAD, 1, job=2))
    assert wait(mover).job_id == 2
    store.gate.set()
    assert wait(mover).job_id == 1
    mover.close()


def test_cancel_and_close_give_up_what_was_not_begun() -> None:
    store = Scripted()
    store.gate.clear()
    mover = DiskMover(Pages(8, 64), lambda: None, store, 0.1)
    mover.submit(order(JobKind.STORE, 2 * BATCH_RECORDS, job=1))
    mover.submit(order(JobKind.STORE, 4, job=2))
    mover.cancel(JobId(2))
    threading.Timer(0.3, store.gate.set).start()
    mover.close()
    reports = {report.job_id: report for report in mover.poll()}
    assert len(reports[JobId(1)].failed) == BATCH_RECORDS + BATCH_RECORDS // 2
    assert reports[JobId(2)].failed == (0, 1, 2, 3)
    assert store.calls == [BATCH_RECORDS]


def test_bytes_go_to_their_pages(tmp_path: Path) -> None:
    store = open_path(tmp_path / "kv")

    class Bound:
        def write(self, items: Sequence[Item]) -> list[bool]:
            return store.write(CLEAR, items)

        def read(self, items: Sequence[Item]) -> list[bool]:
            return store.read(CLEAR, items)

    device = Pages(8, 4096)
    mover = DiskMover(device, lambda: None, Bound(), 5.0)
    moves = []
    for n in range(8):
        offset = 64 * n
        device.pages[n, offset : offset + 3000] = torch.frombuffer(bytearray(payload(n)), dtype=torch.uint8)
        moves.append(Move(key(n), Ordinal(n), SlotId(n), HOLE, offset, 3000))
    mover.submit(TransferOrder(JobId(1), JobKind.STORE, TierId("disk"), tuple(moves), Step(1)))
    assert wait(mover).failed == ()
    device.pages.fill_(7)
    back = [Move(m.key, m.ordinal, SlotId(7 - m.device_slot), HOLE, 128, 3000) for m in moves]
    mover.submit(TransferOrder(JobId(2), JobKind.LOAD, TierId("disk"), tuple(back), Step(1)))
    assert wait(mover).failed == ()
    for n in range(8):
        assert bytes(device.pages[7 - n, 128:3128].numpy()) == payload(n)
    outside = torch.cat([device.pages[:, :128], device.pages[:, 3128:]], dim=1)
    assert bool((outside == 7).all()), "nothing is written beside a unit"
    mover.close()
    close(store)


def test_many_threads_on_a_small_store(tmp_path: Path) -> None:
    store = open_path(tmp_path / "kv", 2 << 20)
    store.start()
    stop = time.monotonic() + 3
    failures: list[BaseException] = []
    hits = [0]

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while time.monotonic() < stop:
                first, length = rng.randrange(800), rng.choice((3000, 9000))
                some = list(range(first, first + rng.randint(1, 40)))
                if seed % 2:
                    put(store, some, length, group=length)
                else:
                    hits[0] += len(get(store, some, length, group=length))
                if rng.random() < 0.05:
                    store.flush()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert hits[0]
    assert store.space.evictions
    assert not store.stats.faults
    assert not any(slab.busy for slab in store.catalog.slabs.values())
    for slab in store.catalog.slabs.values():
        held = [entry for entry in store.catalog.index if entry.slab is slab]
        assert slab.slots - slab.free == sum(slab.used) == len(held)
    close(store)
