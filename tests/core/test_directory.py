"""Key -> entry -> places, and back."""

from __future__ import annotations

import random

import pytest

from core.builders import make_pool
from ostinato.cache.audit import audit_directory, audit_pool
from ostinato.cache.directory import Directory, Place
from ostinato.cache.keys import BlockKey
from ostinato.errors import AuditError
from ostinato.ids import DEVICE, GroupId, JobId, Ordinal, SlotId, TierId

HOST = TierId("host")


def key_of(name: int, group: int = 0) -> BlockKey:
    return BlockKey(GroupId(group), name.to_bytes(32, "big"))


def test_write_and_withdraw() -> None:
    directory = Directory()
    entry = directory.write(key_of(1), Ordinal(3), DEVICE, Place(SlotId(7), 1, None), False)
    assert entry is directory.get(key_of(1))
    assert directory.contents(DEVICE, SlotId(7)) == [entry]
    place = directory.withdraw(key_of(1), DEVICE)
    assert place is not None
    assert place.slot == 7
    assert len(directory) == 0
    assert directory.contents(DEVICE, SlotId(7)) == []
    assert directory.withdraw(key_of(1), DEVICE) is None


def test_the_first_copy_stays() -> None:
    directory = Directory()
    assert directory.write(key_of(1), Ordinal(0), DEVICE, Place(SlotId(0), 1, None), False)
    assert directory.write(key_of(1), Ordinal(0), DEVICE, Place(SlotId(1), 1, None), True) is None
    place = directory.place(key_of(1), DEVICE)
    assert place is not None
    assert place.slot == 0
    assert directory.contents(DEVICE, SlotId(1)) == []


def test_an_entry_lives_as_long_as_its_last_copy() -> None:
    directory = Directory()
    first = directory.write(key_of(1), Ordinal(0), DEVICE, Place(SlotId(0), 1, None), False)
    second = directory.write(key_of(1), Ordinal(0), HOST, Place(SlotId(5), 1, JobId(3)), True)
    assert first is second is not None
    assert first.boundary, "a mark is kept from whoever set it"
    assert not first.places[HOST].ready
    directory.withdraw(key_of(1), DEVICE)
    assert list(directory) == [first]
    directory.withdraw(key_of(1), HOST)
    assert list(directory) == []


def test_a_page_holds_several_units_and_goes_as_one() -> None:
    directory = Directory()
    for name in range(3):
        directory.write(key_of(name), Ordinal(name), DEVICE, Place(SlotId(2), 1, None), False)
    directory.write(key_of(1), Ordinal(1), HOST, Place(SlotId(2), 1, None), False)
    assert directory.evict(DEVICE, SlotId(2)) == [key_of(name) for name in range(3)]
    assert len(directory) == 1
    assert directory.evict(DEVICE, SlotId(2)) == []


def test_groups_do_not_share_keys() -> None:
    directory = Directory()
    directory.write(key_of(1, 0), Ordinal(0), DEVICE, Place(SlotId(0), 1, None), False)
    assert directory.get(key_of(1, 1)) is None


def test_random_histories_keep_both_maps_equal() -> None:
    rng, directory, model = random.Random(2), Directory(), dict[tuple[BlockKey, TierId], SlotId]()
    for _ in range(5000):
        key, tier, slot = key_of(rng.randrange(30)), rng.choice((DEVICE, HOST)), SlotId(rng.randrange(12))
        match rng.randrange(3):
            case 0:
                written = directory.write(key, Ordinal(0), tier, Place(slot, 1, None), False)
                assert (written is None) == ((key, tier) in model)
                model.setdefault((key, tier), slot)
            case 1:
                place = directory.withdraw(key, tier)
                assert (place.slot if place is not None else None) == model.pop((key, tier), None)
            case 2:
                expected = {k for (k, t), s in model.items() if (t, s) == (tier, slot)}
                assert set(directory.evict(tier, slot)) == expected
                model = {(k, t): s for (k, t), s in model.items() if (t, s) != (tier, slot)}
        found = {(entry.key, t): place.slot for entry in directory for t, place in entry.places.items()}
        assert found == model
        assert all(directory.get(key) is not None for key, _ in model)


def test_the_audit_sees_a_recycled_slot_under_an_old_key() -> None:
    pool, retention, directory = make_pool(2)
    lease = pool.take(1, "test")
    assert lease is not None
    (slot,) = lease.slots
    directory.write(key_of(1), Ordinal(0), DEVICE, Place(slot, pool.generation[slot], None), False)
    audit_pool(pool, retention, directory)
    audit_directory(directory, {DEVICE: pool})
    with pytest.raises(AuditError, match="unknown tier"):
        audit_directory(directory, {HOST: pool})
    pool.generation[slot] += 1
    with pytest.raises(AuditError, match="recycled"):
        audit_pool(pool, retention, directory)


def test_the_audit_sees_a_reference_without_owner() -> None:
    pool, retention, directory = make_pool(2)
    lease = pool.take(1, "test")
    assert lease is not None
    pool.leases.remove(lease)
    with pytest.raises(AuditError, match="owners"):
        audit_pool(pool, retention, directory)
