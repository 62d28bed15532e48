"""Slots: who holds them, and when they come free."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.builders import make_pool
from ostinato.cache.audit import audit_pool
from ostinato.cache.directory import Directory, Place
from ostinato.cache.keys import BlockKey
from ostinato.cache.pool import Lease, SlotPool, SlotState
from ostinato.ids import DEVICE, HOLE, GroupId, Ordinal, SlotId, Step


def publish(directory: Directory, pool: SlotPool, slot: SlotId, name: int, boundary: bool = True) -> BlockKey:
    key = BlockKey(GroupId(0), name.to_bytes(32, "big"))
    directory.write(key, Ordinal(name), pool.tier, Place(slot, pool.generation[slot], None), boundary)
    return key


def take(pool: SlotPool, count: int) -> Lease:
    lease = pool.take(count, "test")
    assert lease is not None
    return lease


def test_take_and_release() -> None:
    pool, _, _ = make_pool(4)
    lease = take(pool, 3)
    assert [pool.state(slot) for slot in lease.slots] == [SlotState.HELD] * 3
    assert pool.available == 1
    assert pool.take(2, "too many") is None
    assert pool.available == 1
    lease.release()
    assert pool.available == 4
    assert not pool.leases


def test_a_second_release_raises() -> None:
    pool, _, _ = make_pool(2)
    lease = take(pool, 1)
    lease.release()
    for misuse in (lease.release, lambda: lease.drop([]), lease.quarantine, lambda: lease.fork("late")):
        with pytest.raises(AssertionError):
            misuse()


def test_generation_counts_takes() -> None:
    pool, _, _ = make_pool(1)
    for expected in (1, 2, 3):
        lease = take(pool, 1)
        assert pool.generation == [expected]
        lease.fork("second").release()
        assert pool.generation == [expected], "sharing does not recycle"
        lease.release()


def test_published_slots_become_idle_and_are_shared_or_evicted() -> None:
    pool, retention, directory = make_pool(2)
    lease = take(pool, 1)
    (slot,) = lease.slots
    key = publish(directory, pool, slot, 1)
    lease.release()
    assert pool.state(slot) is SlotState.IDLE
    assert pool.available == 2
    again = pool.share([slot], "hit")
    assert pool.state(slot) is SlotState.HELD
    assert slot not in retention
    again.release()
    both = take(pool, 2)
    assert directory.get(key) is None, "eviction forgets the key"
    both.release()
    assert len(pool.free_slots) == 2


def test_free_slots_go_before_idle_ones() -> None:
    pool, retention, directory = make_pool(3)
    lease = take(pool, 1)
    publish(directory, pool, next(iter(lease.slots)), 1)
    lease.release()
    take(pool, 2)
    assert retention.evictions == 0
    take(pool, 1)
    assert retention.evictions == 1


def test_fork_and_absorb() -> None:
    pool, _, _ = make_pool(4)
    table = take(pool, 2)
    first, second = table.slots
    job = table.fork("job", [second])
    table.release()
    assert pool.state(first) is SlotState.FREE
    assert pool.state(second) is SlotState.HELD
    more = take(pool, 1)
    job.absorb(more)
    assert not more.is_open
    assert len(job.slots) == 2
    with pytest.raises(AssertionError):
        more.release()
    with pytest.raises(AssertionError):
        job.absorb(job.fork("same slots"))
    with pytest.raises(AssertionError):
        job.fork("foreign", [first])


def test_shares_count_once_and_refuse_holes_and_free_slots() -> None:
    pool, _, _ = make_pool(2)
    lease = take(pool, 1)
    (slot,) = lease.slots
    twice = pool.share([slot, slot], "twice")
    assert pool.references(slot) == 2
    for wrong in (HOLE, SlotId(1)):
        with pytest.raises(AssertionError):
            pool.share([wrong], "wrong")
    twice.release()
    lease.release()


def test_a_fence_keeps_a_slot_in_limbo_until_its_step_is_finished() -> None:
    pool, _, directory = make_pool(3)
    lease = take(pool, 2)
    plain, full = lease.slots
    publish(directory, pool, full, 1)
    lease.drop([plain, full], fence=Step(5))
    assert {pool.state(plain), pool.state(full)} == {SlotState.LIMBO}
    assert pool.available == 1
    pool.settle(Step(4))
    assert pool.available == 1
    shared = pool.share([full], "a hit in limbo")
    pool.settle(Step(5))
    assert pool.state(plain) is SlotState.FREE
    assert pool.state(full) is SlotState.HELD
    shared.release()
    assert pool.state(full) is SlotState.IDLE


def test_a_shared_limbo_slot_remembers_its_fence() -> None:
    pool, _, directory = make_pool(1)
    lease = take(pool, 1)
    (slot,) = lease.slots
    publish(directory, pool, slot, 1)
    lease.release(fence=Step(3))
    pool.share([slot], "hit").release()
    assert pool.state(slot) is SlotState.LIMBO
    pool.settle(Step(3))
    assert pool.state(slot) is SlotState.IDLE


def test_quarantine_counts_holders() -> None:
    pool, _, _ = make_pool(2)
    lease = take(pool, 1)
    (slot,) = lease.slots
    first, second = lease.fork("job 1"), lease.fork("job 2")
    first.quarantine()
    second.quarantine()
    with pytest.raises(AssertionError):
        first.quarantine()
    lease.release()
    assert pool.state(slot) is SlotState.QUARANTINE
    first.release()
    assert pool.state(slot) is SlotState.QUARANTINE
    assert pool.available == 1
    second.release()
    assert pool.state(slot) is SlotState.FREE


def test_drop_idle_spares_what_is_held() -> None:
    pool, _, directory = make_pool(3)
    lease = take(pool, 2)
    for name, slot in enumerate(lease.slots):
        publish(directory, pool, slot, name)
    held, idle = lease.slots
    lease.drop([idle])
    assert pool.drop_idle() == 1
    assert len(directory) == 1
    assert pool.state(held) is SlotState.HELD


class PoolMachine(RuleBasedStateMachine):
    """Leases, fences, quarantine and publication in any order; the ledger adds up after each."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.retention, self.directory = make_pool(6)
        self.leases: list[Lease] = []
        self.step = 0
        self.names = 0

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        available = self.pool.available
        lease = self.pool.take(count, "lease")
        assert (lease is None) == (count > available)
        if lease is not None:
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), fenced=st.booleans())
    def give_up(self, data: st.DataObject, fenced: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        fence = Step(self.step + 1) if fenced else None
        if lease.quarantined or not lease.slots or data.draw(st.booleans()):
            self.leases.remove(lease)
            lease.release(fence)
        else:
            lease.drop([next(iter(lease.slots))], fence)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fork_or_doubt(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        if data.draw(st.booleans()):
            self.leases.append(lease.fork("fork"))
        elif not lease.quarantined:
            lease.quarantine()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), boundary=st.booleans())
    def publish(self, data: st.DataObject, boundary: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        for slot in list(lease.slots)[:2]:
            self.names += 1
            publish(self.directory, self.pool, slot, self.names, boundary)

    @precondition(lambda self: len(self.directory))
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(list(self.directory)))
        self.leases.append(self.pool.share([entry.places[DEVICE].slot], "hit"))

    @rule()
    def settle(self) -> None:
        self.step += 1
        self.pool.settle(Step(self.step))

    @rule()
    def reset(self) -> None:
        self.pool.drop_idle()

    @invariant()
    def ledger(self) -> None:
        audit_pool(self.pool, self.retention, self.directory)

    def teardown(self) -> None:
        for lease in self.leases:
            lease.release()
        self.pool.settle(Step(self.step + 1))
        audit_pool(self.pool, self.retention, self.directory)
        assert self.pool.available == 6


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
