"""A tier whose slots are ours: device and host.

Owns: the pairing of one pool with its retention, and the rule of what may be evicted for what.  Does not own: bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ostinato.cache.directory import Directory, Entry
from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import keeps_checkpoints
from ostinato.cache.layout import CacheLayout
from ostinato.cache.pool import Lease, SlotPool
from ostinato.cache.ports import Probe
from ostinato.cache.retention import Rank, Retention
from ostinato.hierarchy.lifetimes import Lifetimes
from ostinato.ids import DEVICE, SlotId, TierId
from ostinato.observe.counts import AnswerCounts
from ostinato.transfer.book import Book


class StoreMode(Enum):
    """When an owned lower tier gets a copy: as blocks fill, or only when the device is about to evict them."""

    EAGER = "eager"
    LAZY = "lazy"


class OwnedTier:
    """Slots of one tier in this process, evicted by retention."""

    def __init__(self, tier: TierId, slots: int, directory: Directory, mode: StoreMode = StoreMode.EAGER) -> None:
        self.tier = tier
        self.mode = mode
        self.retention = Retention(tier, directory)
        self.pool = SlotPool(tier, slots, self.retention)

    def take_for_store(self, ranks: Sequence[Rank], owner: str) -> tuple[Lease, list[SlotId]]:
        """Slots for pages of these ranks, the most valuable first; fewer when there is no room worth taking.

        A page never pushes out one that is worth as much: otherwise two tiers could copy the same pages for ever.
        """
        lease = self.pool.take(min(len(ranks), len(self.pool.free_slots)), owner)
        assert lease is not None, "free slots can be taken"
        for rank in ranks[len(lease.slots) :]:
            lowest = self.retention.lowest_rank()
            if lowest is None or lowest >= rank:
                break
            more = self.pool.take(1, owner)
            assert more is not None, "something is idle"
            lease.absorb(more)
        return lease, list(lease.slots)

    def reconsider(self, slot: SlotId) -> None:
        """Keys of ``slot`` were withdrawn or lost worth: if idle, it comes free when none is left, or changes place."""
        self.pool.share([slot], "reconsidered").release()


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Numbers of the hierarchy.  ``pin_share``: part of the device that queued and running stores may hold.

    ``weigh_loads``: give up (a part of) a hit that takes longer to load than to compute.  ``coalesce``: a request waits
    for another one to compute the prefix that they share.  ``pinned_share``: part of each of our own tiers that people
    may pin.
    """

    reuse: bool = True
    step_tokens: int = 512
    load_deadline_s: float = 30.0
    store_deadline_s: float = 60.0
    probe_deadline_s: float = 5.0
    pin_share: float = 0.5
    max_load_failures: int = 2
    weigh_loads: bool = True
    coalesce: bool = True
    pinned_share: float = 0.25


@dataclass(frozen=True, slots=True)
class Core:
    """What the parts of the hierarchy share.  ``lower``: owned tiers below the device; ``asked``: the others."""

    layout: CacheLayout
    config: CoreConfig
    directory: Directory
    device: OwnedTier
    lower: Mapping[TierId, OwnedTier]
    asked: dict[TierId, Probe]
    book: Book
    order: tuple[TierId, ...] = field(default=(DEVICE,))
    """All tiers from fast to slow."""
    answers: defaultdict[TierId, AnswerCounts] = field(default_factory=lambda: defaultdict(AnswerCounts))
    """What asked tiers said."""
    hidden: defaultdict[TierId, Counter[BlockKey]] = field(default_factory=lambda: defaultdict(Counter))
    """Deleted keys that an asked tier may still hold: nobody finds them, and they are not offered to it."""
    lifetimes: Lifetimes = field(default_factory=Lifetimes)

    def unsaved(self, pages: int) -> bool:
        """Whether taking ``pages`` device pages would evict a boundary that no lower tier of ours has."""
        short = pages - len(self.device.pool.free_slots)
        if short <= 0:
            return False
        victims = self.device.retention.candidates(short)
        return len(victims) < short or any(
            entry.boundary and len(entry.places) == 1
            for slot in victims
            for entry in self.directory.contents(DEVICE, slot)
        )

    def owned(self) -> tuple[OwnedTier, ...]:
        """Tiers whose slots are ours, the device first."""
        return (self.device, *self.lower.values())

    def may_have(self, tier: TierId, key: BlockKey) -> bool:
        """Whether an asked tier may be given ``key``: it outlives what was deleted, and what is to expire."""
        return key not in self.hidden.get(tier, ()) and not self.lifetimes.expires(key)

    def is_checkpoint(self, entry: Entry) -> bool:
        """Whether the entry is a state of everything before it, rather than what some tokens left behind."""
        return keeps_checkpoints(self.layout.groups[entry.key.group].kind)

    def spare(self, limit: int) -> int:
        """Device pages, up to ``limit``, that can be taken without evicting a boundary."""
        free = len(self.device.pool.free_slots)
        victims = self.device.retention.candidates(limit - free) if free < limit else ()
        for count, slot in enumerate(victims):
            if self.device.retention.rank(slot)[0]:
                return free + count
        return min(limit, free + len(victims))

    def drop_idle(self, device_only: bool = False) -> int:
        """Forget everything that nobody holds; returns how many slots came free."""
        tiers = [self.device, *(() if device_only else self.lower.values())]
        return sum(tier.pool.drop_idle() for tier in tiers)
