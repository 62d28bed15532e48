"""Workers that compute nothing: they carry out step plans over bytes, and look at every byte that they read.

Owns: the ranks' device pages, the order of things inside a step (as in ``runtime.worker``), the comparison of what is
read with what must be there, and the search for bytes that changed although nobody was to change them.  Does not own:
movers, what is right (``model``).  Thread: the caller's; ``notify`` any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ostinato.cache.kinds import keeps_checkpoints
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.conformance.model import UNIT, next_state, next_token, start_state, unit_content, units_read
from ostinato.conformance.verdict import Violation
from ostinato.connectors.api import Mover
from ostinato.ids import HOLE, JobId, RequestId, SlotId, Step, TierId
from ostinato.runtime.bare_pages import BarePages
from ostinato.scheduler.plan import PageCopy, SampledToken, SequencePlan, StepPlan, StepResult
from ostinato.scheduler.request import Request
from ostinato.transfer.job import JobKind, TransferOrder, TransferReport

POISON: Final = 0xEE
Rows = tuple[list[SlotId], ...]


class RankMemory:
    """One rank's device pages.  ``rank`` also says whose share of each unit they hold."""

    def __init__(self, layout: CacheLayout, pages: int, share: int) -> None:
        self.device = BarePages(pages, layout.page_bytes)
        self.movers: dict[TierId, Mover] = {}
        self._layout = layout
        self._share = share
        self._shadow = bytearray(len(self.device.memory))
        """What the memory holds but for loads that are under way."""
        self._loads: dict[JobId, TransferOrder] = {}

    def write(self, slot: SlotId, offset: int, content: bytes | memoryview) -> None:
        begin = slot * self._layout.page_bytes + offset
        self.device.memory[begin : begin + len(content)] = content
        self._shadow[begin : begin + len(content)] = content

    def read(self, slot: SlotId, offset: int, length: int) -> bytes:
        begin = slot * self._layout.page_bytes + offset
        return bytes(self.device.memory[begin : begin + length])

    def copy(self, order: PageCopy) -> None:
        self.write(order.target, order.offset, self.read(order.source, order.offset, order.length))

    def write_unit(self, spec: GroupSpec, slot: SlotId, ordinal: int, state: bytes) -> None:
        offset = ordinal % spec.page_units * spec.unit_stride
        self.write(slot, offset, unit_content(spec, state, self._share))

    def holds(self, spec: GroupSpec, slot: SlotId, ordinal: int, state: bytes) -> bool:
        offset = ordinal % spec.page_units * spec.unit_stride
        return self.read(slot, offset, spec.unit_bytes) == unit_content(spec, state, self._share)

    def submit(self, order: TransferOrder) -> None:
        if order.kind is JobKind.LOAD:
            self._loads[order.job_id] = order
        self.movers[order.tier].submit(_as_sent(order))

    def collect(self, rank: int) -> list[TransferReport]:
        reports = [report for mover in self.movers.values() for report in mover.poll()]
        self.look()
        for report in reports:
            self._loads.pop(report.job_id, None)
        return [replace(report, rank=rank) for report in reports]

    def end(self) -> None:
        """The movers are closed: no load is under way any more."""
        self.look()
        self._loads.clear()

    def look(self) -> None:
        """Raise when bytes have changed that no load under way was to change."""
        now = bytes(self.device.memory)
        for order in self._loads.values():
            for move in order.moves:
                begin = move.device_slot * self._layout.page_bytes + move.offset
                span = slice(begin, begin + self._layout.groups[move.key.group].unit_stride)  # padding may come along
                self._shadow[span] = now[span]
        if now != self._shadow:
            place = next(i for i, byte in enumerate(self._shadow) if byte != now[i])
            page, offset = divmod(place, self._layout.page_bytes)
            raise Violation(
                f"byte {offset} of device page {page} was changed although no load of it is under way: a mover may "
                "write only the bytes that a load names, and none after its report or after close()"
            )


def _as_sent(order: TransferOrder) -> TransferOrder:
    """The order as it arrives in another process: its slots are numbers and nothing else."""
    moves = tuple(replace(move, device_slot=SlotId(int(move.device_slot))) for move in order.moves)
    blocks = tuple(tuple(SlotId(int(slot)) for slot in row) for row in order.blocks)
    return replace(order, moves=moves, blocks=blocks)


