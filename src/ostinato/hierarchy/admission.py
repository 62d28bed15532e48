"""Admitting a request: find its longest hit over all tiers, hold it, and order what must be loaded.

Owns: the sequence ask -> match -> check room -> hold -> order.  Does not own: when a request is admitted (scheduler),
what happens to the loads later (``settlement``).  All or nothing: either the table stands and every load is ordered,
or nothing has changed.  Thread: the scheduler's only.

Why hold before taking: taking slots may evict idle ones, and the hit's own blocks are idle until they are held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from ostinato.cache.directory import Entry, Place
from ostinato.cache.keys import BlockKey
from ostinato.cache.pool import Lease, SlotState
from ostinato.cache.presence import HitPlan, Presence, tokens_by_tier
from ostinato.cache.table import BlockTable
from ostinato.hierarchy.choosing import Chooser
from ostinato.hierarchy.following import PATIENCE_S, Followers
from ostinato.hierarchy.residency import Admission, HitReport, NoRoom, Parked, Ready, Residency
from ostinato.hierarchy.tiers import Core
from ostinato.ids import DEVICE, HOLE, JobId, Ordinal, RequestId, SlotId, Step, TicketId, TierId
from ostinato.transfer.job import JobKind, Move, PageCopy, TransferOrder
from ostinato.transfer.planner import AdmissionPlan, PagePlan, plan_admission


class Admitter:
    """``requests``: the hierarchy's own map, to see what others are parked on."""

    def __init__(self, core: Core, clock: Callable[[], float], requests: Mapping[RequestId, Residency]) -> None:
        self._core = core
        self._clock = clock
        self._requests = requests
        self._chooser = Chooser(core, clock)
        self.costs = self._chooser.costs
        self.followers = Followers(core, clock, requests)
        self._tickets = 0
        self._marked: list[Entry] = []

    def take_marked(self) -> list[Entry]:
        """Entries on the device that hits made boundaries, since the last call."""
        marked, self._marked = self._marked, []
        return marked

    def admit(self, request: Residency, step: Step) -> Admission:
        assert request.table is None and request.ticket is None, "admitted twice"
        core = self._core
        if self.followers.must_wait(request):
            return self._park(request, set(), self._clock() + PATIENCE_S)
        blocked = request.needs + self._reserved() - core.device.pool.available
        if blocked > 0 and request.matched_at == core.directory.written:
            return NoRoom(blocked)
        if core.config.reuse:
            request.chain.update(request.tokens)
        choice = self._chooser.choose(request)
        if choice is None:
            return self._park(request, set(), request.probing_until or 0.0)
        request.answers.clear()
        plan, needs = self._plan(request, choice.presence)
        if core.config.coalesce and self.followers.follow(request, plan.hit.tokens):
            return self._park(request, set(), self._clock() + PATIENCE_S)
        short_by = needs + self._reserved() - core.device.pool.available
        if short_by > 0:
            # Until that much is available, or something new is cached, there is no point in matching again.
            request.needs, request.matched_at = needs, core.directory.written
            return NoRoom(short_by)
        request.needs = 0
        self.costs.declined_tokens += choice.declined
        jobs = self._hold(request, plan, step)
        request.hit = replace(request.hit, declined=choice.declined)
        self._mark(request, plan.hit)
        self._note_junction(request, choice.presence, plan.hit.tokens)
        if jobs or plan.joins:
            return self._park(request, jobs | plan.joins, self._clock() + core.config.load_deadline_s)
        return Ready(request.hit)

    def _plan(self, request: Residency, presence: Presence) -> tuple[AdmissionPlan, int]:
        """The longest hit that fits an empty pool, and the pages that it needs.

        A hit that ends inside a page holds two of them, the source and the private copy; in a pool that has just room
        for the prompt that may be one too many for ever, so a cut between pages is tried, and then no hit at all.
        """
        core = self._core
        between_pages = math.lcm(*(spec.page_tokens for spec in core.layout.groups))
        # The last token is always computed: its logits are what the request is for.
        cap = len(request.tokens) - 1 if core.config.reuse and request.reuse else 0
        for limit in (cap, cap // between_pages * between_pages, 0):
            plan = plan_admission(core.layout, presence.plan(limit))
            needs = self._needs(request, plan)
            if needs <= core.device.pool.reachable:
                break
        return plan, needs

    def _needs(self, request: Residency, plan: AdmissionPlan) -> int:
        """Available pages that the whole prompt takes: new ones, and shared ones that are idle now."""
        core = self._core
        pool = core.device.pool
        held = set(plan.shared_slots) | set(plan.copied_slots)
        idle = sum(pool.state(slot) is SlotState.IDLE for slot in held)
        # Windows hold what one step computes besides themselves: with a long hit that is little.
        in_flight = min(core.config.step_tokens, len(request.tokens) - plan.hit.tokens)
        peak = core.layout.peak_pages(len(request.tokens), in_flight)
        return max(peak - len(plan.shared_slots), plan.private_pages) + idle

    def _reserved(self) -> int:
        """Pages that parked requests will still need to finish their prompts; nobody else may take them."""
        layout, step_tokens = self._core.layout, self._core.config.step_tokens
        reserved = 0
        for request in self._requests.values():
            if request.ticket is not None and request.table is not None:
                in_flight = min(step_tokens, len(request.tokens) - request.computed)
                reserved += max(0, layout.peak_pages(len(request.tokens), in_flight) - request.table.held())
        return reserved

    def _hold(self, request: Residency, plan: AdmissionPlan, step: Step) -> set[JobId]:
        """Make the table, hold every source, order the loads."""
        core, pool = self._core, self._core.device.pool
        owner = f"table {request.request_id}"
        lease = pool.share(plan.shared_slots, owner)
        copied = plan.copied_slots
        copy_lease = pool.share(copied, f"copy for {request.request_id}") if copied else None
        sources = {tier: self._hold_sources(tier, plan, request) for tier in _lower_tiers(plan)}
        taken = pool.take(plan.private_pages, owner)
        assert taken is not None, "room was checked"
        fresh = iter(list(taken.slots))
        lease.absorb(taken)
        table = BlockTable(request.request_id, core.layout.groups, lease)
        moves: dict[TierId, list[Move]] = {}
        copies: list[PageCopy] = []
        for page in plan.pages:
            slot = page.share if page.share != HOLE else next(fresh)
            row = table.rows[page.group]
            row.extend([HOLE] * (page.page - len(row)))
            row.append(slot)
            if page.share == HOLE:
                self._fill(request, page, slot, moves, copies)
        table.skip(plan.hit.tokens)
        request.table = table
        request.copies, request.copy_lease = tuple(copies), copy_lease
        request.computed = plan.hit.tokens
        request.boundaries_at.clear()
        request.committed = [plan.hit.tokens // spec.hash_unit for spec in core.layout.groups]
        request.hit = self._report(plan, moves)
        return {self._order(tier, moves[tier], sources[tier], lease, step) for tier in moves}

    def _hold_sources(self, tier: TierId, plan: AdmissionPlan, request: Residency) -> Lease | None:
        owned = self._core.lower.get(tier)
        if owned is None:
            return None
        slots = [source.slot for page in plan.pages for _, source in page.units if source.tier == tier]
        return owned.pool.share(slots, f"load for {request.request_id}")

    def _fill(
        self,
        request: Residency,
        page: PagePlan,
        slot: SlotId,
        moves: dict[TierId, list[Move]],
        copies: list[PageCopy],
    ) -> None:
        spec = self._core.layout.groups[page.group]
        for ordinal, source in page.units:
            offset = ordinal % spec.page_units * spec.unit_stride
            if source.tier == DEVICE:
                copies.append(PageCopy(source.slot, slot, offset, spec.unit_bytes))
                continue
            key = BlockKey(spec.group, request.chain.digest(spec.hash_unit, ordinal))
            move = Move(key, Ordinal(ordinal), slot, source.slot, offset, spec.unit_bytes)
            moves.setdefault(source.tier, []).append(move)

    def _order(self, tier: TierId, moves: list[Move], source: Lease | None, table: Lease, step: Step) -> JobId:
        core = self._core
        job_id = core.book.new_id()
        targets = table.fork(f"load {job_id}", dict.fromkeys(move.device_slot for move in moves))
        order = TransferOrder(job_id, JobKind.LOAD, tier, tuple(moves), step)
        core.book.open(order, targets, source, core.config.load_deadline_s)
        for move in moves:
            place = Place(move.device_slot, core.device.pool.generation[move.device_slot], job_id)
            core.directory.write(move.key, move.ordinal, DEVICE, place, boundary=True)
        return job_id

    def _report(self, plan: AdmissionPlan, moves: dict[TierId, list[Move]]) -> HitReport:
        layout = self._core.layout
        pages = [0] * len(layout.groups)
        for page in plan.pages:
            pages[page.group] += 1
        return HitReport(
            plan.hit.tokens,
            tuple(tokens_by_tier(layout, plan.hit, self._core.order).items()),
            tuple(pages),
            sum(move.length for batch in moves.values() for move in batch),
        )

    def _mark(self, request: Residency, hit: HitPlan) -> None:
        """The cut of a hit is a junction: others resumed here, so more may."""
        directory = self._core.directory
        tick = directory.next_tick()
        for spec, sources in zip(self._core.layout.groups, hit.sources, strict=True):
            for ordinal in sources:
                entry = directory.get(BlockKey(spec.group, request.chain.digest(spec.hash_unit, ordinal)))
                if entry is None:
                    continue
                entry.use(tick)
                self._core.lifetimes.use(request, entry.key)
                if not entry.boundary:
                    entry.boundary = True
                    self._marked.append(entry)

    def _note_junction(self, request: Residency, presence: Presence, hit: int) -> None:
        """Attention remembers this prompt further than any checkpoint: where it ends, prompts part.

        The next prompt that parts there finds a checkpoint.
        """
        reach = presence.reach(len(request.tokens) - 1 if self._core.config.reuse and request.reuse else 0)
        request.junctions = {reach} if reach > hit else set()

    def _park(self, request: Residency, jobs: set[JobId], deadline: float) -> Parked:
        self._tickets += 1
        request.ticket = Parked(TicketId(self._tickets), deadline, set(jobs))
        return request.ticket


def _lower_tiers(plan: AdmissionPlan) -> set[TierId]:
    return {source.tier for page in plan.pages for _, source in page.units} - {DEVICE}
