"""Slots of one tier: who holds them, when they may be reused.

Owns: reference counts, generations, leases, step fences, quarantine.  **The only place that frees.**
Does not own: what a slot contains (``directory``), which idle slot goes first (``retention``).
Thread: the scheduler's only.

A slot is in exactly one state::

                 take()                       last release, step settled, no key left
      FREE -------------------> HELD -------------------------------------------> FREE
       ^                        ^  |  last release, step settled, keys published
       | evicted by take()      |  +-------------------------------------------> IDLE (hittable)
       +------- IDLE -----------+  |  last release while a step that used it runs
                  share()          +--> LIMBO --settle(step)--> FREE or IDLE
                                   |  its transfer is in doubt
                                   +--> QUARANTINE --the mover proves quiet: release--> FREE or IDLE

Only three borrowers exist: a request's table (a lease), a transfer job (a fork of it), a step in flight (a fence).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from ostinato.ids import HOLE, SlotId, Step, TierId


class SlotState(Enum):
    FREE = "free"
    IDLE = "idle"
    HELD = "held"
    LIMBO = "limbo"
    QUARANTINE = "quarantine"


class Evictable(Protocol):
    """The idle slots, in order of worth, as the pool sees them."""

    def has_content(self, slot: SlotId) -> bool:
        """Whether any key is published for the slot (it then becomes idle, not free)."""

    def add(self, slot: SlotId) -> None:
        """``slot`` became idle."""

    def remove(self, slot: SlotId) -> None:
        """``slot`` is held again."""

    def evict(self) -> SlotId:
        """Give up the least valuable idle slot and forget its keys."""


class Lease:
    """A holder's claim on some slots; each slot counts once.  Made by the pool; released explicitly, exactly once."""

    __slots__ = ("_pool", "is_open", "owner", "quarantined", "slots")

    def __init__(self, pool: SlotPool, slots: Iterable[SlotId], owner: str) -> None:
        self._pool = pool
        self.slots: dict[SlotId, None] = dict.fromkeys(slots)
        self.owner = owner
        self.is_open = True
        self.quarantined = False

    def fork(self, owner: str, slots: Iterable[SlotId] | None = None) -> Lease:
        """A second claim on ``slots`` (default: all of this lease's), for a holder with its own life."""
        wanted = list(self.slots if slots is None else slots)
        assert self.is_open and all(slot in self.slots for slot in wanted), "a fork of slots that are not held"
        return self._pool.share(wanted, owner)

    def absorb(self, other: Lease) -> None:
        """Take over all claims of ``other``, which is closed.  The two must not overlap."""
        assert self.is_open and other.is_open and self._pool is other._pool
        assert not self.slots.keys() & other.slots.keys(), "one lease counts a slot once"
        self.slots.update(other.slots)
        other.slots = {}
        self._pool.close(other)

    def drop(self, slots: Iterable[SlotId], fence: Step | None = None) -> None:
        """Give up a part.  ``fence``: the step that may still use the slots."""
        assert self.is_open, f"{self.owner}: a released lease holds nothing"
        for slot in slots:
            del self.slots[slot]
            self._pool.unref(slot, fence)

    def release(self, fence: Step | None = None) -> None:
        """Give up everything and close.  A second release is a bug and raises."""
        assert self.is_open, f"{self.owner}: released twice"
        if self.quarantined:
            self._pool.set_quarantine(self, False)
        self.drop(list(self.slots), fence)
        self._pool.close(self)

    def quarantine(self) -> None:
        """The transfer that these slots belong to is in doubt: nobody may have them until :meth:`release`."""
        assert self.is_open and not self.quarantined
        self._pool.set_quarantine(self, True)


