"""Loss of power at any operation: nothing wrong is ever found, what was acknowledged is, the budget holds."""

from __future__ import annotations

import contextlib
import errno
import os
import random

import pytest

from disk.simulated import PowerLoss, SimulatedFolder
from disk.support import CLEAR, get, key, open_store, put
from ostinato.connectors.disk.index import Entry
from ostinato.connectors.disk.store import DiskStore

BUDGET = 1 << 20
LENGTHS = (3000, 9000)
NUMBERS = 600


class Run:
    """A random life of one store.  ``durable``: the entries that the last sync acknowledged."""

    def __init__(self, folder: SimulatedFolder, rng: random.Random, budget: int = BUDGET) -> None:
        self.folder = folder
        self.rng = rng
        self.durable: list[Entry] = []
        self.store: DiskStore | None = None
        self.budget = budget

    def live(self, steps: int) -> None:
        self.store = open_store(self.folder, self.budget, clock=lambda: self.folder.operations / 20)
        for _ in range(steps):
            group, first = self.rng.randrange(2), self.rng.randrange(NUMBERS)
            some = range(first, first + self.rng.randint(1, 25))
            match self.rng.randrange(6):
                case 0 | 1 | 2:
                    put(self.store, some, LENGTHS[group], group=group)
                case 3:
                    get(self.store, list(some), LENGTHS[group], group=group)
                case _:
                    self.store.flush()
                    self.durable = list(self.store.catalog.index)
        self.store.close()
        self.durable = list(self.store.catalog.index)

    def acknowledged(self) -> set[bytes]:
        """Acknowledged, and not evicted since."""
        return {e.name for e in self.durable if self.store is not None and self.store.catalog.index.get(e.name) is e}


def everything(store: DiskStore) -> set[bytes]:
    """Names of all records that can be loaded; each is compared with what was stored."""
    found = set()
    for group, length in enumerate(LENGTHS):
        hits = get(store, list(range(NUMBERS + 25)), length, group=group)
        found |= {CLEAR.name(key(number, group)) for number in hits}
    return found


def cut_power(folder: SimulatedFolder, at: int) -> None:
    start = folder.operations

    def check(what: str) -> None:
        if folder.operations - start >= at:
            raise PowerLoss

    folder.on_operation = check


def lose_power(seed: int) -> None:
    rng = random.Random(seed)
    folder = SimulatedFolder(BUDGET)
    for _ in range(3):
        run = Run(folder, rng)
        cut_power(folder, rng.choice((rng.randint(1, 60), rng.randint(1, 600))))
        with contextlib.suppress(PowerLoss):
            run.live(rng.randint(5, 120))
        wanted = run.acknowledged()
        folder = folder.after_crash(rng)
        store = open_store(folder, BUDGET)
        found = everything(store)
        assert wanted <= found, f"{len(wanted - found)} of {len(wanted)} acknowledged records are lost"
        store.close()
        assert folder.total() <= BUDGET


@pytest.mark.parametrize("seed", range(100))
def test_loss_of_power(seed: int) -> None:
    lose_power(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 3000))
def test_loss_of_power_at_length(seed: int) -> None:
    lose_power(seed)


@pytest.mark.parametrize("seed", range(40))
def test_a_failing_disk_costs_hits_only(seed: int) -> None:
    """From some operation on, some kind of call fails, for good or for a while."""
    rng = random.Random(seed)
    folder = SimulatedFolder(BUDGET)
    kinds = rng.sample(["write", "sync", "allocate", "read", "replace", "sync folder", "open", "remove"], 2)
    number = rng.choice((errno.ENOSPC, errno.EROFS, errno.EIO))
    begin = rng.randint(20, 200)
    end = begin + rng.choice((1, 10, 10_000))

    def fail(what: str) -> None:
        if what in kinds and begin <= folder.operations < end:
            raise OSError(number, os.strerror(number))

    folder.on_operation = fail
    run = Run(folder, rng)
    run.live(60)
    folder.on_operation = lambda what: None
    again = open_store(folder.copy(), BUDGET)
    everything(again)
    assert put(again, range(5)) == 5
    again.close()
