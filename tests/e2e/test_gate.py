"""The gate on the real model: five schedules and the host tier give equal logits and equal cached bytes.

Gemma 3 270M in bf16, a sequence well beyond its window of 512 tokens.  Each run is watched: after every step the bytes
of each whole unit that the request holds are read from the arena, group by group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from e2e.conftest import real_prompt
from e2e.support import UNIT, assert_at_rest, greedy, make_llm, settle
from ostinato.cache.kinds import keeps_checkpoints
from ostinato.engine.llm import LLM
from ostinato.ids import HOLE, RequestId
from ostinato.runtime.load import Runtime
from ostinato.scheduler.plan import StepPlan, StepResult

LENGTH: Final = 709
DECODED: Final = 14
"""Tokens of the sequence that one run computes one by one; a unit ends among them."""
Units = dict[tuple[int, int], bytes]
"""By group and unit."""


class Watch:
    """Executes an engine's plans and keeps the bytes of the whole units of one request."""

    def __init__(self, llm: LLM, name: RequestId) -> None:
        self.units: Units = {}
        self.starts: list[int] = []
        self.logits: list[bytes] = []
        """Digests of the logits of every sampled token."""
        self._built = llm.built
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._built.worker, name)

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._built.worker.execute(plan)
        for sequence in plan.sequences:
            if sequence.request_id == self._name:
                self.starts.append(sequence.start)
                self._read(sequence.start + len(sequence.tokens))
        self.logits += [token.digest for token in result.sampled if token.request_id == self._name]
        return result

    def _read(self, computed: int) -> None:
        table, raw = self._built.hierarchy.table(self._name), self._built.worker.arena.raw
        for group in table.groups:
            assert not keeps_checkpoints(group.kind)
            for unit in range(computed // UNIT):
                page, place = divmod(unit, group.page_units)
                if (slot := table.slot(group.group, page)) == HOLE:
                    continue
                begin = place * group.unit_stride
                found = raw[slot, begin : begin + group.unit_bytes].numpy().tobytes()
                assert self.units.setdefault((group.group, unit), found) == found, "a whole unit changed"


@contextmanager
def watching(llm: LLM, name: str) -> Iterator[Watch]:
    watch = Watch(llm, RequestId(name))
    engine: Any = llm.built.engine
    before, engine.executor = engine.executor, watch
    yield watch
    engine.executor = before


class Gate:
    """One sequence, and what its run in one piece gave."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.pages = runtime.layout.peak_pages(LENGTH + 8, 1024) * 2
        self.start = real_prompt(runtime, 60, "")[: LENGTH - DECODED]
        # The model goes on itself, so that the tail can be decoded as well as given.
        with make_llm(runtime, self.pages, max_num_batched_tokens=1024) as llm, watching(llm, "request-0") as watch:
            output = llm.generate(self.start, greedy(DECODED + 2))[0]
        self.decoded, self.logits = watch, watch.logits[DECODED:]
        self.answer = output.outputs[0].token_ids[DECODED:]
        self.tokens = self.start + list(output.outputs[0].token_ids[:DECODED])
        self.whole = self.run(max_num_batched_tokens=1024)
        assert self.whole.starts[:2] == [0, LENGTH]

    def run(self, others: int = 0, **options: Any) -> Watch:
        """The sequence through an engine of its own, and its logits compared; ``others``: requests beside it."""
        with make_llm(self.runtime, self.pages * (1 + others), enable_prefix_caching=False, **options) as llm:
            return self.ask(llm, others)

    def ask(self, llm: LLM, others: int = 0, name: str = "request-0") -> Watch:
        beside = [self.tokens[3 + 50 * i : 300 + 120 * i] for i in range(others)]
        with watching(llm, name) as watch:
            output = llm.generate([self.tokens, *beside], greedy(2))[0]
        assert output.request_id == name
        assert output.outputs[0].token_ids == self.answer
        assert watch.logits == self.logits
        assert all(watch.logits)
        return watch

    def check(self, watch: Watch, least: int = LENGTH // UNIT) -> None:
        """Every unit that both runs held is the same; at least ``least`` of each group."""
        both = watch.units.keys() & self.whole.units.keys()
        for group in self.runtime.layout.groups:
            assert sum(number == group.group for number, _ in both) >= least, group
        assert [key for key in sorted(both) if watch.units[key] != self.whole.units[key]] == []


@pytest.fixture(scope="module")
def gate(real_bf16: Runtime) -> Gate:
    assert real_bf16.promise.bitwise
    return Gate(real_bf16)


def test_a_decoded_tail(gate: Gate) -> None:
    assert len(gate.decoded.starts) == DECODED + 2
    gate.check(gate.decoded)


@pytest.mark.parametrize("step", [64, 151])
def test_chunks(gate: Gate, step: int) -> None:
    watch = gate.run(max_num_batched_tokens=step)
    assert len(watch.starts) == -(-LENGTH // step) + 1
    gate.check(watch)


def test_beside_others(gate: Gate) -> None:
    watch = gate.run(others=3, max_num_batched_tokens=400)
    assert len(watch.starts) > 2
    gate.check(watch)


def test_the_host_tier_and_back(gate: Gate) -> None:
    """What comes back is what went down; window groups bring the units that the cut needs, the full group all."""
    with make_llm(gate.runtime, gate.pages, kv=["host:64MiB"], max_num_batched_tokens=1024) as llm:
        gate.check(gate.ask(llm))
        settle(llm)
        llm.reset_prefix_cache(device_only=True)
        watch = gate.ask(llm, name="request-1")
        settle(llm)
        assert_at_rest(llm)
    cut = LENGTH // UNIT * UNIT
    assert watch.starts[0] == cut
    gate.check(
        watch, least=min(high - low for g in gate.runtime.layout.groups for low, high in g.kind.required(cut, UNIT))
    )