class SlotPool:
    """Slots ``0 .. capacity - 1`` of one tier."""

    def __init__(self, tier: TierId, capacity: int, idle: Evictable) -> None:
        self.tier = tier
        self.capacity = capacity
        self.generation = [0] * capacity
        self.leases: set[Lease] = set()
        self._references = [0] * capacity
        self._fences = [Step(0)] * capacity
        self.free_slots: deque[SlotId] = deque(SlotId(i) for i in range(capacity))
        self._idle = idle
        self._idle_slots: set[SlotId] = set()
        self._limbo: set[SlotId] = set()
        self._quarantine: Counter[SlotId] = Counter()
        self._settled = Step(0)

    @property
    def available(self) -> int:
        """Slots that :meth:`take` could hand out now."""
        return len(self.free_slots) + len(self._idle_slots)

    @property
    def reachable(self) -> int:
        """Slots that can come free by themselves: all but those whose transfer is in doubt."""
        return self.capacity - len(self._quarantine)

    def take(self, count: int, owner: str) -> Lease | None:
        """``count`` fresh slots, or None (nothing changed).  Idle slots are evicted only when no free one is left."""
        if count > self.available:
            return None
        slots = []
        for _ in range(count):
            if self.free_slots:
                slot = self.free_slots.popleft()
            else:
                slot = self._idle.evict()
                self._idle_slots.remove(slot)
            self.generation[slot] += 1
            self._references[slot] = 1
            slots.append(slot)
        return self._open(slots, owner)

    def share(self, slots: Iterable[SlotId], owner: str) -> Lease:
        """One more claim on slots that are held, in limbo, or idle.  Duplicates count once; holes are refused."""
        unique = dict.fromkeys(slots)
        assert HOLE not in unique, "a hole cannot be held"
        for slot in unique:
            state = self.state(slot)
            assert state is not SlotState.FREE, f"slot {slot} is free: there is nothing to share"
            if state is SlotState.IDLE:
                self._idle_slots.remove(slot)
                self._idle.remove(slot)
            self._limbo.discard(slot)
            self._references[slot] += 1
        return self._open(unique, owner)

    def settle(self, step: Step) -> None:
        """Step ``step`` and all before it are finished: slots in limbo for them come free."""
        self._settled = max(self._settled, step)
        for slot in [slot for slot in self._limbo if self._fences[slot] <= self._settled]:
            self._limbo.remove(slot)
            self._retire(slot)

    def state(self, slot: SlotId) -> SlotState:
        if self._quarantine.get(slot):
            return SlotState.QUARANTINE
        if self._references[slot]:
            return SlotState.HELD
        if slot in self._limbo:
            return SlotState.LIMBO
        return SlotState.IDLE if slot in self._idle_slots else SlotState.FREE

    def references(self, slot: SlotId) -> int:
        return self._references[slot]

    def drop_idle(self) -> int:
        """Forget everything that nobody holds; returns how many slots came free."""
        count = len(self._idle_slots)
        for _ in range(count):
            slot = self._idle.evict()
            self._idle_slots.remove(slot)
            self.free_slots.append(slot)
        return count

    # The rest serves leases.

    def _open(self, slots: Iterable[SlotId], owner: str) -> Lease:
        lease = Lease(self, slots, owner)
        self.leases.add(lease)
        return lease

    def close(self, lease: Lease) -> None:
        lease.is_open = False
        self.leases.remove(lease)

    def unref(self, slot: SlotId, fence: Step | None) -> None:
        self._references[slot] -= 1
        assert self._references[slot] >= 0, f"slot {slot} released more often than taken"
        if fence is not None:
            self._fences[slot] = max(self._fences[slot], fence)
        if self._references[slot] == 0:
            if self._fences[slot] > self._settled:
                self._limbo.add(slot)
            else:
                self._retire(slot)

    def _retire(self, slot: SlotId) -> None:
        if self._idle.has_content(slot):
            self._idle_slots.add(slot)
            self._idle.add(slot)
        else:
            self.free_slots.append(slot)

    def set_quarantine(self, lease: Lease, doubtful: bool) -> None:
        lease.quarantined = doubtful
        for slot in lease.slots:
            self._quarantine[slot] += 1 if doubtful else -1
            if not self._quarantine[slot]:
                del self._quarantine[slot]
