"""One engine over simulated tiers, from its start to its end: the real scheduler, hierarchy and connectors.

Owns: the wiring (as in ``engine.build``), the requests that are alive, one step at a time with an audit behind it, and
the check that at the end nothing is held.  Does not own: what goes wrong and when (``program``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ostinato.cache.directory import Directory
from ostinato.cache.keys import KeyChain
from ostinato.cache.layout import CacheLayout
from ostinato.cache.pool import Lease, SlotPool, SlotState
from ostinato.connectors.api import Connector, Ownership, Site
from ostinato.connectors.host_mover import HostMover
from ostinato.connectors.record import RecordIdentity
from ostinato.engine.binding import bind_connectors
from ostinato.hierarchy.hierarchy import CacheHierarchy
from ostinato.hierarchy.tiers import Core, CoreConfig, OwnedTier, StoreMode
from ostinato.ids import DEVICE, RequestId, SlotId, TierId
from ostinato.sampling_params import SamplingParams
from ostinato.scheduler.request import Request
from ostinato.scheduler.scheduler import Scheduler, SchedulerConfig
from ostinato.transfer.book import Book
from torment.content import Text, Truth, seed_of
from torment.kernel import Kernel, Violation
from torment.worker import Post, RankMemory, Trouble, Workers

LOAD_DEADLINE_S = 10.0
STARVED_S = 120.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a program is about."""

    layout: CacheLayout
    device_pages: int
    ranks: int
    step_tokens: int
    max_running: int
    pin_share: float


@dataclass(slots=True, eq=False)
class Client:
    """A request as its user sees it: ``goal`` tokens in all."""

    request: Request
    text: Text
    chain: KeyChain
    goal: int


class _Pool(SlotPool):
    """Slots that are poisoned when taken."""

    poison: Callable[[SlotId], None] = staticmethod(lambda _: None)

    def take(self, count: int, owner: str) -> Lease | None:
        lease = super().take(count, owner)
        for slot in lease.slots if lease is not None else ():
            self.poison(slot)
        return lease


@dataclass(slots=True)
class Counts:
    steps: int = 0
    requests: int = 0
    aborted: int = 0
    preempted: int = 0
    hit_tokens: int = 0
    computed: int = 0
    loads: int = 0
    stores: int = 0
    in_doubt: int = 0
    reads: int = 0
    starved: int = 0
    restarts: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)


