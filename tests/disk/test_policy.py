"""Budget, eviction, admission: what is kept, what goes, what is written at all."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from disk.simulated import SimulatedFolder
from disk.support import CLEAR, close, get, key, open_path, open_store, put
from ostinato.connectors.disk.admission import Admission, Rate
from ostinato.connectors.disk.format import fits, slot_bytes
from ostinato.connectors.disk.journal import log_limit, reserve_bytes
from ostinato.connectors.disk.space import check_budget, slab_size
from ostinato.errors import CapacityError, ConfigError

MIB = 1 << 20


class Ticks:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("budget", [300_000, MIB, 5 * MIB])
@pytest.mark.parametrize("seed", range(4))
def test_never_more_than_the_budget(budget: int, seed: int) -> None:
    """Checked before every call of the operating system, log and snapshots included."""
    rng, folder = random.Random(seed), SimulatedFolder(budget)
    for _ in range(3):
        store = open_store(folder, budget)
        for _ in range(150):
            length = rng.choice((100, 3000, 9000, 30_000))
            first = rng.randrange(100_000)
            put(store, range(first, first + rng.randint(1, 30)), length, group=length % 7)
            if rng.random() < 0.3:
                store.flush()
        store.close()
        folder = folder.copy()
        folder.limit = budget
    assert folder.total() > 0.6 * budget or budget < MIB
    assert not store.stopped


def test_a_smaller_budget_is_kept_from_the_start() -> None:
    folder = SimulatedFolder()
    store = open_store(folder, 8 * MIB)
    put(store, range(1500))
    store.close()
    store = open_store(folder.copy(), 2 * MIB)
    assert store.folder.total() <= 2 * MIB  # type: ignore[attr-defined]
    kept = len(store.catalog.index)
    assert 200 < kept < 500
    assert len(get(store, range(1500))) == kept  # type: ignore[arg-type]


def test_what_was_used_last_stays() -> None:
    clock = Ticks()
    store = open_store(SimulatedFolder(), MIB, clock=clock)
    capacity = 0
    while not store.space.evictions:
        clock.now += 1
        capacity += 10
        put(store, range(capacity - 10, capacity))
    clock.now += 1
    favourites = list(range(20, 40))
    assert get(store, favourites) == set(favourites)
    clock.now += 1
    put(store, range(5000, 5000 + capacity - 60))
    assert get(store, favourites) == set(favourites)
    assert not get(store, range(40, 60))  # type: ignore[arg-type]


def test_the_tail_of_a_chain_goes_before_its_head() -> None:
    clock = Ticks()
    store = open_store(SimulatedFolder(), MIB, clock=clock)
    put(store, range(180))
    clock.now += 5
    put(store, range(10_000, 10_140))
    assert store.space.evictions
    left = sorted(get(store, range(180)))  # type: ignore[arg-type]
    assert left == list(range(len(left)))


def test_uses_survive_a_restart() -> None:
    clock, folder = Ticks(), SimulatedFolder()
    store = open_store(folder, MIB, clock=clock)
    put(store, range(100))
    clock.now += 10
    put(store, range(100, 180))
    clock.now += 10
    get(store, range(50))  # type: ignore[arg-type]
    store.close()
    store = open_store(folder.copy(), MIB, clock=clock)
    clock.now += 10
    put(store, range(1000, 1100))
    assert get(store, range(50)) == set(range(50))  # type: ignore[arg-type]


def test_records_of_another_size_give_up_their_slabs() -> None:
    clock = Ticks()
    store = open_store(SimulatedFolder(MIB), MIB, clock=clock)
    put(store, range(300), 3000)
    for number in range(0, 200, 20):
        clock.now += 1
        put(store, range(number, number + 20), 9000, group=1)
    assert len(get(store, range(200), 9000, group=1)) >= 40  # type: ignore[arg-type]
    assert set(store.catalog.classes) == {slot_bytes(9000)}
    assert put(store, range(500, 505), 3000) == 5


def test_a_record_being_read_is_not_evicted() -> None:
    store = open_store(SimulatedFolder(), MIB)
    put(store, range(10))
    entries = [store.catalog.index.get(CLEAR.name(key(number))) for number in range(10)]
    for entry in entries:
        assert entry is not None
        entry.pins += 1
        entry.slab.busy += 1
    put(store, range(1000, 2000))
    assert all(store.catalog.index.get(CLEAR.name(key(number))) is not None for number in range(10))


def test_nothing_is_written_twice() -> None:
    store = open_store(SimulatedFolder())
    assert put(store, [1, 2, 2, 3]) == 4
    written = store.stats.bytes_written
    assert put(store, [1, 2, 3]) == 3
    assert store.stats.bytes_written == written == 3 * slot_bytes(3000)


@pytest.mark.parametrize("length", [8 << 10, 18 << 10, 48 << 10, 128 << 10])
def test_growing_one_chat_writes_its_new_bytes(length: int) -> None:
    """20 turns: the bytes of slots, snapshots and logs, over the bytes of the units."""
    folder = SimulatedFolder()
    store = open_store(folder, 256 * MIB)
    written: list[int] = []
    folder.on_operation = _count_writes(folder, written)
    units = 0
    for turn in range(1, 21):
        units = 3 * turn
        assert put(store, range(units), length) == units
        store.flush()
    store.close()
    assert units * length < sum(written) <= 1.1 * units * length


def _count_writes(folder: SimulatedFolder, written: list[int]) -> Callable[[str], None]:
    seen: dict[int, int] = {}

    def count(what: str) -> None:
        if what == "written":
            for inode in folder._names.values():
                if inode.writes and seen.get(id(inode)) != id(inode.writes[-1]):
                    seen[id(inode)] = id(inode.writes[-1])
                    written.append(len(inode.writes[-1][1]))

    return count


def test_reserve_covers_snapshots_and_log() -> None:
    for slots in (1, 100, 10_000):
        assert reserve_bytes(slots) > 2 * 64 * slots + log_limit(slots)
    assert slab_size(200 << 30) == 800 * MIB
    assert slab_size(4 << 30) == 256 * MIB


def test_a_budget_that_holds_nothing_is_refused() -> None:
    with pytest.raises(CapacityError, match="at least"):
        check_budget(100_000, [64 << 10])
    check_budget(300_000, [64 << 10])


def test_second_sight() -> None:
    admission = Admission(second=True)
    keys = [key(number) for number in range(3)]
    assert admission.takes(keys, [1] * 3) == [False] * 3
    assert admission.takes(keys[:2], [1] * 2) == [True] * 2


def test_the_write_limit() -> None:
    clock = Ticks()
    admission = Admission(Rate(100.0, 200.0, clock))
    keys = [key(number) for number in range(4)]
    assert admission.takes(keys, [90] * 4) == [True, True, False, False]
    clock.now += 1
    assert admission.takes(keys[2:], [90] * 2) == [True, False]
    for text in ("fast", "10MiB", "10MiB/week", "0/s", "/s"):
        with pytest.raises(ConfigError):
            Rate.parse(text)
    assert Rate.parse("100MiB/s").take(100 * MIB)
    assert Rate.parse("50GiB/day").take(2 << 30)
    assert not Rate.parse("50GiB/day").take(3 << 30)


def test_a_full_disk_stops_growth_only() -> None:
    folder = SimulatedFolder()
    store = open_store(folder, 8 * MIB)
    put(store, range(100))

    def full(what: str) -> None:
        if what == "allocate":
            raise OSError(errno.ENOSPC, "no space left on device")

    folder.on_operation = full
    for first in range(1000, 3000, 100):
        assert put(store, range(first, first + 100)) == 100
    assert not store.stopped
    assert get(store, range(2950, 3000)) == set(range(2950, 3000))  # type: ignore[arg-type]
    assert put(store, range(5), 9000, group=1) == 0
    assert not store.stopped
    assert set(store.catalog.classes) == {slot_bytes(3000)} or not store.catalog.classes


def test_a_clock_that_was_wrong_does_not_spoil_the_order() -> None:
    clock, folder = Ticks(), SimulatedFolder()
    clock.now = 4e9
    store = open_store(folder, MIB, clock=clock)
    put(store, range(100))
    store.close()
    clock.now = 1000.0
    store = open_store(folder.copy(), MIB, clock=clock)
    assert {entry.used for entry in store.catalog.index} == {1000}


def test_small_records_do_not_take_a_block_each() -> None:
    for length in [*range(0, 5000, 7), 18 << 10, 48 << 10, 1 << 20, 5 << 20]:
        size, aligned = slot_bytes(length), slot_bytes(length, direct=True)
        assert fits(length, size)
        assert fits(length, aligned)
        assert size % 64 == aligned % 4096 == 0
        assert size - length - 224 <= max(63, (length + 224) // 64), length
        assert size <= aligned
        assert length < 256 << 10 or size == aligned


def test_each_mode_reads_what_the_other_wrote(tmp_path: Path) -> None:
    for first, direct in enumerate([False, True, False, True]):
        store = open_path(tmp_path / "kv", direct=direct)
        assert get(store, range(100 * first)) == set(range(100 * first))  # type: ignore[arg-type]
        assert put(store, range(100 * first, 100 * first + 100)) == 100
        close(store)
    store = open_path(tmp_path / "kv")
    assert set(store.catalog.classes) == {slot_bytes(3000), slot_bytes(3000, direct=True)}
    close(store)
