"""Many requests in a pool that holds one and a half of them, over a host tier that evicts, with and without faults."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.faults import Faults, FaultyMover
from e2e.support import Oracle, assert_at_rest, greedy, make_llm, same, settle, tokens
from e2e.traffic import LONGEST_ANSWER, LONGEST_PROMPT, Drive, make_arrivals
from ostinato.cache.pool import SlotState
from ostinato.connectors.host import HostConnector
from ostinato.engine.llm import LLM
from ostinato.ids import TierId
from ostinato.runtime.load import Runtime

STEP_TOKENS = 64


def pool_pages(runtime: Runtime, share: float = 1.5) -> int:
    """Pages for ``share`` of the longest request."""
    return int(runtime.layout.peak_pages(LONGEST_PROMPT + LONGEST_ANSWER, STEP_TOKENS) * share)


def stress_llm(runtime: Runtime, pages: int, host_pages: int = 150, **options: Any) -> LLM:
    tier = f"host:{host_pages * runtime.layout.page_bytes}"
    settings = {"scheduling_policy": "priority", "kv": [tier], "max_num_batched_tokens": STEP_TOKENS}
    return make_llm(runtime, pages, **(settings | options))


def evictions(llm: LLM) -> dict[str, int]:
    core = llm.built.hierarchy.core
    return {str(tier.tier): tier.retention.evictions for tier in (core.device, *core.lower.values())}


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_traffic_equals_cold(tiny: Runtime, cold: Oracle, seed: int, store: str) -> None:
    tier = f"host:{150 * tiny.layout.page_bytes}?store={store}"
    with stress_llm(tiny, pool_pages(tiny), kv=[tier]) as llm:
        drive = Drive(llm, make_arrivals(60, seed), seed)
        drive.run()
        settle(llm)
        assert_at_rest(llm)
        evicted = evictions(llm)
        assert evicted["device"] > 0 < evicted["host"], evicted
        assert sum(output.metrics.preemptions for output in drive.done.values()) > 0
        assert sum(output.cached_by_tier.get("host", 0) for output in drive.done.values()) > 0
        drive.check(cold)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_aborts_in_every_phase(tiny_fp32: Runtime, cold_fp32: Oracle, policy: str) -> None:
    """Half of all requests are aborted: while waiting, loading, in prefill, in decode."""
    with stress_llm(tiny_fp32, pool_pages(tiny_fp32), scheduling_policy=policy) as llm:
        drive = Drive(llm, make_arrivals(60, seed=1), seed=4, abort_share=5.0)
        drive.run()
        assert len(drive.aborted) > 15, drive.aborted
        settle(llm)
        assert_at_rest(llm)
        drive.check(cold_fp32)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Every host tier gets a faulty mover."""
    faults, seed = request.param

    def make_mover(self: HostConnector, device: Any, notify: Any) -> FaultyMover:
        return FaultyMover(device, self._slots, notify, faults, seed)

    monkeypatch.setattr(HostConnector, "make_mover", make_mover)


SCENES = {
    "failing": (Faults(fail=0.7, delay=0.0, withhold=0.0), 1),
    "slow": (Faults(fail=0.0, delay=0.9, withhold=0.0, longest_delay=12), 2),
    "withholding": (Faults(fail=0.0, delay=0.0, withhold=0.5), 3),
    "all": (Faults(withhold=0.2), 4),
}


@pytest.mark.parametrize("faulty", SCENES.values(), ids=SCENES.keys(), indirect=True)
def test_faults_are_misses(faulty: None, tiny_fp32: Runtime, cold_fp32: Oracle) -> None:
    """Whatever the mover does, outputs equal cold, nothing hangs and, once it has spoken, nothing is lost."""
    # Blocks in doubt stay locked, so the pool has room for them beside one and a half requests.
    pages = pool_pages(tiny_fp32, 3.0)
    with stress_llm(tiny_fp32, pages, host_pages=800, load_deadline_s=0.05) as llm:
        mover = llm.built.worker._movers[TierId("host")]
        assert isinstance(mover, FaultyMover)
        drive = Drive(llm, make_arrivals(60, seed=1), seed=5)
        drive.run()
        drive.check(cold_fp32)
        assert any(mover.counts[name] for name in ("failed load", "withheld load", "delayed")), mover.counts
        mover.confess()
        for _ in range(20):  # reports of jobs in doubt, which `settle` would not wait for
            llm.built.engine.step()
        settle(llm)
        assert_at_rest(llm)


LOST = Faults(fail=0.0, delay=0.0, repeat=0.0, withhold=1.0, most_withheld_stores=0, lost=True)


@pytest.mark.parametrize("faulty", [(LOST, 0)], ids=["lost"], indirect=True)
def test_a_load_that_is_never_reported_hangs_nobody(faulty: None, tiny_fp32: Runtime, cold_fp32: Oracle) -> None:
    """Its blocks stay locked, since the mover may still write there; requests and resets go on without them."""
    with make_llm(tiny_fp32, kv=["host:16MiB"], load_deadline_s=0.05) as llm:
        for _ in range(2):
            output = llm.generate(tokens(100), greedy())[0]
            settle(llm)
            assert same(output, cold_fp32(tokens(100)))
            assert output.cached_tokens == 0
            assert llm.reset_prefix_cache(device_only=True) > 0
        pool = llm.built.hierarchy.core.device.pool
        states = [pool.state(slot) for slot in range(pool.capacity)]
        assert 0 < states.count(SlotState.QUARANTINE) < 30
        llm.built.hierarchy.audit()
