"""The cache as people manage it: inspect, pin, delete; and the end of what was to end.

Owns: which keys a prompt in a key space means, and that nobody reaches another key space's.  Does not own: how any of
it is done (``inspection``, ``pins``, ``removal``, ``lifetimes``).  Thread: the scheduler's only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ostinato.cache.directory import Entry
from ostinato.cache.keys import KeyChain
from ostinato.errors import NotCachedError
from ostinato.hierarchy.inspection import Inspector, unit_keys
from ostinato.hierarchy.pins import Pin, Pins
from ostinato.hierarchy.removal import Deletion, Removal
from ostinato.hierarchy.residency import Residency
from ostinato.hierarchy.tiers import Core
from ostinato.ids import RequestId
from ostinato.observe.inspection import CacheSummary, DeletionView, Inspection, PinView, TierPins
from ostinato.transfer.job import JobState


class CacheControl:
    """``seed(salt)`` starts a key chain; ``requests``: the hierarchy's own map."""

    def __init__(
        self,
        core: Core,
        requests: Mapping[RequestId, Residency],
        seed: Callable[[str], bytes],
        clock: Callable[[], float],
    ) -> None:
        self.pins = Pins(core, clock)
        self.removal = Removal(core, requests)
        self._core = core
        self._requests = requests
        self._seed = seed
        self._clock = clock
        self._inspector = Inspector(core)

    # What people ask for.  ``salt`` is the caller's: nothing of other key spaces is seen or touched.

    def inspect(self, tokens: Sequence[int], salt: str, patient: bool = True) -> Inspection | None:
        """None while a tier has not answered, if ``patient``: then ask again."""
        self.tick()
        chain = self._chain(tokens, salt)
        keys = [key for spec in self._core.layout.groups for key in unit_keys(spec, chain)]
        pins = tuple(self._view(pin) for pin in self.pins.touching(keys))
        return self._inspector.look(chain, len(tokens), pins, patient)

    def pin(self, tokens: Sequence[int], salt: str, ttl_s: float) -> PinView:
        """Raises NotCachedError and CacheLimitError."""
        self.tick()
        return self._view(self.pins.add(self._chain(tokens, salt), len(tokens), ttl_s))

    def unpin(self, pin_id: str, salts: Sequence[str]) -> PinView:
        """Raises NotCachedError when none of ``salts`` has such a pin."""
        self.tick()
        pin = self.pins.get(pin_id)
        if pin is None or pin.seed not in map(self._seed, salts):
            raise NotCachedError(f"there is no pin {pin_id!r}; it may have expired")
        view = self._view(pin)
        self.pins.drop(pin)
        return view

    def delete(self, tokens: Sequence[int], salt: str, start: int = 0) -> tuple[DeletionView, Deletion]:
        """Delete what ends behind token ``start`` of the prompt's whole units; pins on it end.

        The view is what :func:`deletion_view` says of the deletion at once.  Raises CacheLimitError.
        """
        self.tick()
        chain = self._chain(tokens, salt)
        keys = [
            key
            for spec in self._core.layout.groups
            for ordinal, key in enumerate(unit_keys(spec, chain))
            if (ordinal + 1) * spec.hash_unit > start
        ]
        pins = self.pins.touching(keys)
        deletion = self.removal.delete(keys, chain.seed)
        for pin in pins:
            self.pins.drop(pin)
        view = DeletionView(
            len(tokens),
            len(keys),
            {str(tier): count for tier, count in deletion.forgotten.items()},
            tiers_of(deletion),
            tuple(pin.pin_id for pin in pins),
        )
        return view, deletion

    def summary(self, salts: Sequence[str]) -> CacheSummary:
        """Everybody's use of the tiers, and the pins of the key spaces of ``salts``."""
        self.tick()
        core, seeds = self._core, set(map(self._seed, salts))
        held = {tier.tier: len(self.pins.held(tier.tier)) for tier in core.owned()}
        units: Counter[tuple[str, int]] = Counter()
        for (tier, group), count in core.directory.units.items():
            units[str(tier), group] += count
        return CacheSummary(
            tuple(self._view(pin) for pin in self.pins if pin.seed in seeds),
            tuple(
                TierPins(
                    str(tier.tier),
                    held[tier.tier],
                    int(core.config.pinned_share * tier.pool.capacity),
                    tier.pool.capacity,
                )
                for tier in core.owned()
            ),
            {
                str(tier.tier): tuple(units[str(tier.tier), spec.group] for spec in core.layout.groups)
                for tier in core.owned()
            },
            self.removal.pending,
            {str(tier): len(keys) for tier, keys in core.hidden.items() if keys},
        )

    # What the hierarchy calls.

    def tick(self) -> None:
        """End what is due: pins, deletions, what requests computed for a time.  Cheap when nothing is."""
        self.pins.expire()
        self.removal.settle()
        lifetimes, core = self._core.lifetimes, self._core
        if len(lifetimes):
            due = lifetimes.due(self._clock())
            if due:
                self.removal.forget(due)
            lifetimes.prune(core.directory, len(core.directory))

    def give_way(self, short_by: int) -> bool:
        """Pins yield to a request that nobody else alive can make room for."""
        if any(request.table is not None for request in self._requests.values()):
            return False
        if any(job.state is not JobState.IN_DOUBT for job in self._core.book):
            return False
        return self.pins.give_way(short_by)

    def end(self, request: Residency) -> None:
        """The request is over."""
        for key in self._core.lifetimes.end(request, self._clock()):
            entry = self._core.directory.get(key)
            if entry is not None:
                self._let_go_first(entry)

    def _let_go_first(self, entry: Entry) -> None:
        entry.spend()
        for tier in self._core.owned():
            place = entry.places.get(tier.tier)
            if place is not None:
                tier.reconsider(place.slot)

    def released(self) -> list[Entry]:
        """Entries that do not expire any more since somebody else uses them: tiers that outlive us may have them."""
        keys = self._core.lifetimes.take_released()
        return [entry for key in keys if (entry := self._core.directory.get(key)) is not None]

    def _chain(self, tokens: Sequence[int], salt: str) -> KeyChain:
        chain = KeyChain(self._seed(salt), self._core.layout.base_unit)
        chain.update(tokens)
        return chain

    def _view(self, pin: Pin) -> PinView:
        return PinView(
            pin.pin_id,
            pin.tokens,
            max(0.0, pin.expires - self._clock()),
            {str(tier): len(lease.slots) for tier, lease in pin.leases.items()},
            pin.yielded,
        )


def tiers_of(deletion: Deletion) -> dict[str, str]:
    """What became of a deletion in tiers that are asked."""
    return {str(tier): outcome.value for tier, outcome in deletion.asked.items()}
