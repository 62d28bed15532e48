"""Copying blocks to lower tiers: when they fill (eager), or when the device is about to evict them (lazy).

Owns: what is offered to which tier, and the share of the device that stores may pin.  Does not own: what a report
means (``settlement``).  A store holds nothing back: one that finds no room is put off, and forgotten when the device
evicts the block first.  An owned tier gets another chance when the block turns out to be a boundary, and once more
before the device evicts it; an asked tier is offered a block once: when it fills, or, a state checkpoint, when it turns
out to be a boundary (the others go nowhere: each is as big as many blocks, and all of them are on the way to one that
is kept).  What it wants and stores may not pin yet, or had to give back under pressure, goes as soon as they may.  A
block whose stores fail is soon left alone, or a broken tier would be kept busy for ever.
Thread: the scheduler's only.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ostinato.cache.directory import Entry, Place
from ostinato.cache.pool import Lease
from ostinato.cache.retention import rank_of
from ostinato.hierarchy.tiers import Core, OwnedTier, StoreMode
from ostinato.ids import DEVICE, HOLE, JobId, SlotId, Step, TierId
from ostinato.transfer.book import release
from ostinato.transfer.job import Blocks, JobKind, JobState, Move, TransferOrder

log: Final = logging.getLogger(__name__)
LOOK_AHEAD_STEPS = 3
"""Evictions looked ahead for, in steps: what the next one takes, what is being copied, and one that is late."""
MAX_STORE_FAILURES = 3
"""After so many a block is not copied down any more, until it is computed or loaded anew."""
WARN_EVERY_S = 60.0


class Stores:
    """Orders STORE jobs for the entries it is shown.  ``clock`` only limits how often something is logged."""

    def __init__(self, core: Core, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock
        self._warned = -math.inf
        most = core.device.pool.capacity
        self._put_off: defaultdict[TierId, deque[list[Entry]]] = defaultdict(lambda: deque(maxlen=most))
        """Pages that asked tiers wanted while stores pinned too many, or that pressure took back.

        The oldest go when there are too many.
        """
        per_step = sum(spec.pages(core.config.step_tokens) + 1 for spec in core.layout.groups)
        self._ahead = LOOK_AHEAD_STEPS * per_step
        self._seen: tuple[int, ...] = ()
        """State of things when the last look found nothing to do."""

    def offer(self, entries: Sequence[Entry], step: Step) -> None:
        """Blocks that just became full: eager tiers and asked tiers take them now."""
        storable = [entry for entry in entries if self._is_storable(entry)]
        self._store_eagerly(storable, step)
        self._ask(storable, step)

    def secure(self, entries: Sequence[Entry], step: Step) -> None:
        """Blocks that turned out to be boundaries: eager tiers take what they do not have yet."""
        storable = [entry for entry in entries if self._is_storable(entry)]
        self._store_eagerly(storable, step)
        self._ask([entry for entry in storable if self._core.is_checkpoint(entry)], step)

    def _store_eagerly(self, entries: Sequence[Entry], step: Step) -> None:
        for tier in self._core.lower.values():
            if entries and tier.mode is StoreMode.EAGER:
                self._store(tier, entries, step)

    def _ask(self, entries: Sequence[Entry], step: Step) -> None:
        if not entries:
            return
        for tier_id, probe in self._core.asked.items():
            shown = [entry for entry in entries if self._core.may_have(tier_id, entry.key)]
            wanted = probe.offer([entry.key for entry in shown])
            self._core.answers[tier_id].declined += len(shown) - sum(wanted)
            self._store_asked(tier_id, [entry for entry, wants in zip(shown, wanted, strict=True) if wants], step)

    def catch_up(self, step: Step) -> None:
        """Asked tiers get what was put off, as far as it is still on the device and stores may pin it now."""
        for tier, waiting in self._put_off.items():
            count = min(len(waiting), pin_room(self._core)) if waiting else 0
            pages = [waiting.popleft() for _ in range(count)]
            self._store_asked(tier, [entry for page in pages for entry in page if self._is_storable(entry)], step)

    def _store_asked(self, tier: TierId, entries: Sequence[Entry], step: Step) -> None:
        pages, rest = self._pages(entries)
        if pages:
            order_store(self._core, tier, [(entry, HOLE) for page in pages for entry in page], None, step)
        if rest:
            self._put_off[tier].extend(rest)

    def make_room(self, short_by: int) -> bool:
        """Pressure: take back the stores that no mover has seen, if that gives ``short_by`` device slots.

        Asked tiers are given later what the device still has then; owned ones get their own second chances.
        """
        revoked = _take_back(self._core, short_by)
        for order in revoked or ():
            if order.tier in self._core.asked and not order.blocks:  # a connector's own order is its own affair
                pages: dict[SlotId, list[Entry]] = {}
                for move in order.moves:
                    entry = self._core.directory.get(move.key)
                    if entry is not None:
                        pages.setdefault(move.device_slot, []).append(entry)
                self._put_off[order.tier].extend(pages.values())
        return revoked is not None

    def demote(self, step: Step) -> None:
        """Under pressure, copy what the device would evict next and no owned tier below holds."""
        core = self._core
        if not core.lower or len(core.device.pool.free_slots) >= self._ahead:
            return
        state = self._state()
        if state == self._seen:
            return
        entries = [
            entry
            for slot in core.device.retention.candidates(self._ahead)
            for entry in core.directory.contents(DEVICE, slot)
            if len(entry.places) == 1 and self._is_storable(entry)
        ]
        for tier in core.lower.values():
            self._store(tier, entries, step)
        self._seen = state if not entries else ()

    def _state(self) -> tuple[int, ...]:
        """Changes with everything that can change what is next to go, or whether it is held below."""
        core, device = self._core, self._core.device
        lost = core.book.stats.failed_moves + sum(tier.retention.evictions for tier in core.lower.values())
        return (core.directory.written, core.directory.tick, device.retention.evictions, len(device.retention), lost)

    def _is_storable(self, entry: Entry) -> bool:
        place = entry.places.get(DEVICE)
        if place is None or not place.ready or entry.spent or entry.failed_stores >= MAX_STORE_FAILURES:
            return False
        return entry.boundary or not self._core.is_checkpoint(entry)

    def _pages(self, entries: Iterable[Entry]) -> tuple[list[list[Entry]], list[list[Entry]]]:
        """Entries by device page, the most valuable first: those that stores may pin, and the rest."""
        pages: dict[SlotId, list[Entry]] = {}
        for entry in entries:
            pages.setdefault(entry.places[DEVICE].slot, []).append(entry)
        pinned, room = self._core.book.stored_slots, pin_room(self._core)
        fit: list[list[Entry]] = []
        rest: list[list[Entry]] = []
        for page in sorted(pages.values(), key=rank_of, reverse=True):
            new = page[0].places[DEVICE].slot not in pinned  # a page that another tier gets as well is pinned anyway
            (fit if room > 0 or not new else rest).append(page)
            room -= new
        return fit, rest

    def _store(self, tier: OwnedTier, entries: Sequence[Entry], step: Step) -> None:
        """Order a store of what ``tier`` lacks of ``entries``: one tier slot per device page."""
        pages, _ = self._pages(entry for entry in entries if tier.tier not in entry.places)
        lease, targets = tier.take_for_store([rank_of(page) for page in pages], f"store to {tier.tier}")
        if len(targets) < len(pages):
            self._tell_if_blocked(tier, len(targets))
        pairs = [(entry, slot) for page, slot in zip(pages, targets, strict=False) for entry in page]
        if not pairs:
            lease.release()
            return
        job_id = order_store(self._core, tier.tier, pairs, lease, step)
        for entry, slot in pairs:
            place = Place(slot, tier.pool.generation[slot], job_id)
            self._core.directory.write(entry.key, entry.ordinal, tier.tier, place, entry.boundary)

    def _tell_if_blocked(self, tier: OwnedTier, taken: int) -> None:
        """A full tier is no news; one that cannot evict, because others hold its slots, is."""
        now = self._clock()
        if tier.pool.available or taken == tier.pool.capacity or now - self._warned < WARN_EVERY_S:
            return
        self._warned = now
        log.warning(
            "tier %s: all of its %d slots are in use by transfers; blocks are not copied there until some end",
            tier.tier,
            tier.pool.capacity,
        )


def order_store(
    core: Core,
    tier: TierId,
    pairs: Sequence[tuple[Entry, SlotId]],
    lease: Lease | None,
    step: Step,
    blocks: Blocks = (),
) -> JobId:
    """Order a store of device copies; each entry with its slot in an owned tier, or HOLE.  Pins each page once."""
    job_id = core.book.new_id()
    moves = []
    for entry, target in pairs:
        spec = core.layout.groups[entry.key.group]
        offset = entry.ordinal % spec.page_units * spec.unit_stride
        source = entry.places[DEVICE].slot
        moves.append(Move(entry.key, entry.ordinal, source, target, offset, spec.unit_bytes))
    held = core.device.pool.share([move.device_slot for move in moves], f"store {job_id}")
    order = TransferOrder(job_id, JobKind.STORE, tier, tuple(moves), step, blocks)
    core.book.open(order, held, lease, core.config.store_deadline_s)
    return job_id


def pin_room(core: Core) -> int:
    """Device slots that stores may still pin."""
    return max(0, int(core.config.pin_share * core.device.pool.capacity) - len(core.book.stored_slots))


def _take_back(core: Core, short_by: int) -> list[TransferOrder] | None:
    """Revoke all queued stores; None, and nothing happens, when that would not give ``short_by`` device slots."""
    queued = [job for job in core.book if job.state is JobState.QUEUED and job.order.kind is JobKind.STORE]
    pins = Counter(slot for job in queued for slot in job.device_lease.slots)
    if sum(core.device.pool.references(slot) == count for slot, count in pins.items()) < short_by:
        return None
    revoked = core.book.revoke(JobKind.STORE)
    for job in revoked:
        if job.order.tier in core.lower:
            for move in job.order.moves:
                core.directory.withdraw(move.key, job.order.tier)
        release(job)
    return [job.order for job in revoked]
