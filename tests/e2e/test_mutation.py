"""The comparison bites: one block changed in host memory, and the reloaded run is no longer identical to cold.

Without this, "identical" could also mean that the reloaded blocks do not matter, or that nobody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from e2e.conftest import real_prompt
from e2e.faults import host_pages
from e2e.support import UNIT, Oracle, greedy, make_llm, settle, tokens
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.ids import TierId
from ostinato.runtime.load import Runtime
from ostinato.serve.demo.report import Row

HOST = TierId("host")


def zero(pages: torch.Tensor, slot: int, other: int, token_bytes: int) -> None:
    pages[slot] = 0


def swap(pages: torch.Tensor, slot: int, other: int, token_bytes: int) -> None:
    """With a block of another group.  Two of one group would not do: keys carry their positions, sums have no order."""
    pages[[slot, other]] = pages[[other, slot]]


def shift(pages: torch.Tensor, slot: int, other: int, token_bytes: int) -> None:
    """Each token's key and value one token further on."""
    pages[slot] = pages[slot].roll(token_bytes)


Mutation = Callable[[torch.Tensor, int, int, int], None]
MUTATIONS: tuple[Mutation, ...] = (zero, swap, shift)


class Bench:
    """One prompt stored in host memory, to be asked for again with a block changed."""

    def __init__(self, runtime: Runtime, prompt: Sequence[int], cold: RequestOutput) -> None:
        self.runtime, self.prompt, self.cold = runtime, list(prompt), cold
        # Stores may pin half of the pool, and one step fills all these blocks.
        pages = 2 * sum(group.pages(len(prompt) + 8) for group in runtime.layout.groups) + 16
        self.llm: LLM = make_llm(runtime, pages, kv=[f"host:{4 * pages * runtime.layout.page_bytes}"])
        self._generate()
        self.pages = host_pages(self.llm.built.worker._movers[HOST])
        self.cut = (len(prompt) - 1) // UNIT * UNIT

    def slots(self, group: int) -> list[int]:
        """Host slots of the blocks of ``group`` that the hit loads, first one first."""
        spec = self.runtime.layout.groups[group]
        wanted = [m for low, high in spec.kind.required(self.cut, UNIT) for m in range(low, high)]
        found = {
            entry.ordinal: entry.places[HOST].slot
            for entry in self.llm.built.hierarchy.core.directory
            if entry.key.group == group and HOST in entry.places
        }
        return [found[ordinal] for ordinal in wanted]

    def row(self) -> Row:
        """Ask again with the device empty, as the demo does."""
        self.llm.reset_prefix_cache(device_only=True)
        return Row.of("host", self._generate(), self.cold, self.cut)

    def mutated(self, mutation: Mutation, group: int, which: int) -> Row:
        """:meth:`row` with one block changed, which is then put back."""
        spec = self.runtime.layout.groups[group]
        other = (group + 1) % len(self.runtime.layout.groups)
        token_bytes = spec.unit_bytes // len(spec.layers) // 2 // UNIT
        before = self.pages.clone()
        mutation(self.pages, self.slots(group)[which], self.slots(other)[which], token_bytes)
        try:
            return self.row()
        finally:
            self.pages.copy_(before)

    def _generate(self) -> RequestOutput:
        output = self.llm.generate(self.prompt, greedy())[0]
        settle(self.llm)
        return output


def groups_of(runtime: Runtime) -> dict[str, int]:
    """One group that attends over a window, and one that attends over everything."""
    last = 10 * 512
    sizes = {g.group: sum(high - low for low, high in g.kind.required(last, UNIT)) for g in runtime.layout.groups}
    full = max(sizes, key=lambda group: sizes[group])
    window = min(sizes, key=lambda group: sizes[group])
    assert sizes[window] < sizes[full] == last // UNIT
    return {"window": window, "full": full}


@pytest.fixture(scope="module", params=["tiny float32", "tiny bfloat16", "real bfloat16"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    model, _, dtype = request.param.partition(" ")
    short = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    runtime = request.getfixturevalue(f"{model}_{short}")
    prompt = tokens(200) if model == "tiny" else real_prompt(runtime, 52, "Then")
    cold = Oracle(runtime, runtime.layout.peak_pages(len(prompt) + 8, 512))(prompt)
    made = Bench(runtime, prompt, cold)
    yield made
    made.llm.close()


@pytest.mark.parametrize("kind", ["window", "full"])
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_changed_block_is_seen(bench: Bench, mutation: Mutation, kind: str) -> None:
    group = groups_of(bench.runtime)[kind]
    for which in (-1, 1):
        row = bench.mutated(mutation, group, which)
        assert row.cached_tokens == row.expected_tokens == row.cached_by_tier["host"]
        assert not row.identical, (mutation.__name__, kind, which)


def test_unchanged_blocks_are_identical(bench: Bench) -> None:
    """After all those changes were put back: the difference was theirs."""
    row = bench.row()
    assert row.identical
    assert row.cached_tokens == row.expected_tokens == row.cached_by_tier["host"]


def test_a_block_that_nothing_needs_may_change(bench: Bench) -> None:
    """A window's blocks behind the cut are not loaded: rubbish there reaches nobody."""
    group = groups_of(bench.runtime)["window"]
    needed = set(bench.slots(group))
    before = bench.pages.clone()
    for entry in bench.llm.built.hierarchy.core.directory:
        if entry.key.group == group and HOST in entry.places and entry.places[HOST].slot not in needed:
            bench.pages[entry.places[HOST].slot] = 0xFF
    row = bench.row()
    bench.pages.copy_(before)
    assert row.identical
