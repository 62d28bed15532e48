"""Prefixes that are not evicted for a while.

Owns: pins, their claims on slots, their share of each tier, their end.  Does not own: what is cached, slots
(``cache.pool``).  Invariant: all pins together hold at most ``pinned_share`` of a tier's slots.  Thread: the
scheduler's only.

A pin holds the copies of the units that its cuts need in each of our own tiers that has room for it.  It yields in one
case: a request that alone is alive, and that could otherwise never run, takes pins' blocks on the device.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

from ostinato.cache.hints import check_ttl
from ostinato.cache.keys import BlockKey, KeyChain
from ostinato.cache.pool import Lease
from ostinato.cache.presence import Presence
from ostinato.errors import CacheLimitError, NotCachedError
from ostinato.hierarchy.tiers import Core
from ostinato.ids import DEVICE, SlotId, TierId

MAX_PINS: Final = 1000


@dataclass(slots=True, eq=False)
class Pin:
    """``seed`` starts the key space it is of.  ``tokens``: the longest cut that it keeps.

    ``yielded``: its blocks on the device were needed by a request that could not have run otherwise.
    """

    pin_id: str
    seed: bytes
    tokens: int
    keys: frozenset[BlockKey]
    expires: float
    leases: dict[TierId, Lease]
    yielded: bool = False


class Pins:
    """``clock`` in seconds."""

    def __init__(self, core: Core, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock
        self._pins: dict[str, Pin] = {}
        self._numbers = itertools.count(1)
        self.yielded = 0
        """Pins that have yielded since start."""

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def add(self, chain: KeyChain, tokens: int, ttl_s: float) -> Pin:
        """Keep what our own tiers have of the first ``tokens`` tokens of ``chain`` for ``ttl_s`` seconds.

        Raises NotCachedError where there is nothing, CacheLimitError where pins hold too much already.
        """
        check_ttl(ttl_s)
        self.expire()
        if len(self._pins) >= MAX_PINS:
            raise CacheLimitError(f"there are {MAX_PINS} pins already: unpin some")
        cut, keys = self._needed(chain, tokens)
        if not cut:
            raise NotCachedError(
                "nothing of this prompt is cached in the device pool or a tier in memory: send it once, then pin it"
            )
        slots = self._room_for(keys)
        name = f"pin-{next(self._numbers)}"
        leases = {
            tier.tier: tier.pool.share(slots[tier.tier], name) for tier in self._core.owned() if tier.tier in slots
        }
        pin = self._pins[name] = Pin(name, chain.seed, cut, keys, self._clock() + ttl_s, leases)
        return pin

    def drop(self, pin: Pin) -> None:
        del self._pins[pin.pin_id]
        for lease in pin.leases.values():
            lease.release()
        pin.leases.clear()

    def get(self, pin_id: str) -> Pin | None:
        return self._pins.get(pin_id)

    def expire(self) -> None:
        """Let go of those whose time is up."""
        if self._pins:
            now = self._clock()
            for pin in [pin for pin in self._pins.values() if pin.expires <= now]:
                self.drop(pin)

    def touching(self, keys: Collection[BlockKey]) -> list[Pin]:
        """Pins that keep any of ``keys``."""
        return [pin for pin in self._pins.values() if not pin.keys.isdisjoint(keys)]

    def held(self, tier: TierId) -> set[SlotId]:
        """Slots of ``tier`` that pins hold."""
        return {slot for pin in self._pins.values() if tier in pin.leases for slot in pin.leases[tier].slots}

    def give_way(self, short_by: int) -> bool:
        """Let go of blocks on the device, of the pins that end first, if that gives ``short_by`` slots."""
        pool = self._core.device.pool
        pins = sorted((pin for pin in self._pins.values() if DEVICE in pin.leases), key=lambda pin: pin.expires)
        claims = Counter(slot for pin in pins for slot in pin.leases[DEVICE].slots)
        if sum(pool.references(slot) == count for slot, count in claims.items()) < short_by:
            return False
        target = pool.available + short_by
        for pin in pins:
            if pool.available >= target:
                break
            pin.leases.pop(DEVICE).release()
            pin.yielded = True
            self.yielded += 1
        return True

    def _needed(self, chain: KeyChain, tokens: int) -> tuple[int, frozenset[BlockKey]]:
        """What the prompt needs to be resumed when it is continued, and when it comes again alone."""
        core, keys = self._core, set[BlockKey]()
        longest = 0
        for cap in (tokens, tokens - 1):
            plan = Presence(core.directory, core.layout, chain, tuple(core.lower)).plan(cap)
            longest = max(longest, plan.tokens)
            for spec, sources in zip(core.layout.groups, plan.sources, strict=True):
                keys.update(BlockKey(spec.group, chain.digest(spec.hash_unit, ordinal)) for ordinal in sources)
        return longest, frozenset(keys)

    def _room_for(self, keys: Collection[BlockKey]) -> dict[TierId, list[SlotId]]:
        """The slots to hold, in each tier where pins may hold so many; raises where these have not all of ``keys``."""
        core, chosen, missing, full = self._core, dict[TierId, list[SlotId]](), set(keys), ""
        for tier in core.owned():
            places = {key: core.directory.place(key, tier.tier) for key in keys}
            there = {key: place.slot for key, place in places.items() if place is not None and place.ready}
            slots = dict.fromkeys(there.values())
            held, most = self.held(tier.tier), int(core.config.pinned_share * tier.pool.capacity)
            if len(held.union(slots)) <= most:
                chosen[tier.tier] = list(slots)
                missing.difference_update(there)
            elif not full:
                full = (
                    f"pins may hold {most} of the {tier.pool.capacity} blocks of tier {tier.tier}; they hold "
                    f"{len(held)}, and this prefix needs {len(slots.keys() - held)} more: unpin something, or pin a "
                    "shorter prefix"
                )
        if missing:
            raise CacheLimitError(full) if full else NotCachedError("a part of this prompt is being loaded: try again")
        return chosen