class FakeWorkers:
    """All ranks behind one executor.  ``requests`` finds a living request; ``distinct``: bytes differ by rank."""

    def __init__(self, layout: CacheLayout, pages: int, ranks: int, distinct: bool) -> None:
        self.layout = layout
        self.ranks = [RankMemory(layout, pages, rank if distinct else 0) for rank in range(ranks)]
        self.requests: Callable[[RequestId], Request | None] = lambda _: None
        self.notified = 0
        self._arrived = threading.Event()
        self._rows: dict[RequestId, Rows] = {}
        self._states: dict[RequestId, list[bytes]] = {}
        self._later: list[TransferOrder] = []
        self._jobs: dict[JobId, TierId] = {}

    def attach(self, rank: int, tier: TierId, mover: Mover) -> None:
        self.ranks[rank].movers[tier] = mover

    def poison(self, slot: SlotId) -> None:
        """Whoever takes a page finds nothing of use in it."""
        for rank in self.ranks:
            rank.write(slot, 0, bytes([POISON]) * self.layout.page_bytes)

    def notify(self) -> None:
        self.notified += 1
        self._arrived.set()

    def wait(self, timeout: float) -> bool:
        return self._arrived.wait(timeout)

    def close(self) -> None:
        for rank in self.ranks:
            for mover in rank.movers.values():
                mover.close()

    def execute(self, plan: StepPlan) -> StepResult:
        for job_id in plan.cancelled:
            if (tier := self._jobs.get(job_id)) is not None:
                for rank in self.ranks:
                    rank.movers[tier].cancel(job_id)
        for copy in plan.copies:
            for rank in self.ranks:
                rank.copy(copy)
        self._later.extend(plan.transfers)
        self._submit(Step(plan.step - 1))
        sampled = tuple(token for sequence in plan.sequences for token in self._compute(sequence))
        self._submit(plan.step)
        for name in plan.finished:
            self._rows.pop(name, None)
            self._states.pop(name, None)
        self._arrived.clear()
        reports = tuple(report for index, rank in enumerate(self.ranks) for report in rank.collect(index))
        return StepResult(plan.step, sampled, reports)

    def _submit(self, finished: Step) -> None:
        ready = [order for order in self._later if order.after_step <= finished]
        self._later = [order for order in self._later if order.after_step > finished]
        for order in ready:
            self._jobs[order.job_id] = order.tier
            for rank in self.ranks:
                rank.submit(order)

    # The forward pass.

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
            else:
                self._attend(sequence, spec, row, states)
        return [SampledToken(name, next_token(states[stop]))] if sequence.sample else []

    def _attend(self, sequence: SequencePlan, spec: GroupSpec, row: list[SlotId], states: list[bytes]) -> None:
        start, stop = sequence.start, sequence.start + len(sequence.tokens)
        for ordinal in units_read(spec.kind, start):
            state = states[min((ordinal + 1) * UNIT, start)]
            self._expect(sequence, spec, row[ordinal // spec.page_units], ordinal, state)
        for ordinal in range(start // UNIT, -(-stop // UNIT)):
            for rank in self.ranks:
                state = states[min((ordinal + 1) * UNIT, stop)]
                rank.write_unit(spec, row[ordinal // spec.page_units], ordinal, state)

    def _scan(self, sequence: SequencePlan, spec: GroupSpec, states: list[bytes]) -> None:
        """Recurrent state: read once at the start of the chunk, written at each stop."""
        assert sequence.state is not None
        if sequence.start:
            self._expect(sequence, spec, sequence.state.read[spec.group], 0, states[sequence.start])
        for stop, pages in sequence.state.stops:
            for rank in self.ranks:
                rank.write_unit(spec, pages[spec.group], 0, states[stop])

    def _expect(self, sequence: SequencePlan, spec: GroupSpec, slot: SlotId, ordinal: int, state: bytes) -> None:
        assert slot != HOLE, f"{sequence.request_id} reads a hole"
        for index, rank in enumerate(self.ranks):
            if not rank.holds(spec, slot, ordinal, state):
                what = "the state" if keeps_checkpoints(spec.kind) else f"unit {ordinal}"
                raise Violation(
                    f"a request that goes on at token {sequence.start} reads {what} of group {spec.group} on rank "
                    f"{index}, and finds other bytes than were computed: a load reported as done did not bring what "
                    "was stored under its key, or a page was written after the report"
                )

    def _states_of(self, name: RequestId, stop: int) -> list[bytes]:
        request = self.requests(name)
        assert request is not None
        states = self._states.setdefault(name, [start_state(request.salt)])
        for token in request.tokens[len(states) - 1 : stop]:
            states.append(next_state(states[-1], token))
        return states
