"""The order of eviction."""

from __future__ import annotations

import random
from collections.abc import Sequence

from core.builders import make_pool
from ostinato.cache.directory import Directory, Entry, Place
from ostinato.cache.keys import BlockKey
from ostinato.cache.retention import Retention
from ostinato.ids import DEVICE, GroupId, Ordinal, SlotId


class Shelf:
    """Idle slots, each with one unit."""

    def __init__(self) -> None:
        _, self.retention, self.directory = make_pool(1)
        self.entries: dict[SlotId, Entry] = {}

    def put(self, ordinal: int, boundary: bool, tick: int = 0) -> SlotId:
        slot = SlotId(len(self.entries))
        key = BlockKey(GroupId(0), slot.to_bytes(32, "big"))
        entry = self.directory.write(key, Ordinal(ordinal), DEVICE, Place(slot, 0, None), boundary)
        assert entry is not None
        entry.tick = tick
        self.entries[slot] = entry
        self.retention.add(slot)
        return slot

    def drain(self) -> list[SlotId]:
        return [self.retention.evict() for _ in range(len(self.retention))]


def test_interior_units_go_first_whatever_their_age() -> None:
    shelf = Shelf()
    old_boundary = shelf.put(0, True, tick=1)
    fresh_interior = shelf.put(1, False, tick=9)
    old_interior = shelf.put(2, False, tick=2)
    assert shelf.drain() == [old_interior, fresh_interior, old_boundary]


def test_the_tail_of_a_prompt_goes_before_its_head() -> None:
    shelf = Shelf()
    slots = [shelf.put(ordinal, True, tick=3) for ordinal in range(5)]
    assert shelf.drain() == slots[::-1]


def test_least_recently_used_prompt_goes_first() -> None:
    shelf = Shelf()
    first = [shelf.put(ordinal, True, tick=1) for ordinal in range(3)]
    second = [shelf.put(ordinal, True, tick=2) for ordinal in range(3)]
    assert shelf.drain() == first[::-1] + second[::-1]


def test_late_marks_and_uses_are_seen() -> None:
    shelf = Shelf()
    used, marked, plain = (shelf.put(ordinal, False, tick=1) for ordinal in range(3))
    shelf.entries[used].tick = 7
    shelf.entries[marked].boundary = True
    assert shelf.retention.lowest_rank() == (False, 1, -2)
    assert shelf.retention.candidates(3) == [plain, used, marked]
    assert shelf.drain() == [plain, used, marked]
    assert shelf.retention.lowest_rank() is None


def test_the_most_valuable_unit_speaks_for_its_page() -> None:
    shelf = Shelf()
    page = shelf.put(5, False, tick=1)
    other = shelf.put(3, False, tick=2)
    shelf.directory.write(BlockKey(GroupId(0), b"x" * 32), Ordinal(6), DEVICE, Place(page, 0, None), boundary=True)
    assert shelf.retention.rank(page)[0]
    assert shelf.drain() == [other, page]


def test_eviction_forgets_keys_and_removal_does_not() -> None:
    shelf = Shelf()
    kept, gone = shelf.put(0, True), shelf.put(1, True)
    shelf.retention.remove(kept)
    assert kept not in shelf.retention
    assert shelf.retention.evict() == gone
    assert [entry.ordinal for entry in shelf.directory] == [0]
    shelf.retention.add(kept)
    assert shelf.drain() == [kept]
    assert shelf.retention.evictions == 2


def test_candidates_change_nothing() -> None:
    shelf = Shelf()
    for ordinal in range(10):
        shelf.put(ordinal, ordinal % 3 == 0, tick=ordinal)
    first = shelf.retention.candidates(4)
    assert shelf.retention.candidates(100)[:4] == first
    assert len(shelf.retention) == 10
    assert shelf.drain()[:4] == first


def check_order(shelf: Shelf, gone: SlotId, rest: Sequence[SlotId]) -> None:
    def value(slot: SlotId) -> tuple[bool, int, int]:
        entry = shelf.entries[slot]
        return entry.boundary, entry.tick, -entry.ordinal

    assert value(gone) <= min((value(slot) for slot in rest), default=value(gone))


def test_random_histories_always_evict_the_least_valuable() -> None:
    rng = random.Random(7)
    shelf, idle, held = Shelf(), list[SlotId](), list[SlotId]()
    for number in range(6000):
        match rng.randrange(5):
            case 0:
                idle.append(shelf.put(rng.randrange(50), rng.random() < 0.3, tick=number))
            case 1 if idle:
                held.append(idle.pop(rng.randrange(len(idle))))
                shelf.retention.remove(held[-1])
            case 2 if held:
                idle.append(held.pop(rng.randrange(len(held))))
                shelf.retention.add(idle[-1])
            case 3 if idle or held:
                entry = shelf.entries[rng.choice(idle + held)]
                entry.tick, entry.boundary = number, entry.boundary or rng.random() < 0.2
            case 4 if len(idle) > 10:
                gone = shelf.retention.evict()
                idle.remove(gone)
                check_order(shelf, gone, idle)
        assert len(shelf.retention) == len(idle)
    assert len(shelf.retention._heap) <= 4 * len(idle) + 65, "outdated items are cleared away"


def test_an_empty_directory_has_no_content() -> None:
    retention = Retention(DEVICE, Directory())
    assert not retention.has_content(SlotId(0))
    assert len(retention) == 0
