"""The promise: equal prompts give equal bits, logits and cached bytes, whatever the schedule.

Five schedules over one prompt: at once, in chunks of 64, in odd chunks, with its tail decoded token by token, and
beside other requests.  Tiny models run always; the real Gemma 3 270M when its package is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

import tiny_models as tiny
from ostinato.errors import UnknownModelError
from ostinato.ids import RequestId, SlotId, Step
from ostinato.runtime.load import Runtime, build_runtime, load_runtime
from ostinato.scheduler.plan import SequencePlan, StepPlan

REAL = "gemma3-270m"
DTYPES = ("float32", "bfloat16")
Tables = tuple[tuple[SlotId, ...], ...]


@dataclass(frozen=True)
class Outcome:
    """What one schedule left behind: the logits after the last token, and all bytes cached for the prompt."""

    logits: torch.Tensor
    cached: tuple[torch.Tensor, ...]

    def same(self, other: Outcome) -> bool:
        return torch.equal(self.logits, other.logits) and all(
            torch.equal(a, b) for a, b in zip(self.cached, other.cached, strict=True)
        )


class Schedules:
    """Runs one prompt under several schedules, each over a poisoned pool of its own with pages in another order."""

    def __init__(self, runtime: Runtime, prompt: Sequence[int], others: Sequence[Sequence[int]]) -> None:
        self.runtime = runtime
        self.prompt = prompt
        self.others = others

    def run(self, cuts: Sequence[int], shares: Sequence[int] = ()) -> Outcome:
        """Chunks end at ``cuts``; in each step other request ``i`` advances by ``shares[i]`` tokens, if it has them."""
        runner, arena = tiny.logits_runner(self.runtime, 4 * self._pages(len(self.prompt)))
        order = torch.randperm(arena.num_pages, generator=torch.Generator().manual_seed(len(cuts))).tolist()
        pages = iter([SlotId(page) for page in order])
        mine = self._take(pages, len(self.prompt))
        tables = [self._take(pages, len(other)) for other in self.others]
        logits = None
        for step, (begin, end) in enumerate(pairwise((0, *cuts))):
            batch = [self._plan("mine", self.prompt, mine, begin, end)]
            for i, n in enumerate(shares):
                start, stop = step * n, min((step + 1) * n, len(self.others[i]))
                if start < stop:
                    batch.insert(i % 2, self._plan(f"other {i}", self.others[i], tables[i], start, stop))
            rows = runner.logits(StepPlan(Step(step + 1), tuple(batch)))
            assert rows is not None
            logits = rows[[plan.request_id for plan in batch].index(RequestId("mine"))]
        assert logits is not None
        return Outcome(
            logits,
            tuple(
                self._cached(arena.layers[layer].pages, mine[arena.layers[layer].group])
                for layer in sorted(arena.layers)
            ),
        )

    def _pages(self, tokens: int) -> int:
        return sum(group.pages(tokens) for group in self.runtime.layout.groups)

    def _take(self, pages: Iterator[SlotId], tokens: int) -> Tables:
        return tuple(tuple(next(pages) for _ in range(g.pages(tokens))) for g in self.runtime.layout.groups)

    def _plan(self, name: str, tokens: Sequence[int], tables: Tables, begin: int, end: int) -> SequencePlan:
        new = tables if begin == 0 else tuple(() for _ in tables)
        return SequencePlan(RequestId(name), begin, tuple(tokens[begin:end]), new, begin == 0, sample=True)

    def _cached(self, pages: object, table: Sequence[int]) -> torch.Tensor:
        """[tokens, heads * (key dim + value dim)] of the whole prompt, in order of position."""
        blocks = torch.tensor(table)
        parts = [getattr(pages, side)[blocks].transpose(1, 2).flatten(0, 1).flatten(1) for side in ("k", "v")]
        return torch.cat(parts, 1)[: len(self.prompt)]


def assert_invariant(schedules: Schedules) -> None:
    length = len(schedules.prompt)
    tail = length - 20
    once = schedules.run([length])
    assert not once.logits.isnan().any()
    assert schedules.run([*range(64, length, 64), length]).same(once), "chunks of 64"
    assert schedules.run([7, 50, 51, 133, length - 50, length]).same(once), "odd chunks"
    assert schedules.run([tail, *range(tail + 1, length + 1)]).same(once), "decode of the tail"
    assert schedules.run([100, 101, 102, 160, length], shares=(37, 1, 64)).same(once), "beside others"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(tiny.FAMILIES))
def test_tiny_models_are_bitwise_invariant(name: str, dtype: str) -> None:
    runtime = build_runtime(tiny.FAMILIES[name](getattr(torch, dtype)))
    assert runtime.promise.bitwise
    prompt, *others = tiny.prompts((210, 200, 190, 180))
    assert_invariant(Schedules(runtime, prompt, others))


@pytest.mark.parametrize("threads", [1, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_numbers_of_threads(threads: int, dtype: str) -> None:
    """torch cuts large tensors into one range per thread, in the middle of a vector if need be."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runtime = build_runtime(tiny.llama(getattr(torch, dtype), intermediate_size=1000))
        assert runtime.promise.bitwise
        prompt, *others = tiny.prompts((210, 200, 190, 180))
        assert_invariant(Schedules(runtime, prompt, others))
    finally:
        torch.set_num_threads(before)


@functools.cache
def real(dtype: str) -> Runtime:
    try:
        return load_runtime(REAL, dtype)
    except UnknownModelError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_gemma3_270m_is_bitwise_invariant(dtype: str) -> None:
    """About 300 tokens at the real sizes; the linear kernels behave otherwise there than at tiny ones."""
    runtime = real(dtype)
    assert runtime.promise.bitwise
    assert runtime.tokenizer is not None
    text = "The history of computing begins with simple counting devices. " * 40
    ids = runtime.tokenizer(text).input_ids
    schedules = Schedules(runtime, ids[:300], [ids[i : i + 200] for i in (3, 5, 9)])
    assert_invariant(schedules)
