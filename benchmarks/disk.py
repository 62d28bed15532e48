"""Speed of the disk tier against the best plain loop of vectored calls on the same files, and time to open.

    python benchmarks/disk.py [--folder DIR] [--bytes 512MiB] [--records 100000]

Per record size and mode (through the page cache, past it): stores with trailer and checksum, loads with every check,
warm and cold (pages dropped first).  The plain loop moves the same bytes between the same memory and the same places
of the same files, in the best of three sizes of calls, and checks nothing.  The best of alternating runs of each.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ostinato.cache.keys import BlockKey
from ostinato.connectors.disk.codec import Clear, Item
from ostinato.connectors.disk.files import Access, OsFolder
from ostinato.connectors.disk.format import LOCK_NAME, FileName, slot_bytes
from ostinato.connectors.disk.store import DiskStore
from ostinato.connectors.record import RecordIdentity
from ostinato.connectors.registry import parse_bytes
from ostinato.ids import GroupId

CODEC = Clear(RecordIdentity(b"L" * 32, b"N" * 32))
ROUNDS = 8
CALLS = (1 << 20, 4 << 20, 16 << 20)


def make_items(count: int, length: int) -> list[Item]:
    """Units side by side in one piece of memory, as in a device pool."""
    memory = memoryview(mmap.mmap(-1, count * length))
    block = os.urandom(1 << 20)
    for start in range(0, len(memory), len(block)):
        part = memory[start : start + len(block)]
        part[:] = block[: len(part)]
    return [
        Item(BlockKey(GroupId(0), hashlib.sha256(b"%d" % n).digest()), n, memory[n * length : (n + 1) * length])
        for n in range(count)
    ]


Times = tuple[float, float]
"""Seconds on the clock, and of the processor: the second shows less of what else the machine does."""


def timed(call: Callable[[], object]) -> Times:
    start, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - cpu


def drop_pages(store: DiskStore, path: Path) -> None:
    for slab in store.catalog.slabs.values():
        name = path / str(FileName("slab", slab.number, slab.slot_bytes))
        descriptor = os.open(name, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def plain(store: DiskStore, folder: OsFolder, items: list[Item], write: bool, per_call: int) -> Callable[[], None]:
    """The loop to beat: the same slots, as many per call as ``per_call`` bytes hold; device order is slot order."""
    entries = [store.catalog.index.get(CODEC.name(item.key)) for item in items]
    direct = store.files.direct
    runs: list[tuple[int, int, list[int]]] = []
    for number, entry in enumerate(entries):
        assert entry is not None
        size = entry.slab.slot_bytes
        last = runs[-1] if runs else None
        follows = last is not None and last[0] == entry.slab.number and last[1] + len(last[2]) == entry.slot
        if follows and (len(runs[-1][2]) + 1) * size <= per_call and len(runs[-1][2]) < 500:
            runs[-1][2].append(number)
        else:
            runs.append((entry.slab.number, entry.slot, [number]))
    size = slot_bytes(len(items[0].payload), direct)
    files = {
        number: folder.open(str(FileName("slab", number, size)), Access.WRITE, direct=direct)
        for number in {run[0] for run in runs}
    }
    rest = [memoryview(bytearray(size - len(items[0].payload))) for _ in range(512)]
    bounce = memoryview(mmap.mmap(-1, max(per_call, size)))

    def go() -> None:
        for slab, first, numbers in runs:
            if direct:
                buffers = [bounce[: len(numbers) * size]]
            else:
                buffers = [part for place, n in enumerate(numbers) for part in (items[n].payload, rest[place])]
            pairs = [(items[n].payload, place * size) for place, n in enumerate(numbers)] if direct else []
            if write:
                for payload, place in pairs:
                    bounce[place : place + len(payload)] = payload
                files[slab].write(buffers, first * size)
            else:
                files[slab].read(buffers, first * size)
                for payload, place in pairs:
                    payload[:] = bounce[place : place + len(payload)]

    return go


def measure(path: Path, total: int, length: int, direct: bool) -> None:
    items = make_items(total // length, length)
    folder = OsFolder(str(path))
    assert folder.lock(LOCK_NAME)
    store = DiskStore(folder, 4 * total, direct=direct)
    store.write(CODEC, items)  # makes the files
    store.flush()
    times: dict[str, list[list[Times]]] = {name: [[], [], [], []] for name in ("store", "load warm", "load cold")}

    def again() -> None:
        store.write(CODEC, items)

    def load() -> None:
        assert all(store.read(CODEC, items))

    for _ in range(ROUNDS):
        for number, per_call in enumerate(CALLS):
            times["store"][number + 1].append(timed(plain(store, folder, items, True, per_call)))
        store.drop(list(store.catalog.index))
        times["store"][0].append(timed(again))
        store.flush()
        for name in ("load warm", "load cold"):
            calls = [load, *(plain(store, folder, items, False, per_call) for per_call in CALLS)]
            for number, call in enumerate(calls):
                if name == "load cold":
                    drop_pages(store, path)
                times[name][number].append(timed(call))
    for name, (ours_all, *plain_all) in times.items():
        ours, best = min(ours_all)[0], min(map(min, plain_all))[0]
        cpu = min(cpu for rows in plain_all for _, cpu in rows) / min(cpu for _, cpu in ours_all)
        mode = "direct" if store.files.direct else "buffered"
        speeds = f"{total / ours / 1e9:6.2f} GB/s, plain {total / best / 1e9:6.2f}, ratio {best / ours:5.2f}"
        speeds += f" (processor time {cpu:4.2f})"
        print(f"{length >> 10:6d} KiB {mode:9s} {name:10s} {speeds}")
    store.close()
    folder.close()
    shutil.rmtree(path)


def measure_opening(path: Path, records: int) -> None:
    length = 64
    folder = OsFolder(str(path))
    assert folder.lock(LOCK_NAME)
    store = DiskStore(folder, records * 5000 + (8 << 20))
    items = make_items(records, length)
    for start in range(0, records, 1000):
        store.write(CODEC, items[start : start + 1000])
    store.flush()
    for kind in ("log and snapshot", "snapshot"):
        store._journal.close() if kind != "snapshot" else store.close()
        times = []
        for _ in range(3):
            start = time.perf_counter()
            store = DiskStore(folder, records * 5000 + (8 << 20))
            times.append(time.perf_counter() - start)
            assert len(store.catalog.index) == records
            store._journal.close()
        store = DiskStore(folder, records * 5000 + (8 << 20))
        store._touched = True
        print(f"open {records} records ({kind}): {statistics.median(times):.2f} s")
    store.close()
    folder.close()
    shutil.rmtree(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--bytes", default="256MiB")
    parser.add_argument("--records", type=int, default=100_000)
    options = parser.parse_args()
    path = Path(options.folder) / f"ostinato-disk-bench-{os.getpid()}"
    try:
        for length in (64 << 10, 1 << 20, 4 << 20):
            for direct in (False, True):
                measure(path, parse_bytes(options.bytes), length, direct)
        measure_opening(path, options.records)
    finally:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
