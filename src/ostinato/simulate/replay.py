"""Replaying a trace on the real scheduler and hierarchy.

Owns: the loop, and what is measured of each request.  Does not own: decisions (all in ``scheduler``, ``hierarchy``,
``cache``), time (``worker``).  Deterministic.

A prompt's tokens are all zeros: its keys come from the trace's blocks.  Requests end with their first token, unless
answers are computed: then in strides, since nothing is decided between the tokens of one request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ostinato.cache.directory import Directory
from ostinato.errors import CapacityError
from ostinato.hierarchy.hierarchy import CacheHierarchy
from ostinato.hierarchy.tiers import Core, CoreConfig, OwnedTier, StoreMode
from ostinato.ids import DEVICE, RequestId, TierId
from ostinato.sampling_params import SamplingParams
from ostinato.scheduler.request import Request
from ostinato.scheduler.scheduler import Scheduler, SchedulerConfig
from ostinato.simulate.machine import Machine
from ostinato.simulate.shapes import ModelShape
from ostinato.simulate.trace import Trace, TraceRequest
from ostinato.simulate.worker import VirtualClock, VirtualWorker
from ostinato.transfer.book import Book
from ostinato.transfer.job import JobKind

_PATIENCE_S = 0.5
"""Virtual time that passes when nothing but deadlines can change anything."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated.  ``tiers``: name and bytes of the device, then of lower tiers, fastest first.

    ``serial``: each request is over before the next one comes.  ``answers``: outputs are computed as well.
    ``warm_up``: share of the trace's requests before anything is counted.
    """

    shape: ModelShape
    machine: Machine
    tiers: tuple[tuple[str, int], ...]
    policy: str = "lru"
    step_tokens: int = 8192
    max_running: int = 64
    serial: bool = False
    answers: bool = False
    stride: int = 64
    warm_up: float = 0.25


@dataclass(slots=True)
class Outcome:
    """What came of a replay; counted after the warm-up, but for bytes."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    prompt_flops: float = 0.0
    saved_flops: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    loaded_bytes: dict[str, int] = field(default_factory=dict)
    stored_bytes: dict[str, int] = field(default_factory=dict)
    evictions: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    """Requests that the device pool has no room for at all."""
    preemptions: int = 0
    busy_s: float = 0.0
    end_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were not computed."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def flops_saved(self) -> float:
        """Share of the FLOPs of all prompts that were not spent."""
        return self.saved_flops / self.prompt_flops if self.prompt_flops else 0.0


@dataclass(slots=True)
class _Live:
    item: TraceRequest
    request: Request
    counted: bool
    answered: int = 0