class Life:
    """``connectors`` are closed by :meth:`close`, or left where they are when the process is killed."""

    def __init__(
        self, setup: Setup, truth: Truth, connectors: Sequence[Connector], kernel: Kernel, counts: Counts
    ) -> None:
        self.setup = setup
        self.kernel = kernel
        self.counts = counts
        self.connectors = connectors
        self.clients: dict[RequestId, Client] = {}
        self.pressure: list[Lease] = []
        self._truth = truth
        self.post = Post(kernel, Trouble())
        ranks = [RankMemory(truth, setup.device_pages, rank) for rank in range(setup.ranks)]
        self.workers = Workers(truth, ranks, self.post, kernel)
        self.workers.text = self._text
        identity = RecordIdentity(setup.layout.fingerprint(), hashlib.sha256(b"torment").digest())
        for connector in connectors:
            connector.open(Site(setup.layout, identity, setup.ranks))
        core = self._core()
        for memory in ranks:
            for connector in connectors:
                memory.movers[connector.tier] = connector.make_mover(memory.device, lambda: None)
        self.cache = CacheHierarchy(core, seed_of, kernel.clock)
        bind_connectors(connectors, self.cache)
        config = SchedulerConfig(setup.step_tokens, setup.max_running, stall_s=STARVED_S)
        self.scheduler = Scheduler(self.cache, config, kernel.clock)
        kernel.may_block = False

    def _core(self) -> Core:
        setup, directory = self.setup, Directory()
        device = OwnedTier(DEVICE, setup.device_pages, directory)
        device.pool = _Pool(DEVICE, setup.device_pages, device.retention)
        device.pool.poison = self.workers.poison
        lower: dict[TierId, OwnedTier] = {}
        for each in self.connectors:
            if each.capabilities.ownership is Ownership.OWNED:
                mode = StoreMode.EAGER if each.capabilities.eager else StoreMode.LAZY
                lower[each.tier] = OwnedTier(each.tier, each.slots(setup.layout.page_bytes), directory, mode)
        config = CoreConfig(
            step_tokens=setup.step_tokens,
            load_deadline_s=LOAD_DEADLINE_S,
            store_deadline_s=LOAD_DEADLINE_S,
            probe_deadline_s=4.0,
            pin_share=setup.pin_share,
        )
        order = (DEVICE, *lower, *(each.tier for each in self.connectors if each.tier not in lower))
        return Core(setup.layout, config, directory, device, lower, {}, Book(setup.ranks), order)

    # Requests.

    def add(self, name: str, tokens: list[int], goal: int, salt: str, scored: bool) -> None:
        self.counts.requests += 1
        sampling = SamplingParams(
            temperature=0, max_tokens=max(1, goal - len(tokens)), prompt_logprobs=0 if scored else None
        )
        request = Request(RequestId(name), tokens, sampling, self.counts.requests, salt=salt)
        client = Client(request, Text(salt, tokens), KeyChain(seed_of(salt), self.setup.layout.base_unit), goal)
        self._truth.learn(client.text, client.chain)
        self.clients[request.request_id] = client
        self.scheduler.add(request)

    def abort(self, name: RequestId) -> None:
        self.counts.aborted += 1
        self._end(self.clients[name])

    def _end(self, client: Client) -> None:
        request = client.request
        del self.clients[request.request_id]
        self.scheduler.finish(request.request_id)
        self.counts.preempted += request.preemptions
        if request.hit is not None:
            self.counts.hit_tokens += request.hit.tokens
            for tier, tokens in request.hit.by_tier:
                self.counts.by_tier[tier] = self.counts.by_tier.get(tier, 0) + tokens

    def _text(self, name: RequestId) -> Text | None:
        client = self.clients.get(name)
        return client.text if client is not None else None

    # Steps.

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Plan, execute, apply; ``meanwhile`` is called between them, and may abort requests."""
        self.counts.steps += 1
        plan = self.scheduler.plan()
        meanwhile()
        result = self.workers.execute(plan)
        meanwhile()
        for name, token in self.scheduler.apply(result):
            client = self.clients[name]
            if client.request.tokens[-1] != token:
                raise Violation(f"{name}: the sampled token was not appended")
            self._truth.learn(client.text, client.chain)
            if len(client.request.tokens) >= client.goal:
                self._end(client)
        self.cache.audit()

    def check_starved(self) -> None:
        """Only blocks in doubt, or taken away on purpose, may keep a request waiting for ever."""
        name = self.scheduler.starved()
        if name is None:
            return
        core = self.cache.core
        if core.device.pool.reachable == core.device.pool.capacity and not self.pressure:
            raise Violation(f"{name} has had no room for {STARVED_S:.0f} s, and nothing is in doubt")
        self.counts.starved += 1
        self.abort(name)

    # The end.

    def calm(self, limit: int = 3000) -> None:
        """Nothing goes wrong any more: everything must come to its end."""
        self.post.calm()
        self.release()
        core = self.cache.core
        for _ in range(limit):
            if not self.clients and not len(core.book):
                return
            self.step()
            self.kernel.run(20)
            self.kernel.now += 0.1
        names = {name: client.request.phase.value for name, client in self.clients.items()}
        jobs = {job.job_id: (job.order.kind.value, job.order.tier, job.state.value) for job in core.book}
        raise Violation(f"no end in sight: requests {names}, jobs {jobs}")

    def press(self, count: int) -> None:
        """Take ``count`` blocks away."""
        lease = self.cache.core.device.pool.take(count, "pressure")
        assert lease is not None
        self.pressure.append(lease)

    def release(self) -> None:
        """Give them back, untouched."""
        for lease in self.pressure:
            for rank in self.workers.ranks:
                rank.check_poison(lease.slots)
            lease.release()
        self.pressure.clear()

    def check_quiet(self) -> None:
        """Nothing is held, nothing is on its way, and what is cached is what its key says."""
        core = self.cache.core
        for tier in (core.device, *core.lower.values()):
            if tier.pool.leases:
                raise Violation(f"{tier.tier} is still held: {sorted(lease.owner for lease in tier.pool.leases)}")
            states = {tier.pool.state(SlotId(slot)) for slot in range(tier.pool.capacity)}
            if not states <= {SlotState.FREE, SlotState.IDLE} or tier.pool.available != tier.pool.capacity:
                raise Violation(f"{tier.tier}: slots are {states}")
        self._check_contents()

    def _check_contents(self) -> None:
        for entry in self.cache.core.directory:
            spec = self.setup.layout.groups[entry.key.group]
            offset = entry.ordinal % spec.page_units * spec.unit_stride
            for tier, place in entry.places.items():
                if not place.ready:
                    raise Violation(f"{tier}: a unit is still being written, and no job is open")
                for rank in self.workers.ranks:
                    if tier == DEVICE:
                        content = rank.read(place.slot, offset, spec.unit_bytes)
                    else:
                        mover = rank.movers[tier]
                        assert isinstance(mover, HostMover)
                        content = mover.pages[place.slot, offset : offset + spec.unit_bytes].numpy().tobytes()
                    self._truth.check(entry.key, content, f"what {tier} holds", rank.rank)
        self._truth.complain()

    def close(self) -> None:
        self.kernel.may_block = True
        for rank in self.workers.ranks:
            for mover in rank.movers.values():
                mover.close()
            rank.look()
        for connector in self.connectors:
            connector.close()

    def account(self) -> None:
        """Add what the book and the workers counted."""
        stats, counts = self.cache.core.book.stats, self.counts
        counts.in_doubt += stats.in_doubt
        counts.computed += self.workers.computed
        counts.reads += self.workers.reads
        for (kind, _), flow in self.cache.core.book.flows.items():
            if kind.value == "load":
                counts.loads += flow.units
            else:
                counts.stores += flow.units
