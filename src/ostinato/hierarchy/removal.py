"""Deleting keys from all tiers, for good.

Owns: what is forgotten at once, what other tiers are asked to delete, and the fence until they have.  Does not own:
slots (``cache.pool`` frees), which keys are meant (``control``).  Thread: the scheduler's only.

::

    owned tiers     withdrawn at once: a store or load that is still writing them ends without effect
    asked tiers     hidden: not asked about, not offered -> asked to delete, again when no open store may still bring
                    them -> deleted: no longer hidden.  A tier that cannot delete: hidden for as long as we live
    open requests   keep their own blocks, and do not publish the keys again

Between the tiers, nobody finds a deleted key at any moment after :meth:`Removal.delete` has returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from ostinato.cache.keys import BlockKey
from ostinato.errors import CacheLimitError
from ostinato.hierarchy.residency import Residency
from ostinato.hierarchy.tiers import Core
from ostinato.ids import JobId, RequestId, TierId
from ostinato.transfer.job import JobKind

MAX_HIDDEN: Final = 1 << 18
"""Keys that may be hidden from one tier which cannot delete."""


class Outcome(Enum):
    """What became of keys in an asked tier."""

    PENDING = "pending"
    """Nobody finds them any more; the tier has not confirmed yet that they are gone."""
    DELETED = "deleted"
    HIDDEN = "hidden"
    """The tier cannot delete: this process does not find them, another one may."""


@dataclass(slots=True)
class Deletion:
    """One call of :meth:`Removal.delete`.  ``forgotten``: copies in owned tiers; ``asked``: brought up to date."""

    forgotten: dict[TierId, int] = field(default_factory=dict)
    asked: dict[TierId, Outcome] = field(default_factory=dict)

    @property
    def is_settled(self) -> bool:
        return Outcome.PENDING not in self.asked.values()


@dataclass(slots=True)
class _Open:
    """What an asked tier has not confirmed.

    ``jobs``: stores of ours that may still bring the keys back.  ``asked``: the tier is at it; a tier is asked for one
    deletion at a time, so that what it confirms began after the last of these stores had ended.
    """

    deletion: Deletion
    tier: TierId
    keys: tuple[BlockKey, ...]
    jobs: set[JobId]
    asked: bool = False


class Removal:
    """``requests``: the hierarchy's own map."""

    def __init__(self, core: Core, requests: Mapping[RequestId, Residency]) -> None:
        self._core = core
        self._requests = requests
        self._open: list[_Open] = []
        self._unable: set[TierId] = set()

    @property
    def pending(self) -> int:
        """Deletions that some tier has not confirmed."""
        return len(self._open)

    def delete(self, keys: Sequence[BlockKey], seed: bytes) -> Deletion:
        """Delete ``keys``, which are of the key space that ``seed`` starts.

        Raises CacheLimitError, and nothing happens, when a tier that cannot delete has too much hidden already.
        """
        core = self._core
        for tier in self._unable:
            if len(core.hidden[tier]) + len(keys) > MAX_HIDDEN:
                raise CacheLimitError(
                    f"tier {tier} cannot delete, and {len(core.hidden[tier])} of its keys are hidden already; "
                    "delete them where the tier lives, and start the server anew"
                )
        deletion = Deletion(self.forget(keys))
        erased = frozenset(key.digest for key in keys)
        for request in self._requests.values():
            if request.chain.seed == seed:
                request.erased = (*request.erased, erased)
            for answers in request.answers.values():
                answers.update((key, False) for key in keys if key in answers)
        for tier in core.asked if keys else ():
            deletion.asked[tier] = Outcome.PENDING
            core.hidden[tier].update(keys)
            self._open.append(_Open(deletion, tier, tuple(keys), self._stores(tier, set(keys))))
        self.settle()
        return deletion

    def forget(self, keys: Iterable[BlockKey]) -> dict[TierId, int]:
        """Withdraw ``keys`` from our own tiers; returns how many copies were there."""
        core = self._core
        forgotten = {tier.tier: 0 for tier in core.owned()}
        for key in keys:
            for tier in core.owned():
                place = core.directory.withdraw(key, tier.tier)
                if place is not None:
                    forgotten[tier.tier] += 1
                    tier.reconsider(place.slot)
        return forgotten

    def settle(self) -> None:
        """Ask tiers that have not confirmed yet.  Cheap when nothing is open."""
        if self._open:
            busy = {item.tier for item in self._open if item.asked}
            self._open = [item for item in self._open if not self._is_done(item, busy)]

    def _is_done(self, item: _Open, busy: set[TierId]) -> bool:
        core = self._core
        item.jobs = {job for job in item.jobs if core.book.get(job) is not None}
        if item.jobs or (item.tier in busy and not item.asked):
            return False
        answer = core.asked[item.tier].remove(item.keys)
        if answer is None:
            item.asked = True
            busy.add(item.tier)
            return False
        busy.discard(item.tier)
        if answer is False:
            self._unable.add(item.tier)
            item.deletion.asked[item.tier] = Outcome.HIDDEN
            return True
        item.deletion.asked[item.tier] = Outcome.DELETED
        hidden = core.hidden[item.tier]
        hidden.subtract(item.keys)
        for key in item.keys:
            if hidden[key] <= 0:
                del hidden[key]
        return True

    def _stores(self, tier: TierId, keys: set[BlockKey]) -> set[JobId]:
        return {
            job.job_id
            for job in self._core.book
            if job.order.kind is JobKind.STORE
            and job.order.tier == tier
            and any(move.key in keys for move in job.order.moves)
        }
