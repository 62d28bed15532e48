"""The ledger: free + idle + held + limbo + quarantine = all, and every reference has an owner.

Owns: the check.  It reads everything and changes nothing; cheap enough for every step of a test, off in production.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ostinato.cache.directory import Directory
from ostinato.cache.pool import SlotPool, SlotState
from ostinato.cache.retention import Retention
from ostinato.cache.table import BlockTable
from ostinato.errors import AuditError
from ostinato.ids import HOLE, SlotId


def audit_pool(pool: SlotPool, retention: Retention, directory: Directory) -> Counter[SlotState]:
    """Check one tier; returns how many slots are in each state."""
    counted: Counter[SlotId] = Counter(slot for lease in pool.leases for slot in lease.slots)
    free = pool.free_slots
    free_slots = set(free)
    _require(len(free) == len(free_slots), f"{pool.tier}: a slot is twice in the free list")
    states: Counter[SlotState] = Counter()
    for number in range(pool.capacity):
        slot = SlotId(number)
        state = pool.state(slot)
        states[state] += 1
        keys = directory.contents(pool.tier, slot)
        _require(
            pool.references(slot) == counted[slot],
            f"{pool.tier}: slot {slot} has {pool.references(slot)} references but {counted[slot]} owners",
        )
        _require((state is SlotState.FREE) == (slot in free_slots), f"{pool.tier}: slot {slot} is {state}, wrong list")
        _require((state is SlotState.IDLE) == (slot in retention), f"{pool.tier}: slot {slot} is {state}, wrong order")
        _require(not (keys and state is SlotState.FREE), f"{pool.tier}: free slot {slot} still has keys")
        _require(bool(keys) or state is not SlotState.IDLE, f"{pool.tier}: idle slot {slot} has no key")
        for entry in keys:
            place = entry.places[pool.tier]
            _require(place.slot == slot, f"{pool.tier}: {entry.key} points elsewhere")
            _require(place.generation == pool.generation[slot], f"{pool.tier}: slot {slot} was recycled under its key")
            _require(place.ready or state is not SlotState.IDLE, f"{pool.tier}: idle slot {slot} is being written")
    _require(len(free) == states[SlotState.FREE], f"{pool.tier}: {len(free)} in the free list, {states} by state")
    _require(sum(states.values()) == pool.capacity, f"{pool.tier}: states do not add up")
    return states


def audit_tables(tables: Iterable[BlockTable]) -> None:
    """Check that each table's rows and lease name the same slots, each once."""
    for table in tables:
        slots = [slot for row in table.rows for slot in row if slot != HOLE]
        _require(len(slots) == len(set(slots)), f"{table.request_id}: a slot is twice in the table")
        _require(set(slots) == set(table.lease.slots), f"{table.request_id}: table and lease differ")
        _require(table.lease.is_open, f"{table.request_id}: its lease is closed")


def audit_directory(directory: Directory, pools: Mapping[str, SlotPool]) -> None:
    """Check that every place names a slot that some pool has, and is listed there."""
    for entry in directory:
        _require(bool(entry.places), f"{entry.key}: an entry without a place")
        for tier, place in entry.places.items():
            _require(tier in pools, f"{entry.key}: unknown tier {tier}")
            _require(entry in directory.contents(tier, place.slot), f"{entry.key}: not listed in {tier} {place.slot}")


def _require(truth: bool, message: str) -> None:
    if not truth:
        raise AuditError(message)
