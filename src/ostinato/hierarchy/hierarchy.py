"""The memory hierarchy, as the scheduler sees it: its only door to the cache.

Owns: the life of each request's cache from ``open`` to ``finish``, and the calling order of the parts.  Does not own:
matching and holding (``admission``), copying down (``stores``), outcomes (``settlement``), freeing (``cache.pool``).
Invariant: between calls the audit holds.  Thread: the scheduler's only; deterministic given clock and reports.

::

    open -> admit -> Ready ---------------------> grow / commit ... -> finish
               |-> Parked -> settle() -> Woken -----^     |-> preempt -> admit ...
               |-> NoRoom (try again later)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ostinato.cache.audit import audit_directory, audit_pool, audit_tables
from ostinato.cache.directory import Entry, Place
from ostinato.cache.keys import BlockKey, KeyChain
from ostinato.cache.kinds import keeps_interior
from ostinato.cache.ports import Observer
from ostinato.cache.table import BlockTable
from ostinato.hierarchy.admission import Admitter
from ostinato.hierarchy.residency import Admission, HitReport, NoRoom, Residency, Woken
from ostinato.hierarchy.settlement import Settlement
from ostinato.hierarchy.stores import Stores
from ostinato.hierarchy.tiers import Core
from ostinato.ids import DEVICE, JobId, Ordinal, RequestId, SlotId, Step
from ostinato.transfer.job import PageCopy, TransferOrder, TransferReport


class CacheHierarchy:
    """``seed(salt)`` starts a request's key chain; requests with different seeds never share a block."""

    def __init__(self, core: Core, seed: Callable[[str], bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self.core = core
        self.requests: dict[RequestId, Residency] = {}
        self.observers: tuple[Observer, ...] = ()
        self.step = Step(0)
        """The last step whose work is finished."""
        self._seed = seed
        self._clock = clock
        self._admitter = Admitter(core, clock, self._reserved)
        self._stores = Stores(core, clock)
        self._settlement = Settlement(core, self.requests)

    # One request.

    def open(self, request_id: RequestId, tokens: Sequence[int], salt: str = "") -> None:
        """Begin to know a request.  ``tokens`` is read again on every call: the caller appends what it samples."""
        assert request_id not in self.requests, f"{request_id} is open already"
        chain = KeyChain(self._seed(salt), self.core.layout.base_unit)
        self.requests[request_id] = Residency(request_id, tokens, len(tokens), chain)

    def admit(self, request_id: RequestId) -> Admission:
        request = self.requests[request_id]
        answer = self._admitter.admit(request, self.step)
        if isinstance(answer, NoRoom) and self._stores.make_room(answer.short_by):
            answer = self._admitter.admit(request, self.step)
        return answer

    def grow(self, request_id: RequestId, tokens: int) -> bool:
        """Make room for the first ``tokens`` tokens in every group, or change nothing and return False."""
        request = self.requests[request_id]
        table, pool = _table(request), self.core.device.pool
        count = table.missing_pages(tokens)
        if count > pool.available:
            self._stores.make_room(count - pool.available)
        taken = pool.take(count, table.lease.owner)
        if taken is None:
            return False
        table.grow(tokens, taken)
        return True

    def take_copies(self, request_id: RequestId, step: Step) -> tuple[PageCopy, ...]:
        """Copies that the worker must make before the request's first tokens of ``step``."""
        request = self.requests[request_id]
        copies, request.copies = request.copies, ()
        if request.copy_lease is not None:
            request.copy_lease.release(fence=step)
            request.copy_lease = None
        return copies

    def commit(self, request_id: RequestId, computed: int, step: Step) -> None:
        """``step`` has computed the request's KV up to token ``computed``: publish full units, let stale pages go."""
        request = self.requests[request_id]
        table = _table(request)
        request.computed = computed
        if self.core.config.reuse:
            self._stores.offer(self._publish(request, table), step)
            if computed >= request.prompt_tokens:
                self._mark_prompt_end(request, step)
        for observer in self.observers:
            observer.on_commit(request_id, computed)
        table.trim(computed, fence=step)

    def finish(self, request_id: RequestId, fence: Step | None = None) -> None:
        """The request is over, in whatever state it is: finished, aborted, never admitted.

        ``fence``: the step that may still be computing it.
        """
        self._give_up_table(self.requests[request_id], fence)
        del self.requests[request_id]

    def preempt(self, request_id: RequestId, fence: Step | None = None) -> None:
        """Take the request's blocks away; what was published stays hittable, so that it resumes near where it was."""
        self._give_up_table(self.requests[request_id], fence)

    def rows(self, request_id: RequestId) -> tuple[list[SlotId], ...]:
        """The request's block table, per group; read only."""
        return _table(self.requests[request_id]).rows

    def hit(self, request_id: RequestId) -> HitReport:
        return self.requests[request_id].hit

    # All requests.

    def settle(self, step: Step, reports: Sequence[TransferReport]) -> list[Woken]:
        """Everything up to ``step`` is finished and ``reports`` arrived; returns the requests that can go on."""
        self.step = step
        self.core.device.pool.settle(step)
        self._settlement.apply(reports)
        self._settlement.expire(self._clock())
        woken = self._settlement.wake()
        for item in woken:
            if not item.ok:
                self._give_up_table(self.requests[item.request_id], None)
        self._stores.demote(step)
        for observer in self.observers:
            observer.on_step_end(step)
        return woken

    def dispatch(self) -> tuple[tuple[TransferOrder, ...], tuple[JobId, ...]]:
        """Orders and cancellations that go out with the next plan."""
        return self.core.book.dispatch(), self._settlement.take_cancelled()

    def busy(self) -> bool:
        """Whether any transfer is still open."""
        return len(self.core.book) > 0

    def reset(self, device_only: bool = False) -> int:
        """Forget what nobody holds; returns how many slots came free."""
        tiers = [self.core.device, *(() if device_only else self.core.lower.values())]
        return sum(tier.pool.drop_idle() for tier in tiers)

    def audit(self) -> None:
        """Raise AuditError if any slot, key or reference is unaccounted for."""
        core = self.core
        tiers = [core.device, *core.lower.values()]
        for tier in tiers:
            audit_pool(tier.pool, tier.retention, core.directory)
        audit_tables(request.table for request in self.requests.values() if request.table is not None)
        audit_directory(core.directory, {tier.tier: tier.pool for tier in tiers})

    def _reserved(self) -> int:
        """Pages that parked requests will still need to finish their prompts."""
        layout, step_tokens = self.core.layout, self.core.config.step_tokens
        return sum(
            max(0, layout.peak_pages(len(request.tokens), step_tokens) - request.table.held())
            for request in self.requests.values()
            if request.ticket is not None and request.table is not None
        )

    def _publish(self, request: Residency, table: BlockTable) -> list[Entry]:
        """Give keys to the units that are full now; returns the new entries."""
        core = self.core
        request.chain.update(request.tokens[: request.computed])
        published = []
        for spec in core.layout.groups:
            for ordinal in range(request.committed[spec.group], request.computed // spec.hash_unit):
                slot = table.slot(spec.group, ordinal // spec.page_units)
                key = BlockKey(spec.group, request.chain.digest(spec.hash_unit, ordinal))
                place = Place(slot, core.device.pool.generation[slot], None)
                entry = core.directory.write(key, Ordinal(ordinal), DEVICE, place, keeps_interior(spec.kind))
                if entry is not None:
                    published.append(entry)
            request.committed[spec.group] = request.computed // spec.hash_unit
        return published

    def _mark_prompt_end(self, request: Residency, step: Step) -> None:
        """Keep the cuts at which the same prompt, alone or continued, would resume."""
        granularity = self.core.layout.granularity
        for cut in {(request.prompt_tokens - 1) // granularity, request.prompt_tokens // granularity}:
            self._stores.offer(self._mark_boundary(request, cut * granularity), step)

    def _mark_boundary(self, request: Residency, cut: int) -> list[Entry]:
        """Mark what the cut requires; returns what was not marked before."""
        if cut in request.boundaries_at or not cut:
            return []
        request.boundaries_at.add(cut)
        marked = []
        for spec in self.core.layout.groups:
            if keeps_interior(spec.kind):
                continue
            for low, high in spec.kind.required(cut, spec.hash_unit):
                for ordinal in range(low, high):
                    entry = self.core.directory.get(BlockKey(spec.group, request.chain.digest(spec.hash_unit, ordinal)))
                    if entry is not None and not entry.boundary:
                        entry.boundary = True
                        marked.append(entry)
        return marked

    def _give_up_table(self, request: Residency, fence: Step | None) -> None:
        """Finish, abort and preemption alike: mark the last cut, note the use, release the request's own lease."""
        request.ticket = None
        if request.copy_lease is not None:
            request.copy_lease.release(fence)
            request.copy_lease, request.copies = None, ()
        if request.table is None:
            return
        for observer in self.observers:
            observer.on_release(request.request_id)
        table, request.table = request.table, None
        granularity = self.core.layout.granularity
        if self.core.config.reuse and request.computed:
            marked = self._mark_boundary(request, request.computed // granularity * granularity)
            self._stores.offer(marked, self.step)
            self._touch(request)
        table.lease.release(fence)
        request.computed = 0

    def _touch(self, request: Residency) -> None:
        tick = self.core.directory.next_tick()
        for spec in self.core.layout.groups:
            for ordinal in range(request.committed[spec.group]):
                entry = self.core.directory.get(BlockKey(spec.group, request.chain.digest(spec.hash_unit, ordinal)))
                if entry is not None:
                    entry.tick = tick


def _table(request: Residency) -> BlockTable:
    assert request.table is not None, f"{request.request_id} is not admitted"
    return request.table
