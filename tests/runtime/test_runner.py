"""The runner and the worker: exact tokens over paged memory, tables between steps, digests, transfers."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tiny_models as tiny
from ostinato.cache.layout import CacheLayout, LayerSpec
from ostinato.errors import ModelRefusedError
from ostinato.ids import HOLE, JobId, RequestId, SlotId, Step, TierId
from ostinato.runtime import load, selfcheck
from ostinato.runtime.attention_hook import paged_attention
from ostinato.runtime.context import BlockRow, Span, build_groups
from ostinato.runtime.linear import PackedLinear, RowRule
from ostinato.runtime.load import build_runtime, make_worker
from ostinato.runtime.runner import logits_digest
from ostinato.sampling_params import SamplingParams
from ostinato.scheduler.plan import PageCopy, SequencePlan, StepPlan
from ostinato.transfer.job import JobKind, TransferOrder, TransferReport

LENGTHS = (5, 90, 37, 1, 16, 64)
NEW_TOKENS = 12


def generated(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens by transformers' own ``generate``, one prompt at a time."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        with torch.inference_mode():
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("name", list(tiny.FAMILIES))
def test_greedy_tokens_equal_generate(name: str) -> None:
    """Random chunks and batches, scattered pages, NaN in every byte not written or already given back."""
    prompts = tiny.prompts(LENGTHS)
    expected = generated(tiny.FAMILIES[name](), prompts)
    runtime = build_runtime(tiny.FAMILIES[name]())
    for seed in range(2):
        driver = tiny.Driver(runtime, seed=seed)
        assert driver.generate(prompts, NEW_TOKENS) == expected
        assert driver.worker._runner.num_sequences == 0
        assert len(driver.free) == driver.worker.arena.num_pages


def test_pages_of_several_units_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tiny.prompts(LENGTHS)
    expected = generated(tiny.gemma3(), prompts)
    build = load.build_layout

    def coarse(layers: Sequence[LayerSpec], hash_unit: int) -> CacheLayout:
        layout = build(layers, hash_unit=hash_unit)
        groups = tuple(replace(group, page_units=2, unit_stride=layout.page_bytes) for group in layout.groups)
        return CacheLayout(groups, 2 * layout.page_bytes)

    monkeypatch.setattr(load, "build_layout", coarse)
    runtime = build_runtime(tiny.gemma3())
    assert {group.page_units for group in runtime.layout.groups} == {2}
    assert tiny.Driver(runtime).generate(prompts, NEW_TOKENS) == expected


def test_a_model_that_differs_over_pages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*args: Any, **kwargs: Any) -> Any:
        output, weights = paged_attention(*args, **kwargs)
        return output * 1.3, weights

    monkeypatch.setattr("ostinato.runtime.attention_hook.paged_attention", shifted)
    with pytest.raises(ModelRefusedError, match="logits differ"):
        build_runtime(tiny.llama())


def test_the_promise_is_withdrawn_when_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10**6))

    def jittery(*args: Any, **kwargs: Any) -> Any:
        output, weights = paged_attention(*args, **kwargs)
        return output * (1 + 1e-6 * (next(calls) % 7)), weights

    monkeypatch.setattr("ostinato.runtime.attention_hook.paged_attention", jittery)
    runtime = build_runtime(tiny.llama())
    assert not runtime.promise.bitwise
    assert "within tolerance" in runtime.identity.numerics


# ------------------------------------------------------------------------------------------------------- small pieces


def test_block_rows_grow_and_keep_holes() -> None:
    row = BlockRow()
    row.append((), 2)
    row.append((SlotId(3), HOLE, SlotId(1)), 2)
    assert row.blocks.tolist() == [6, 7, -1, -1, 2, 3]
    for page in range(200):
        row.append((SlotId(page),), 1)
    assert row.blocks.tolist() == [6, 7, -1, -1, 2, 3, *range(200)]


def test_index_arrays() -> None:
    first = Span(30, 5, (np.array([4, 9, 2], dtype=np.int32),))
    second = Span(0, 1, (np.array([7], dtype=np.int32),))
    (group,) = build_groups([first, second], [16])
    assert group.cu_q.tolist() == [0, 5, 6]
    assert group.seq_lens.tolist() == [35, 1]
    assert group.context_lens == [30, 0]
    assert group.block_table.tolist() == [[4, 9, 2], [7, -1, -1]]
    assert group.slots.tolist() == [9 * 16 + 14, 9 * 16 + 15, 2 * 16, 2 * 16 + 1, 2 * 16 + 2, 7 * 16]
    assert group.slots.dtype == group.block_table.dtype == group.cu_q.dtype == torch.int32


def test_computing_into_a_hole_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="no block"):
        build_groups([Span(0, 2, (np.array([-1], dtype=np.int32),))], [16])


def test_row_rules() -> None:
    assert [RowRule(2, 1).pad(n) for n in (1, 2, 3)] == [2, 2, 3]
    assert [RowRule(16, 16).pad(n) for n in (1, 16, 17)] == [16, 16, 32]
    assert RowRule(2, 1) | RowRule(1, 16) == RowRule(2, 16)


def test_weights_that_were_packed_cannot_be_used_by_mistake() -> None:
    linear = torch.nn.Linear(64, 32)
    packed = PackedLinear(linear)
    rows = torch.randn(3, 64)
    assert torch.allclose(packed(rows), linear(rows), atol=1e-5)
    assert packed(rows[:0]).shape == (0, 32)
    assert packed.weight.dtype == linear.weight.dtype
    assert packed.weight.shape == linear.weight.shape
    for compute in (lambda: torch.nn.functional.linear(rows, packed.weight), lambda: packed.weight @ rows.T):
        with pytest.raises(TypeError):
            compute()


# -------------------------------------------------------------------------------------------------------------- steps


class RecordingMover:
    """Reports each order at the poll after its submission."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.ready: list[TransferReport] = []
        self.closed = False

    def submit(self, order: TransferOrder) -> None:
        self.log.append(("submit", order.job_id))
        self.ready.append(TransferReport(order.job_id))

    def poll(self) -> Sequence[TransferReport]:
        ready, self.ready = self.ready, []
        return ready

    def cancel(self, job_id: JobId) -> None:
        self.log.append(("cancel", job_id))

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def runtime() -> load.Runtime:
    return build_runtime(tiny.llama())


