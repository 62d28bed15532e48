"""A process that stores records until it is killed; run by the crash tests.  ``writer.py DIR BUDGET SEED KILL_AT``.

It prints the numbers of the records that a sync acknowledged, and kills itself before its KILL_AT-th call of the
operating system (0: it goes on until somebody kills it).
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from disk.support import open_store, put
from ostinato.connectors.disk import files
from ostinato.connectors.disk.files import Access, Buffer, OsFile, OsFolder


class Countdown:
    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


class DoomedFile(OsFile):
    def __init__(self, descriptor: int, count: Countdown) -> None:
        super().__init__(descriptor)
        self._count = count

    def write(self, buffers: Sequence[Buffer], offset: int) -> None:
        self._count()
        if self._count.left == 1 and len(buffers) > 1:  # killed in the middle of a write
            super().write(buffers[: len(buffers) // 2], offset)
            self._count()
        super().write(buffers, offset)

    def sync(self) -> None:
        self._count()
        super().sync()

    def allocate(self, size: int) -> None:
        self._count()
        super().allocate(size)

    def truncate(self, size: int) -> None:
        self._count()
        super().truncate(size)


class DoomedFolder(OsFolder):
    def __init__(self, path: str, count: Countdown) -> None:
        super().__init__(path)
        self._count = count

    def open(self, name: str, access: Access, direct: bool = False) -> OsFile:
        self._count()
        descriptor = super().open(name, access, direct)._fd
        return DoomedFile(descriptor, self._count)

    def replace(self, old: str, new: str) -> None:
        self._count()
        super().replace(old, new)

    def remove(self, name: str) -> None:
        self._count()
        super().remove(name)

    def sync(self) -> None:
        self._count()
        super().sync()


def main(path: str, budget: int, seed: int, kill_at: int) -> None:
    rng = random.Random(seed)
    store = open_store(DoomedFolder(path, Countdown(kill_at)), budget)
    if rng.random() < 0.5:
        store.start()
    number = seed * 100_000
    while True:
        count = rng.randint(1, 40)
        put(store, range(number, number + count))
        number += count
        if rng.random() < 0.5:
            store.flush()
            print("durable", number, flush=True)


if __name__ == "__main__":
    assert "torch" not in sys.modules
    assert files.MAX_BUFFERS
    main(sys.argv[1], *map(int, sys.argv[2:]))
