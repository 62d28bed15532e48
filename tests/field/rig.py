"""An engine under a script: the real loop, scheduler and hierarchy over a tiny model or over a checked fake worker.

The fake worker computes nothing, but every unit that it writes names the tokens it depends on, and every unit that a
sequence's attention mask reaches is compared with what must be there.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from core.builders import make_core
from field.scripted import Clock, ScriptedTier, poison_on_take
from ostinato.cache.kinds import Chunked, Full, Kind, Window, keeps_checkpoints
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.cache.pool import SlotState
from ostinato.connectors.api import Ownership
from ostinato.engine.binding import bind_connectors
from ostinato.engine.build import NoTokenizer
from ostinato.engine.loop import Engine, Limits, Prompt
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.text import Vocabulary
from ostinato.hierarchy.hierarchy import CacheHierarchy
from ostinato.hierarchy.tiers import CoreConfig, StoreMode
from ostinato.ids import DEVICE, HOLE, GroupId, RequestId
from ostinato.sampling_params import SamplingParams
from ostinato.scheduler.plan import SampledToken, SequencePlan, StepPlan, StepResult
from ostinato.scheduler.policy import Policy
from ostinato.scheduler.scheduler import Scheduler, SchedulerConfig

UNIT_BYTES = 32


def layout_of(*kinds: Kind, unit: int = 16) -> CacheLayout:
    groups = (
        GroupSpec(GroupId(index), kind, (index,), unit, 1, unit, UNIT_BYTES, 64) for index, kind in enumerate(kinds)
    )
    return CacheLayout(tuple(groups), 64)


def shaped(*shapes: tuple[Kind, int, int]) -> CacheLayout:
    """One group for each ``(kind, hash unit, hash units per page)``, with pages as small as they can be."""
    page_bytes = 64 * math.lcm(*(page_units for _, _, page_units in shapes))
    groups = tuple(
        GroupSpec(GroupId(index), kind, (index,), unit, page_units, unit, UNIT_BYTES, page_bytes // page_units)
        for index, (kind, unit, page_units) in enumerate(shapes)
    )
    return CacheLayout(groups, page_bytes)


def greedy(count: int = 1, digest: bool = True) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logits_digest=digest)


def units_read(kind: Kind, start: int, unit: int) -> range:
    """Units before ``start`` that the queries from ``start`` on attend to, from the attention mask alone."""
    match kind:
        case Full():
            first = 0
        case Window(window, sinks):
            assert not sinks
            first = max(0, start - window + 1)  # the first query sees itself and window - 1 tokens before it
        case Chunked(chunk):
            first = start // chunk * chunk
        case _:
            raise AssertionError(f"{kind} has no mask here")
    return range(first // unit, -(-start // unit)) if first < start else range(0)


def link(previous: bytes, token: int) -> bytes:
    return hashlib.blake2b(previous + token.to_bytes(4, "little"), digest_size=UNIT_BYTES).digest()


def next_token(state: bytes) -> int:
    return int.from_bytes(state[:2], "little") + 1000


def expected_tokens(prompt: Sequence[int], count: int, salt: str = "") -> tuple[int, ...]:
    """What the fake worker's model answers, without any cache."""
    state, answer = salt.encode(), []
    for token in prompt:
        state = link(state, token)
    for _ in range(count):
        answer.append(next_token(state))
        state = link(state, answer[-1])
    return tuple(answer)


