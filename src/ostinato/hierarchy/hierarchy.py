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
from ostinato.cache.hints import PLAIN, CacheHints
from ostinato.cache.keys import KeyChain
from ostinato.cache.ports import Observer
from ostinato.cache.table import BlockTable, StatePlan
from ostinato.hierarchy.admission import Admitter
from ostinato.hierarchy.boundaries import Boundaries, Handed
from ostinato.hierarchy.checkpoints import Checkpoints
from ostinato.hierarchy.control import CacheControl
from ostinato.hierarchy.residency import Admission, NoRoom, Residency, Woken
from ostinato.hierarchy.settlement import Settlement
from ostinato.hierarchy.stores import Stores
from ostinato.hierarchy.tiers import Core
from ostinato.ids import JobId, RequestId, Step
from ostinato.transfer.job import PageCopy, TransferOrder, TransferReport

SMALL_CHUNK = 64
"""Tokens; smaller prefill chunks than this waste too much of the machine."""


class CacheHierarchy:
    """``seed(salt)`` starts a request's key chain; requests with different seeds never share a block."""

    def __init__(self, core: Core, seed: Callable[[str], bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self.core = core
        self.requests: dict[RequestId, Residency] = {}
        self.observers: tuple[Observer, ...] = ()
        self.handed_over: list[Handed] = []
        """Checkpoints that became boundaries in the step that is being settled."""
        self.step = Step(0)
        """The last step that is settled."""
        self.computed_step = Step(0)
        """The last step whose results were taken in."""
        self._seed = seed
        self._clock = clock
        self._admitter = Admitter(core, clock, self.requests)
        self._boundaries = Boundaries(core, self.handed_over)
        self._checkpoints = Checkpoints(core)
        self._stores = Stores(core, clock)
        self.costs = self._admitter.costs
        """What loading and computing take; the scheduler says how long a step took."""
        self.followers = self._admitter.followers
        self._settlement = Settlement(core, self.requests, self.costs)
        self.control = CacheControl(core, self.requests, seed, clock)

    # One request.

    def open(
        self,
        request_id: RequestId,
        tokens: Sequence[int],
        salt: str = "",
        reuse: bool = True,
        hints: CacheHints = PLAIN,
    ) -> None:
        """Begin to know a request.  ``tokens`` is read again on every call: the caller appends what it samples.

        Without ``reuse`` it is computed from its first token on; what it computes is kept for others all the same.
        """
        assert request_id not in self.requests, f"{request_id} is open already"
        chain = KeyChain(self._seed(salt), self.core.layout.base_unit)
        self.requests[request_id] = Residency(request_id, tokens, len(tokens), chain, reuse, hints=hints)

    def admit(self, request_id: RequestId) -> Admission:
        request = self.requests[request_id]
        for observer in self.observers:
            observer.on_admit(request_id, len(request.tokens))
        self.control.tick()
        answer = self._admitter.admit(request, self.step)
        for make_room in (self._stores.make_room, self.control.give_way):
            if isinstance(answer, NoRoom) and make_room(answer.short_by):
                answer = self._admitter.admit(request, self.step)
        self._stores.offer(self.control.released(), self.step)
        self._stores.secure(self._admitter.take_marked(), self.step)
        return answer

    def grow(self, request_id: RequestId, tokens: int) -> bool:
        """Make room to compute up to token ``tokens`` in every group, or change nothing and return False.

        True obliges: the chunk is computed in the next step, or the request gives up its table.
        """
        request = self.requests[request_id]
        table, pool = _table(request), self.core.device.pool
        stops = self._checkpoints.stops(request, tokens)
        count = table.missing_pages(request.computed, stops)
        if count > pool.available:
            self._stores.make_room(count - pool.available)
        taken = pool.take(count, table.lease.owner)
        if taken is None:
            return False
        request.state = table.grow(request.computed, stops, taken)
        return True

    def chunk_without_loss(self, request_id: RequestId, wanted: int) -> int:
        """How many of the next ``wanted`` tokens to compute in one step.

        A big chunk passes through many window pages at once.  While what the request finally keeps fits beside all
        boundaries, smaller chunks do too, and nothing that others may resume at is lost for the passage.
        """
        request, core = self.requests[request_id], self.core
        table, start, tokens = _table(request), request.computed, len(request.tokens)
        if core.unsaved(core.layout.resident_pages(tokens) - table.held()):
            return wanted
        while wanted > SMALL_CHUNK and core.unsaved(table.missing_pages(start, (start + wanted,))):
            wanted = max(SMALL_CHUNK, wanted // 2)
        return wanted

    def take_orders(self, request_id: RequestId, step: Step) -> tuple[tuple[PageCopy, ...], StatePlan | None]:
        """What the worker must know beside the rows for the request's part of ``step``.

        Copies to make before its first tokens, and where the chunk that :meth:`grow` made room for reads and writes
        recurrent state (None without any).
        """
        request = self.requests[request_id]
        orders = request.copies, request.state
        request.copies, request.state = (), None
        if request.copy_lease is not None:
            request.copy_lease.release(fence=step)
            request.copy_lease = None
        return orders

    def commit(self, request_id: RequestId, computed: int, step: Step) -> None:
        """``step`` has computed the request's KV up to token ``computed``: publish full units, let stale pages go."""
        request = self.requests[request_id]
        table = _table(request)
        before, request.computed = request.computed, computed
        self.computed_step = step
        if self.core.config.reuse and not request.hints.no_store:
            published = self._boundaries.publish(request, table)
            # Marked before anything is offered, so that boundaries come first when there is not room for all.
            marked = self._boundaries.mark_reached(request, before)
            self._stores.offer(published, step)
            fresh = set(published)
            self._stores.secure([entry for entry in marked if entry not in fresh], step)
        for observer in self.observers:
            observer.on_commit(request_id, computed)
        table.trim(computed, fence=step)

    def finish(self, request_id: RequestId, fence: Step | None = None) -> None:
        """The request is over, in whatever state it is: finished, aborted, never admitted.

        ``fence``: the step that may still be computing it.
        """
        request = self.requests[request_id]
        self._give_up_table(request, fence)
        del self.requests[request_id]
        self.control.end(request)

    def preempt(self, request_id: RequestId, fence: Step | None = None) -> None:
        """Take the request's blocks away; what was published stays hittable, so that it resumes near where it was."""
        self._give_up_table(self.requests[request_id], fence)

    def table(self, request_id: RequestId) -> BlockTable:
        """The block table of an admitted request; read only."""
        return _table(self.requests[request_id])

    # All requests.

    def settle(self, step: Step, reports: Sequence[TransferReport]) -> list[Woken]:
        """Everything up to ``step`` is finished and ``reports`` arrived; returns the requests that can go on."""
        self.step = self.computed_step = step
        self.core.device.pool.settle(step)
        self._settlement.apply(reports)
        self._settlement.expire(self._clock())
        self.control.tick()
        woken = self._settlement.wake()
        for item in woken:
            if not item.ok:
                self._give_up_table(self.requests[item.request_id], None)
        self._stores.demote(step)
        self._stores.catch_up(step)
        for observer in self.observers:
            observer.on_step_end(step)
        self.handed_over.clear()
        return woken

    def dispatch(self) -> tuple[tuple[TransferOrder, ...], tuple[JobId, ...]]:
        """Orders and cancellations that go out with the next plan."""
        return self.core.book.dispatch(self._clock()), self._settlement.take_cancelled()

    def audit(self) -> None:
        """Raise AuditError if any slot, key or reference is unaccounted for."""
        core = self.core
        tiers = core.owned()
        for tier in tiers:
            audit_pool(tier.pool, tier.retention, core.directory)
        audit_tables(request.table for request in self.requests.values() if request.table is not None)
        audit_directory(core.directory, {tier.tier: tier.pool for tier in tiers})

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
        table, request.table, request.state = request.table, None, None
        if self.core.config.reuse and request.computed and not request.hints.no_store:
            self._stores.secure(self._boundaries.close(request), self.step)
        table.lease.release(fence)
        request.computed = 0


def _table(request: Residency) -> BlockTable:
    assert request.table is not None, f"{request.request_id} is not admitted"
    return request.table