def order(number: int, after: int) -> TransferOrder:
    return TransferOrder(JobId(number), JobKind.STORE, TierId("host"), (), Step(after))


def test_transfers_start_when_their_step_is_done(runtime: load.Runtime) -> None:
    mover = RecordingMover()
    worker = make_worker(runtime, 4, {TierId("host"): mover})
    first = worker.execute(StepPlan(Step(1), transfers=(order(1, 0), order(2, 1), order(3, 2))))
    assert mover.log == [("submit", 1), ("submit", 2)]
    assert [report.job_id for report in first.reports] == [1, 2]
    worker.execute(StepPlan(Step(2), cancelled=(JobId(1), JobId(99))))
    assert mover.log[2:] == [("submit", 3)]
    worker.close()
    assert mover.closed


def test_a_running_job_can_be_cancelled(runtime: load.Runtime) -> None:
    mover = RecordingMover()
    worker = make_worker(runtime, 4, {TierId("host"): mover})
    mover.poll = lambda: ()  # type: ignore[method-assign]
    worker.execute(StepPlan(Step(1), transfers=(order(1, 0),)))
    worker.execute(StepPlan(Step(2), cancelled=(JobId(1),)))
    assert mover.log == [("submit", 1), ("cancel", 1)]


def test_wait_sleeps_until_a_mover_notifies(runtime: load.Runtime) -> None:
    worker = make_worker(runtime, 4, {})
    assert not worker.wait(0.01)
    timer = threading.Timer(0.05, worker.notify)
    timer.start()
    assert worker.wait(10.0)
    assert worker.wait(0.0), "what was announced stays announced until it is collected"
    worker.execute(StepPlan(Step(1)))
    assert not worker.wait(0.0)


def one(tokens: Sequence[int], pages: Sequence[int], start: int = 0, **more: Any) -> SequencePlan:
    params = SamplingParams(temperature=0.0, logits_digest=more.pop("digest", False))
    table = (tuple(SlotId(page) for page in pages),)
    fields: dict[str, Any] = {"fresh": True, "sample": True, "sampling": params} | more
    return SequencePlan(RequestId("a"), start, tuple(tokens), table, **fields)


def test_copied_pages_serve_another_request(runtime: load.Runtime) -> None:
    (prompt,) = tiny.prompts((20,))
    worker = make_worker(runtime, 6, {}, poison=True)
    whole = worker.execute(StepPlan(Step(1), (one(prompt, (0, 1)),))).sampled
    copies = tuple(PageCopy(SlotId(0), SlotId(5), 0, runtime.layout.page_bytes) for _ in range(1))
    resumed = one(prompt[16:], (5, 3), start=16)
    assert worker.execute(StepPlan(Step(2), (resumed,), copies)).sampled == whole


def test_digest_is_of_the_logits_row(runtime: load.Runtime) -> None:
    (prompt,) = tiny.prompts((20,))
    runner, _ = tiny.logits_runner(runtime, 4)
    logits = runner.logits(StepPlan(Step(1), (one(prompt, (0, 1)),)))
    assert logits is not None
    worker = make_worker(runtime, 4, {})
    (with_digest,) = worker.execute(StepPlan(Step(1), (one(prompt, (2, 0), digest=True),))).sampled
    assert with_digest.token == int(logits[0].argmax())
    assert with_digest.digest == logits_digest(logits[0])
    assert with_digest.digest == hashlib.sha256(logits[0].float().numpy().tobytes()).digest()
    (without,) = worker.execute(StepPlan(Step(2), (one(prompt, (2, 0)),))).sampled
    assert without.digest == b""


def test_a_step_without_samples_still_fills_pages(runtime: load.Runtime) -> None:
    (prompt,) = tiny.prompts((20,))
    worker = make_worker(runtime, 4, {}, poison=True)
    whole = worker.execute(StepPlan(Step(1), (one(prompt, (0, 1)),))).sampled
    worker.arena.poison_page(SlotId(0))
    worker.arena.poison_page(SlotId(1))
    assert worker.execute(StepPlan(Step(2), (one(prompt[:16], (0, 1), sample=False),))).sampled == ()
    last = SequencePlan(RequestId("a"), 16, tuple(prompt[16:]), ((),), fresh=False, sample=True)
    assert worker.execute(StepPlan(Step(3), (last,))).sampled == whole


def test_two_workers_share_one_model(runtime: load.Runtime) -> None:
    """Same weights, two arenas, two threads."""
    prompts = tiny.prompts((40, 33))
    expected = tiny.Driver(runtime).generate(prompts, 8)
    answers: dict[int, list[list[int]]] = {}

    def serve(seed: int) -> None:
        answers[seed] = tiny.Driver(runtime, seed=seed).generate(prompts, 8)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {1: expected, 2: expected}


def test_distance_is_relative_to_the_spread() -> None:
    row = torch.tensor([1.0, 2.0, 3.0]) + 100
    assert selfcheck.distance(row, row) == 0
    assert selfcheck.distance(row + 0.1 * (row - row.mean()), row) == pytest.approx(0.1, rel=1e-3)