class FakeWorker:
    """Carries out step plans over pages of bytes; movers attach as they do to the real worker."""

    def __init__(self, layout: CacheLayout, pages: int) -> None:
        self.layout = layout
        self.pages = torch.full((pages, layout.page_bytes), 0xFF, dtype=torch.uint8)
        self.movers: dict[str, Any] = {}
        self.requests: Callable[[RequestId], Any] = lambda name: None
        self.steps = 0
        self._rows: dict[RequestId, tuple[list[int], ...]] = {}
        self._states: dict[RequestId, list[bytes]] = {}
        self._known: dict[RequestId, Any] = {}

    def copy(self, source: Any, target: Any, source_index: Sequence[int], target_index: Sequence[int]) -> None:
        target[list(target_index)] = source[list(source_index)]

    def notify(self) -> None: ...

    def wait(self, timeout: float) -> bool:
        return True

    def close(self) -> None:
        for mover in self.movers.values():
            mover.close()

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        for job_id in plan.cancelled:
            for mover in self.movers.values():
                mover.cancel(job_id)
        for copy in plan.copies:
            span = slice(copy.offset, copy.offset + copy.length)
            self.pages[copy.target, span] = self.pages[copy.source, span]
        for order in plan.transfers:
            assert order.after_step < plan.step, "an order of this plan waits for this plan's own step"
            self.movers[order.tier].submit(order)
        for name in plan.finished:
            self._rows.pop(name, None)
            self._states.pop(name, None)
            self._known.pop(name, None)
        sampled = tuple(token for sequence in plan.sequences for token in self._compute(sequence))
        reports = tuple(report for mover in self.movers.values() for report in mover.poll())
        return StepResult(plan.step, sampled, reports)

    def _compute(self, sequence: SequencePlan) -> list[SampledToken]:
        name, stop = sequence.request_id, sequence.start + len(sequence.tokens)
        if sequence.fresh:
            self._rows[name] = tuple([] for _ in self.layout.groups)
            self._states.pop(name, None)
        for row, new in zip(self._rows[name], sequence.new_pages, strict=True):
            row.extend(new)
        states = self._states_of(name, stop)
        for spec, row in zip(self.layout.groups, self._rows[name], strict=True):
            if keeps_checkpoints(spec.kind):
                self._scan(sequence, spec, states)
                continue
            self._check_reads(sequence, spec, row, states)
            for ordinal in range(sequence.start // spec.hash_unit, -(-stop // spec.hash_unit)):
                unit = self._unit(spec, row, ordinal)
                assert unit is not None, f"{name} has no page for unit {ordinal} of group {spec.group}"
                unit[:] = _content(spec, states[min((ordinal + 1) * spec.hash_unit, stop)])
        return [SampledToken(name, next_token(states[stop]), states[stop])] if sequence.sample else []

    def _scan(self, sequence: SequencePlan, spec: GroupSpec, states: list[bytes]) -> None:
        """Recurrent state: read once at the start of the chunk, written at each stop."""
        assert sequence.state is not None
        slot = sequence.state.read[spec.group]
        assert (slot == HOLE) == (sequence.start == 0), sequence
        if sequence.start:
            expected = _content(spec, states[sequence.start])
            assert torch.equal(self.pages[slot, : spec.unit_bytes], expected), (
                f"{sequence.request_id} at {sequence.start} starts from another state"
            )
        for stop, pages in sequence.state.stops:
            self.pages[pages[spec.group], : spec.unit_bytes] = _content(spec, states[stop])

    def _unit(self, spec: GroupSpec, row: list[int], ordinal: int) -> torch.Tensor | None:
        """The bytes of one unit; None where the row has a hole."""
        slot, offset = row[ordinal // spec.page_units], ordinal % spec.page_units * spec.unit_stride
        return None if slot == HOLE else self.pages[slot, offset : offset + spec.unit_bytes]

    def _states_of(self, name: RequestId, stop: int) -> list[bytes]:
        # A request that was aborted after the plan was made is computed once more.
        request = self._known[name] = self.requests(name) or self._known[name]
        states = self._states.setdefault(name, [request.salt.encode()])
        for token in request.tokens[len(states) - 1 : stop]:
            states.append(link(states[-1], token))
        return states

    def _check_reads(self, sequence: SequencePlan, spec: GroupSpec, row: list[int], states: list[bytes]) -> None:
        for ordinal in units_read(spec.kind, sequence.start, spec.hash_unit):
            where = f"{sequence.request_id} reads unit {ordinal} of group {spec.group} at {sequence.start}"
            unit = self._unit(spec, row, ordinal)
            assert unit is not None, f"{where}: a hole"
            expected = _content(spec, states[min((ordinal + 1) * spec.hash_unit, sequence.start)])
            assert torch.equal(unit, expected), f"{where}: wrong content"


def _content(spec: GroupSpec, state: bytes) -> torch.Tensor:
    digest = hashlib.shake_128(state + bytes([spec.group])).digest(spec.unit_bytes)
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


@dataclass
class Rig:
    """A running engine.  ``tick``: seconds of virtual time per step."""

    engine: Engine
    cache: CacheHierarchy
    clock: Clock
    tick: float = 0.0
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    names: Any = field(default_factory=itertools.count)

    @property
    def pool(self) -> Any:
        return self.cache.core.device.pool

    def add(self, tokens: Sequence[int], count: int = 1, priority: int = 0, salt: str = "") -> str:
        name = f"r{next(self.names)}"
        self.engine.add(name, Prompt(None, list(tokens)), greedy(count), priority, salt)
        return name

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.engine.step():
                self.outputs[output.request_id] = output
            self.clock.now += self.tick

    def run(self, until: Callable[[], bool] | None = None, patience: int = 40) -> None:
        """Step until ``until`` (default: no request is alive); ``patience`` steps without any change are a hang."""
        last, idle = self._state(), 0
        while not (until() if until is not None else not self.engine.has_work):
            self.step()
            state = self._state()
            idle = idle + 1 if state == last else 0
            last = state
            assert idle < patience, f"no progress in {patience} steps:\n" + self.dump()

    def serve(self, tokens: Sequence[int], count: int = 1, salt: str = "") -> RequestOutput:
        """One request from start to end, and every transfer that it caused."""
        name = self.add(tokens, count, salt=salt)
        self.run()
        self.settle()
        return self.outputs[name]

    def settle(self, patience: int = 40) -> None:
        """Let open transfers end."""
        for _ in range(patience):
            if not len(self.cache.core.book):
                return
            self.step()
        raise AssertionError("transfers do not end:\n" + self.dump())

    def evict_device(self) -> None:
        """Empty the device, once the tiers below have what they take."""
        self.step()
        self.settle()
        self.cache.core.drop_idle(device_only=True)

    def phase(self, name: str) -> str:
        return str(self.engine.scheduler.requests[RequestId(name)].phase.value)

    def check_quiet(self) -> None:
        """Nothing is held or on its way; each tier's slots are all free or idle."""
        self.settle()
        self.cache.audit()
        assert not self.cache.requests
        for tier in (self.cache.core.device, *self.cache.core.lower.values()):
            assert not tier.pool.leases, [lease.owner for lease in tier.pool.leases]
            assert tier.pool.available == tier.pool.capacity
            assert {tier.pool.state(slot) for slot in range(tier.pool.capacity)} <= {SlotState.FREE, SlotState.IDLE}

    def dump(self) -> str:
        requests = self.engine.scheduler.requests.values()
        lines = [f"{r.request_id}: {r.phase.value}, {r.computed} of {len(r.tokens)} computed" for r in requests]
        jobs = [f"job {j.job_id}: {j.order.kind.value} {j.order.tier} {j.state.value}" for j in self.cache.core.book]
        leases = [f"{lease.owner}: {len(lease.slots)} slots" for lease in self.pool.leases]
        return "\n".join([*lines, *jobs, *leases, f"{self.pool.available} of {self.pool.capacity} pages to be had"])

    def _state(self) -> Any:
        requests = self.engine.scheduler.requests.values()
        jobs = tuple((job.job_id, job.state) for job in self.cache.core.book)
        return tuple((r.request_id, r.phase, r.computed, len(r.tokens)) for r in requests), jobs


def fake_rig(
    layout: CacheLayout,
    pages: int,
    tiers: Sequence[ScriptedTier] = (),
    step_tokens: int = 64,
    policy: Policy = Policy.FCFS,
    max_running: int = 64,
    audited: bool = True,
) -> Rig:
    """An engine over the fake worker, audited after every step (a walk over all that is cached)."""
    clock = Clock()
    owned = [tier for tier in tiers if tier.capabilities.ownership is Ownership.OWNED]
    modes = {True: StoreMode.EAGER, False: StoreMode.LAZY}
    core = make_core(
        layout,
        pages,
        [(tier.tier, tier.slots(layout.page_bytes), modes[tier.capabilities.eager]) for tier in owned],
        {tier.tier: tier for tier in tiers if tier not in owned},
        CoreConfig(step_tokens=step_tokens),
    )
    cache = CacheHierarchy(core, lambda salt: hashlib.sha256(salt.encode()).digest(), clock)
    worker = FakeWorker(layout, pages)
    poison_on_take(core.device.pool, lambda slot: worker.pages[slot].fill_(0xFF))
    for tier in tiers:
        worker.movers[tier.tier] = tier.make_mover(worker, worker.notify)
    bind_connectors(tiers, cache)
    scheduler = Scheduler(cache, SchedulerConfig(step_tokens, max_running, policy), clock)
    worker.requests = scheduler.requests.get
    limits = Limits(1 << 20, pages, layout.page_bytes)
    on_step = cache.audit if audited else None
    engine = Engine(scheduler, worker, Vocabulary(NoTokenizer()), frozenset(), limits, on_step)
    return Rig(engine, cache, clock)


def pins(rig: Rig) -> int:
    """Claims on slots of any tier that are not a request's own."""
    pools = [rig.pool, *(tier.pool for tier in rig.cache.core.lower.values())]
    return sum(not lease.owner.startswith("table") for pool in pools for lease in pool.leases)


__all__ = ["DEVICE", "FakeWorker", "Rig", "expected_tokens", "fake_rig", "greedy", "layout_of", "pins"]
