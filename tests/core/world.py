"""A fake scheduler that drives the hierarchy and the fake data plane, one decision at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from core.builders import make_core
from core.harness import AskedTier, Clock, FakePlan, Work, Worker, seed_of
from ostinato.cache.hints import PLAIN, CacheHints
from ostinato.cache.layout import CacheLayout
from ostinato.cache.pool import SlotState
from ostinato.hierarchy.hierarchy import CacheHierarchy
from ostinato.hierarchy.residency import NoRoom, Parked, Ready
from ostinato.hierarchy.tiers import CoreConfig, StoreMode
from ostinato.ids import DEVICE, JobId, RequestId, Step


@dataclass(slots=True, eq=False)
class Client:
    """One request: ``goal`` tokens in all, the prompt included."""

    name: RequestId
    salt: str
    tokens: list[int]
    goal: int
    computed: int = 0
    hits: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Setup:
    """What a world is made of."""

    layout: CacheLayout
    device_slots: int
    lower: tuple[tuple[str, int, StoreMode], ...] = ()
    asked: tuple[str, ...] = ()
    ranks: int = 1
    step_tokens: int = 16
    commit_first: bool = False
    greedy: bool = True


class World:
    """Waiting, parked and running requests; :meth:`plan` and :meth:`apply` alternate, anything may happen between."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.clock = Clock()
        self.asked = [AskedTier(name, setup.ranks, setup.greedy) for name in setup.asked]
        config = CoreConfig(
            step_tokens=setup.step_tokens, load_deadline_s=10.0, store_deadline_s=10.0, probe_deadline_s=4.0
        )
        asked = {tier.tier: tier for tier in self.asked}
        core = make_core(setup.layout, setup.device_slots, setup.lower, asked, config, setup.ranks)
        self.cache = CacheHierarchy(core, seed_of, self.clock)
        pools = {DEVICE: core.device.pool, **{name: tier.pool for name, tier in core.lower.items()}}
        self.worker = Worker(setup.layout, pools, self.asked, setup.ranks)
        self.step = Step(0)
        self.in_flight: FakePlan | None = None
        self.clients: dict[RequestId, Client] = {}
        self.waiting: list[Client] = []
        self.parked: list[Client] = []
        self.running: list[Client] = []
        self.finished: list[Client] = []
        self.preemptions = 0
        self.ordered: set[int] = set()
        self._names = 0

    # What a user does.

    def open(self, tokens: Sequence[int], decode: int = 0, salt: str = "", hints: CacheHints = PLAIN) -> Client:
        self._names += 1
        client = Client(RequestId(f"r{self._names}"), salt, list(tokens), len(tokens) + decode)
        self.clients[client.name] = client
        self.waiting.append(client)
        self.worker.learn(salt, client.tokens)
        self.cache.open(client.name, client.tokens, salt, hints=hints)
        return client

    def close(self, client: Client) -> None:
        """Finish or abort, in any state."""
        fence = None
        if self.in_flight is not None:
            fence = self.in_flight.step
            if client.name in self.in_flight.sequences:
                self.in_flight.sequences[client.name].alive = False
        for queue in (self.waiting, self.parked, self.running):
            if client in queue:
                queue.remove(client)
        del self.clients[client.name]
        self.cache.finish(client.name, fence)
        self.finished.append(client)

    # What a scheduler does.

    def preempt(self, client: Client) -> None:
        assert self.in_flight is None
        self.running.remove(client)
        self.cache.preempt(client.name)
        client.computed = 0
        self.waiting.insert(0, client)
        self.preemptions += 1

    def plan(self, chunks: Sequence[int] = (10**6,), admit: bool = True) -> None:
        assert self.in_flight is None
        self.step = Step(self.step + 1)
        plan = FakePlan(self.step)
        chosen: list[tuple[Client, int]] = []
        calm = self._plan_running(chosen, chunks)
        while admit and calm and self.waiting:
            client = self.waiting[0]
            match self.cache.admit(client.name):
                case NoRoom(short_by):
                    assert short_by > 0
                    break
                case Parked():
                    self.parked.append(self.waiting.pop(0))
                case Ready(hit):
                    self.running.append(self.waiting.pop(0))
                    self._start(client, hit.tokens)
                    self._choose(client, chosen, chunks)
        for client, count in chosen:
            copies, state = self.cache.take_orders(client.name, self.step)
            plan.copies.extend(copies)
            rows = [list(row) for row in self.cache.table(client.name).rows]
            stop = client.computed + count
            plan.sequences[client.name] = Work(client.salt, list(client.tokens), client.computed, stop, rows, state)
        self.in_flight = plan
        orders, _ = self.cache.dispatch()
        self.worker.accept(orders)
        self.ordered.update(order.job_id for order in orders)

    def apply(self, report_order: Sequence[int] = ()) -> None:
        plan, self.in_flight = self.in_flight, None
        assert plan is not None
        self.worker.execute(plan)
        if self.setup.commit_first:
            self._commit(plan)
        for woken in self.cache.settle(plan.step, self.worker.take_reports(report_order)):
            client = self.clients[woken.request_id]
            self.parked.remove(client)
            if woken.ok:
                self.running.append(client)
                self._start(client, self.cache.requests[client.name].hit.tokens)
            else:
                self.waiting.insert(0, client)
        if not self.setup.commit_first:
            self._commit(plan)
        for client in list(self.running):
            if client.computed == len(client.tokens):
                if client.computed == client.goal:
                    self.close(client)
                else:
                    client.tokens.append((client.tokens[-1] * 7 + len(client.tokens)) % 5)
                    self.worker.learn(client.salt, client.tokens)

    def _plan_running(self, chosen: list[tuple[Client, int]], chunks: Sequence[int]) -> bool:
        index, calm = 0, True
        while index < len(self.running):
            if self._choose(self.running[index], chosen, chunks):
                index += 1
            else:
                self.preempt(self.running[-1])
                calm = False
        return calm

    def _choose(self, client: Client, chosen: list[tuple[Client, int]], chunks: Sequence[int]) -> bool:
        chunk = min(chunks[len(chosen) % len(chunks)], self.setup.step_tokens)
        count = self.cache.chunk_without_loss(client.name, min(chunk, len(client.tokens) - client.computed))
        if not self.cache.grow(client.name, client.computed + count):
            return False
        chosen.append((client, count))
        return True

    def _start(self, client: Client, hit: int) -> None:
        assert hit % self.setup.layout.granularity == 0
        assert hit < len(client.tokens), "the last token is always computed"
        report = self.cache.requests[client.name].hit
        assert sum(count for _, count in report.by_tier) == hit
        client.computed = hit
        client.hits.append(hit)

    def _commit(self, plan: FakePlan) -> None:
        for name, work in plan.sequences.items():
            client = self.clients.get(RequestId(name))
            if client is not None:
                client.computed = work.stop
                self.cache.commit(client.name, work.stop, plan.step)

    # What a test does.

    def run(self, limit: int = 400, until: Callable[[], bool] | None = None) -> None:
        """Honest tiers and prompt movers until nothing is left to do; a hang raises."""
        for tier in self.asked:
            tier.mood = "honest"
        if self.in_flight is not None:
            self.apply()
        for _ in range(limit):
            if until is not None and until():
                return
            if not self.clients and not self.worker.errands and not len(self.cache.core.book):
                return
            self.plan()
            for errand in list(self.worker.open_errands()):
                self.worker.report(errand)
            self.apply()
            self.clock.now += 0.1
        waiting, parked = [c.name for c in self.waiting], [c.name for c in self.parked]
        raise AssertionError(f"no end in sight: waiting {waiting}, parked {parked}, busy {len(self.cache.core.book)}")

    def serve(self, tokens: Sequence[int], decode: int = 0, salt: str = "", hints: CacheHints = PLAIN) -> Client:
        """One request from start to end, alone."""
        client = self.open(tokens, decode, salt, hints)
        self.run(until=lambda: client in self.finished)
        return client

    def check_quiet(self) -> None:
        """Nothing is held, nothing is on its way."""
        self.cache.audit()
        assert not self.cache.requests
        assert not len(self.cache.core.book)
        core = self.cache.core
        for tier in (core.device, *core.lower.values()):
            assert not tier.pool.leases, [lease.owner for lease in tier.pool.leases]
            states = {tier.pool.state(slot) for slot in range(tier.pool.capacity)}
            assert states <= {SlotState.FREE, SlotState.IDLE}, states
            assert tier.pool.available == tier.pool.capacity

    def forge(self, job: int, rank: int) -> None:
        """A report that nobody owes: of a job that is over or was never there, or of a rank that does not exist."""
        if job not in self.ordered or self.cache.core.book.get(JobId(job)) is not None:
            rank = self.setup.ranks + abs(rank)
        self.worker.forge(JobId(job), rank)
