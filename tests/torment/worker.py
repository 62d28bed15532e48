"""Workers that compute nothing: they carry out step plans over bytes, and compare every byte that they read.

Owns: the ranks' device pages, the order of things inside a step (as in ``runtime.worker``), and what becomes of the
movers' reports on their way: late, twice, long after their deadline, or forged.  Does not own: movers, what is right
(``content``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ostinato.cache.kinds import keeps_checkpoints
from ostinato.cache.layout import GroupSpec
from ostinato.connectors.api import Mover
from ostinato.ids import HOLE, JobId, RequestId, SlotId, Step, TierId
from ostinato.runtime.bare_pages import BarePages
from ostinato.scheduler.plan import PageCopy, SampledToken, SequencePlan, StepPlan, StepResult
from ostinato.transfer.job import JobKind, TransferOrder, TransferReport
from torment.content import Text, Truth, units_read
from torment.kernel import Kernel, Violation

POISON = 0xEE
Rows: TypeAlias = tuple[list[SlotId], ...]


@dataclass(slots=True)
class Trouble:
    """What becomes of reports: probabilities, and seconds.  ``never``: not before the calm at the end."""

    late: float = 0.0
    latest: float = 1.0
    never: float = 0.0
    twice: float = 0.0
    forged: float = 0.0


class RankMemory:
    """One rank's device pages, and a shadow of what they hold but for loads that are under way."""

    def __init__(self, truth: Truth, pages: int, rank: int) -> None:
        self.device = BarePages(pages, truth.layout.page_bytes)
        self.movers: dict[TierId, Mover] = {}
        self.rank = rank
        self._truth = truth
        self._page_bytes = truth.layout.page_bytes
        self._shadow = bytearray(len(self.device.memory))
        self._loads: dict[JobId, TransferOrder] = {}

    def write(self, slot: SlotId, offset: int, content: bytes) -> None:
        begin = slot * self._page_bytes + offset
        self.device.memory[begin : begin + len(content)] = content
        self._shadow[begin : begin + len(content)] = content

    def read(self, slot: SlotId, offset: int, length: int) -> bytes:
        begin = slot * self._page_bytes + offset
        return bytes(self.device.memory[begin : begin + length])

    def check_poison(self, slots: Iterable[SlotId]) -> None:
        """Nobody else may have written to pages that were taken and not used."""
        for slot in slots:
            if self.read(slot, 0, self._page_bytes) != bytes((POISON,)) * self._page_bytes:
                raise Violation(f"device page {slot} was written by somebody who had given it up")

    def copy(self, order: PageCopy) -> None:
        self.write(order.target, order.offset, self.read(order.source, order.offset, order.length))

    def submit(self, order: TransferOrder) -> None:
        if order.kind is JobKind.LOAD:
            self._loads[order.job_id] = order
        else:
            for move in order.moves:
                self._truth.check(move.key, self.read(move.device_slot, move.offset, move.length), "a store", self.rank)
        self.movers[order.tier].submit(order)

    def collect(self) -> list[TransferReport]:
        reports = [report for mover in self.movers.values() for report in mover.poll()]
        self.look()
        for report in reports:
            self._ended(report)
        return [replace(report, rank=self.rank) for report in reports]

    def _ended(self, report: TransferReport) -> None:
        order = self._loads.pop(report.job_id, None)
        for index, move in enumerate(order.moves if order is not None else ()):
            if index not in report.failed:
                content = self.read(move.device_slot, move.offset, move.length)
                self._truth.check(move.key, content, f"a load from {order.tier}", self.rank)  # type: ignore[union-attr]

    def look(self) -> None:
        """Raise when bytes have changed that no load under way was to change."""
        now = bytes(self.device.memory)
        if now == self._shadow:
            return
        for order in self._loads.values():
            for move in order.moves:
                begin = move.device_slot * self._page_bytes + move.offset
                stride = self._truth.layout.groups[move.key.group].unit_stride  # padding may come along
                self._shadow[begin : begin + stride] = now[begin : begin + stride]
        if now != self._shadow:
            page = next(i for i, byte in enumerate(self._shadow) if byte != now[i]) // self._page_bytes
            raise Violation(f"device page {page} was written although no load of it is under way")


class Post:
    """Reports on their way from movers to the scheduler."""

    def __init__(self, kernel: Kernel, trouble: Trouble) -> None:
        self.trouble = trouble
        self._kernel = kernel
        self._rng = kernel.rng
        self._waiting: list[tuple[float, TransferReport]] = []

    def send(self, reports: Sequence[TransferReport]) -> None:
        trouble, random = self.trouble, self._rng.random
        for report in reports:
            due = self._kernel.now
            if random() < trouble.never:
                due = math.inf
            elif random() < trouble.late:
                due += random() * trouble.latest
            self._waiting += [(due, report)] * (1 + (random() < trouble.twice))
            if random() < trouble.forged:
                self._waiting.append((due, TransferReport(JobId(1 << 40), 0, (0, 99))))
                self._waiting.append((due, replace(report, rank=7)))

    def deliver(self) -> tuple[TransferReport, ...]:
        now = self._kernel.now
        due = [report for when, report in self._waiting if when <= now]
        self._waiting = [item for item in self._waiting if item[0] > now]
        if len(due) > 1 and self._rng.random() < 0.5:
            self._rng.shuffle(due)
        return tuple(due)

    def calm(self) -> None:
        """Nothing goes wrong from now on, and what was held back arrives."""
        self.trouble = Trouble()
        self._waiting = [(min(when, self._kernel.now), report) for when, report in self._waiting]


