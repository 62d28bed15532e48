"""What is cached where: key -> entry -> the owned tiers that hold it.

Owns: the map from keys to places and back from slots to keys; recency and boundary marks of keys; telling listeners
what can be hit.
Does not own: slots (``pool``), eviction order (``retention``), answers of kept and shared tiers (asked per request).
Invariant: a tier holds a key at most once; a place names the slot's generation at the time of writing.
Thread: the scheduler's only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ostinato.cache.keys import BlockKey
from ostinato.cache.ports import DirectoryListener
from ostinato.ids import GroupId, JobId, Ordinal, SlotId, TierId


class Place:
    """One tier's copy of one hash unit.  ``job`` is the load or store that is still writing it, or None: READY."""

    __slots__ = ("generation", "job", "slot")

    def __init__(self, slot: SlotId, generation: int, job: JobId | None) -> None:
        self.slot = slot
        self.generation = generation
        self.job = job

    @property
    def ready(self) -> bool:
        return self.job is None


class Entry:
    """One cached hash unit.

    ``tick`` is when a request last used it; ``boundary`` says that a cut where others may resume needs it (always so
    for kinds whose every unit serves all later cuts).  ``failed_stores`` counts copies to lower tiers that came to
    nothing.  ``spent``: its users said that they do not need it any more.
    """

    __slots__ = ("boundary", "failed_stores", "key", "ordinal", "places", "spent", "tick")

    def __init__(self, key: BlockKey, ordinal: Ordinal, boundary: bool) -> None:
        self.key = key
        self.ordinal = ordinal
        self.boundary = boundary
        self.tick = 0
        self.failed_stores = 0
        self.spent = False
        self.places: dict[TierId, Place] = {}

    def use(self, tick: int) -> None:
        """A request uses it."""
        self.tick = max(self.tick, tick)
        self.spent = False

    def spend(self) -> None:
        """It goes first from now on, until it is used again."""
        self.tick, self.boundary, self.spent = 0, False, True


class Directory:
    """All entries of all owned tiers."""

    def __init__(self) -> None:
        self._entries: dict[BlockKey, Entry] = {}
        self._contents: dict[tuple[TierId, SlotId], list[Entry]] = {}
        self.listeners: tuple[DirectoryListener, ...] = ()
        self.units: Counter[tuple[TierId, GroupId]] = Counter()
        """Copies, those that are being written included, by tier and group."""
        self.tick = 0
        self.written = 0
        """Copies published since start: as long as it stays, no hit has become longer."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: BlockKey) -> Entry | None:
        return self._entries.get(key)

    def place(self, key: BlockKey, tier: TierId) -> Place | None:
        entry = self._entries.get(key)
        return entry.places.get(tier) if entry is not None else None

    def contents(self, tier: TierId, slot: SlotId) -> list[Entry]:
        """Entries whose copy in ``tier`` lies in ``slot``."""
        return self._contents.get((tier, slot), [])

    def write(self, key: BlockKey, ordinal: Ordinal, tier: TierId, place: Place, boundary: bool) -> Entry | None:
        """Publish a copy; None when the tier has one already (the first stays, the caller's slot is a duplicate)."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(key, ordinal, boundary)
            entry.tick = self.tick
        elif tier in entry.places:
            return None
        self.written += 1
        entry.places[tier] = place
        entry.boundary |= boundary
        self._contents.setdefault((tier, place.slot), []).append(entry)
        self.units[tier, key.group] += 1
        if place.ready:
            self._tell_stored(key, tier)
        return entry

    def confirm(self, entry: Entry, tier: TierId) -> None:
        """The load or store that was writing the copy has ended well."""
        entry.places[tier].job = None
        self._tell_stored(entry.key, tier)

    def withdraw(self, key: BlockKey, tier: TierId) -> Place | None:
        """Forget one copy (it failed, or was evicted); the entry goes with its last copy."""
        entry = self._entries.get(key)
        place = entry.places.pop(tier, None) if entry is not None else None
        if entry is None or place is None:
            return None
        held = self._contents[tier, place.slot]
        held.remove(entry)
        if not held:
            del self._contents[tier, place.slot]
        if not entry.places:
            del self._entries[key]
        self.units[tier, key.group] -= 1
        if place.ready:
            for listener in self.listeners:
                listener.on_removed(key, tier)
        return place

    def evict(self, tier: TierId, slot: SlotId) -> list[BlockKey]:
        """Forget every copy that lies in ``slot``."""
        keys = [entry.key for entry in self.contents(tier, slot)]
        for key in keys:
            self.withdraw(key, tier)
        return keys

    def _tell_stored(self, key: BlockKey, tier: TierId) -> None:
        for listener in self.listeners:
            listener.on_stored(key, tier)

    def next_tick(self) -> int:
        """Start of a new use: entries touched with it count as equally recent."""
        self.tick += 1
        return self.tick