class Replay:
    """One run over one trace, whose blocks are the hash units."""

    def __init__(self, trace: Trace, setup: Setup) -> None:
        self.setup = setup
        self.trace = trace
        self.clock = VirtualClock()
        self.outcome = Outcome()
        self.layout = setup.shape.layout(trace.block_tokens)
        self.core = _core(setup, self.layout.page_bytes, trace.block_tokens)
        self.cache = CacheHierarchy(self.core, _seed, self.clock)
        limits = SchedulerConfig(setup.step_tokens, 1 if setup.serial else setup.max_running, stall_s=math.inf)
        self.scheduler = Scheduler(self.cache, limits, self.clock)
        self.worker = VirtualWorker(setup.shape, setup.machine, self.clock)
        self._live: dict[RequestId, _Live] = {}
        self._pending: deque[tuple[int, TraceRequest]] = deque(enumerate(trace.requests))
        self._warm = int(len(trace.requests) * setup.warm_up)

    def run(self, on_request: Callable[[int], object] = lambda _: None) -> Outcome:
        """Replay all of it; ``on_request`` is told how many requests are over."""
        while self._pending or self._live:
            self._arrive()
            plan = self.scheduler.plan()
            result = self.worker.execute(plan)
            tokens = self.scheduler.apply(result)
            for request_id, _ in tokens:
                if self._advance(self._live[request_id]):
                    on_request(1)
            if not plan.sequences:
                self._idle()
        return self._finish()

    def _arrive(self) -> None:
        while self._pending and not (self.setup.serial and self._live):
            number, item = self._pending[0]
            if item.arrival > self.clock.now:
                if self._live or len(self.core.book):
                    return
                self.clock.now = item.arrival
            self._pending.popleft()
            self._open(number, item)

    def _open(self, number: int, item: TraceRequest) -> None:
        counted = number >= self._warm
        room = self.layout.peak_pages(item.prompt_tokens + 1, self.setup.step_tokens)
        if item.prompt_tokens < 1 or room > self.core.device.pool.capacity:
            self.outcome.refused += 1
            if counted:
                self._count(item, 0, ())
            return
        request_id = RequestId(str(number))
        request = Request(request_id, [0] * item.prompt_tokens, SamplingParams(max_tokens=1), number)
        self.scheduler.add(request)
        digests = self.cache.requests[request_id].chain.digests
        digests.extend(block.to_bytes(32, "little") for block in item.blocks)
        self._live[request_id] = _Live(item, request, counted)

    def _advance(self, live: _Live) -> bool:
        """A token was sampled; True when the request is over."""
        request = live.request
        if request.sampled == 1:
            self._first_token(live)
        left = live.item.output_tokens - request.sampled if self.setup.answers else 0
        if left > 0:
            chain = self.cache.requests[request.request_id].chain
            request.tokens.extend([0] * (min(left, self.setup.stride) - 1))
            while (len(chain.digests) + 1) * chain.unit <= len(request.tokens):
                # Nobody else's answer: no trace says what was generated.
                name = f"{request.request_id}/{len(chain.digests)}".encode()
                chain.digests.append(name.rjust(32, b"#"))
            return False
        del self._live[request.request_id]
        self.outcome.preemptions += request.preemptions
        self.scheduler.finish(request.request_id)
        return True

    def _first_token(self, live: _Live) -> None:
        if live.counted and live.request.hit is not None:
            hit = live.request.hit
            self._count(live.item, hit.tokens, hit.by_tier)
            self.outcome.ttft_s.append(self.clock.now - live.item.arrival)

    def _count(self, item: TraceRequest, hit: int, by_tier: tuple[tuple[TierId, int], ...]) -> None:
        outcome, shape = self.outcome, self.setup.shape
        outcome.requests += 1
        outcome.prompt_tokens += item.prompt_tokens
        outcome.hit_tokens += hit
        outcome.prompt_flops += shape.flops(0, item.prompt_tokens)
        outcome.saved_flops += shape.flops(0, hit)
        for tier, tokens in by_tier:
            outcome.by_tier[tier] = outcome.by_tier.get(tier, 0) + tokens

    def _idle(self) -> None:
        """Nothing was computed: go to the next thing that can change that."""
        times = [time for time in (self.worker.next_report(), self._next_arrival()) if time is not None]
        if self._live or len(self.core.book):
            self.clock.now = max(self.clock.now, min([*times, self.clock.now + _PATIENCE_S]))

    def _next_arrival(self) -> float | None:
        waits = self._pending and not (self.setup.serial and self._live)
        return self._pending[0][1].arrival if waits else None

    def _finish(self) -> Outcome:
        outcome = self.outcome
        for (kind, tier), flow in self.core.book.flows.items():
            (outcome.loaded_bytes if kind is JobKind.LOAD else outcome.stored_bytes)[tier] = flow.bytes
        for owned in (self.core.device, *self.core.lower.values()):
            outcome.evictions[owned.tier] = owned.retention.evictions
        outcome.busy_s, outcome.end_s = self.worker.busy_s, self.clock.now
        return outcome


def _seed(_: str) -> bytes:
    return bytes(32)


def _core(setup: Setup, page_bytes: int, unit: int) -> Core:
    directory = Directory()
    (_, device_bytes), *rest = setup.tiers
    pages = device_bytes // page_bytes
    if not pages:
        raise CapacityError(f"the device has {device_bytes:,} bytes: less than one page of {page_bytes:,}")
    config = CoreConfig(
        step_tokens=setup.step_tokens,
        load_deadline_s=math.inf,
        store_deadline_s=math.inf,
        weigh_loads=not setup.serial,
        coalesce=not setup.serial,
    )
    lower = {
        TierId(name): OwnedTier(TierId(name), size // page_bytes, directory, StoreMode.LAZY) for name, size in rest
    }
    order = (DEVICE, *lower)
    return Core(
        setup.shape.layout(unit), config, directory, OwnedTier(DEVICE, pages, directory), lower, {}, Book(), order
    )