class Workers:
    """All ranks behind one executor.  ``text``: of a living request; None once it is gone."""

    def __init__(self, truth: Truth, ranks: Sequence[RankMemory], post: Post, kernel: Kernel) -> None:
        self.truth = truth
        self.ranks = ranks
        self.post = post
        self.text: Callable[[RequestId], Text | None] = lambda _: None
        self.reads = 0
        self.computed = 0
        self._kernel = kernel
        self._rows: dict[RequestId, Rows] = {}
        self._later: list[TransferOrder] = []
        self._jobs: dict[JobId, TierId] = {}

    def poison(self, slot: SlotId) -> None:
        """Whoever takes a page finds nothing of use in it."""
        for rank in self.ranks:
            rank.write(slot, 0, bytes((POISON,)) * self.truth.layout.page_bytes)

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
        sampled = []
        for sequence in plan.sequences:
            self._kernel.run(int(self._kernel.rng.random() * 3))  # movers work while the model computes
            token = self._compute(sequence)
            if token is not None and sequence.sample:
                sampled.append(SampledToken(sequence.request_id, token))
        self._submit(plan.step)
        for name in plan.finished:
            self._rows.pop(name, None)
        for rank in self.ranks:
            self.post.send(rank.collect())
        self.truth.complain()
        return StepResult(plan.step, tuple(sampled), self.post.deliver())

    def _submit(self, finished: Step) -> None:
        ready = [order for order in self._later if order.after_step <= finished]
        self._later = [order for order in self._later if order.after_step > finished]
        for order in ready:
            self._jobs[order.job_id] = order.tier
            for rank in self.ranks:
                rank.submit(order)

    # The forward pass.

    def _compute(self, sequence: SequencePlan) -> int | None:
        """The next token; None when the request is gone, and what it computes is nobody's."""
        name = sequence.request_id
        if sequence.fresh:
            self._rows[name] = tuple([] for _ in self.truth.layout.groups)
        rows = self._rows[name]
        for row, new in zip(rows, sequence.new_pages, strict=True):
            row.extend(new)
        text = self.text(name)
        if text is None:
            self._scribble(sequence, rows)
            return None
        for spec, row in zip(self.truth.layout.groups, rows, strict=True):
            if keeps_checkpoints(spec.kind):
                self._scan(sequence, spec, text)
            else:
                self._attend(sequence, spec, row, text)
        self.computed += len(sequence.tokens)
        return text.next_token() if sequence.sample else None

    def _attend(self, sequence: SequencePlan, spec: GroupSpec, row: list[SlotId], text: Text) -> None:
        start, unit, truth = sequence.start, spec.hash_unit, self.truth
        stop = start + len(sequence.tokens)
        for ordinal in units_read(spec.kind, start, unit):
            page = ordinal // spec.page_units
            slot = row[page] if page < len(row) else HOLE
            offset = ordinal % spec.page_units * spec.unit_stride
            self._expect(sequence, spec, slot, offset, text.state(min((ordinal + 1) * unit, start)))
        for ordinal in range(start // unit, -(-stop // unit)):
            state = text.state(min((ordinal + 1) * unit, stop))
            offset = ordinal % spec.page_units * spec.unit_stride
            for rank in self.ranks:
                rank.write(row[ordinal // spec.page_units], offset, truth.content(spec, state, rank.rank))

    def _scan(self, sequence: SequencePlan, spec: GroupSpec, text: Text) -> None:
        """Recurrent state: read once at the start of the chunk, written at each stop."""
        plan = sequence.state
        assert plan is not None
        if sequence.start:
            self._expect(sequence, spec, plan.read[spec.group], 0, text.state(sequence.start))
        for stop, pages in plan.stops:
            state = text.state(stop)
            for rank in self.ranks:
                rank.write(pages[spec.group], 0, self.truth.content(spec, state, rank.rank))

    def _expect(self, sequence: SequencePlan, spec: GroupSpec, slot: SlotId, offset: int, state: bytes) -> None:
        where = f"{sequence.request_id} at token {sequence.start}, group {spec.group}, slot {slot}"
        if slot == HOLE:
            raise Violation(f"{where}: reads a hole")
        for rank in self.ranks:
            self.reads += 1
            if rank.read(slot, offset, spec.unit_bytes) != self.truth.content(spec, state, rank.rank):
                raise Violation(f"{where}: finds other bytes than were computed")

    def _scribble(self, sequence: SequencePlan, rows: Rows) -> None:
        """A request that was aborted while its step ran still writes where the plan says."""
        stop = sequence.start + len(sequence.tokens)
        for spec, row in zip(self.truth.layout.groups, rows, strict=True):
            pages: list[tuple[SlotId, int]] = []
            if keeps_checkpoints(spec.kind):
                assert sequence.state is not None
                pages = [(slots[spec.group], 0) for _, slots in sequence.state.stops]
            else:
                units = range(sequence.start // spec.hash_unit, -(-stop // spec.hash_unit))
                pages = [(row[u // spec.page_units], u % spec.page_units * spec.unit_stride) for u in units]
            for slot, offset in pages:
                for rank in self.ranks:
                    rank.write(slot, offset, b"\x5a" * spec.unit_bytes)
