"""What /metrics says, held against what clients were told, and a Prometheus server that reads it."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ostinato.runtime.load import Runtime
from serve.served import MODEL, Running, serving

VLLM = f'engine="0",model_name="{MODEL}"'


class Page:
    """One scrape."""

    def __init__(self, running: Running) -> None:
        text = httpx.get(f"{running.url}/metrics").text
        self.types = {family.name: family.type for family in text_string_to_metric_families(text)}
        self.values = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """The sum over all series that have these labels."""
        wanted = labels.items()
        found = [value for (this, have), value in self.values.items() if this == name and wanted <= dict(have).items()]
        assert found, f"no {name} with {labels}"
        return sum(found)


@pytest.fixture(scope="module")
def tiered(runtime: Runtime) -> Iterator[Running]:
    """A small device pool over a host tier, so that prompts come back from both."""
    with serving(runtime, {"num_gpu_blocks_override": 60, "kv": ["host:8MiB"]}) as one:
        yield one


def usage(client: openai.OpenAI, tokens: list[int], **more: int) -> openai.types.CompletionUsage:
    answer = client.completions.create(model=MODEL, prompt=tokens, temperature=0, max_tokens=4, **more)  # type: ignore[call-overload]
    assert answer.usage is not None
    found: openai.types.CompletionUsage = answer.usage
    return found


def test_identities(tiered: Running) -> None:
    client = tiered.client()
    prompts = [list(range(start, start + 150)) for start in (10, 60, 110, 160, 210)]
    told = [usage(client, prompt) for _ in range(3) for prompt in prompts]
    told.append(usage(client, prompts[0], n=2))
    page = Page(tiered)
    prompt, cached = (
        sum(one.prompt_tokens for one in told),
        sum(one.prompt_tokens_details.cached_tokens or 0 for one in told if one.prompt_tokens_details),
    )
    assert 0 < cached < prompt
    # Ours: the sum over tiers is what was cached, which is at most the prompts; clients were told the same.
    assert page("ostinato_prompt_tokens_total") == prompt
    assert page("ostinato_cached_tokens_total") == cached
    assert page("ostinato_cached_tokens_total", tier="host") > 0
    # vLLM's: the same numbers, and its own identities.
    assert page("vllm:prompt_tokens_total") == page("vllm:prefix_cache_queries_total") == prompt
    assert page("vllm:prompt_tokens_cached_total") == cached
    assert page("vllm:prefix_cache_hits_total") == page("ostinato_cached_tokens_total", tier="device")
    assert page("vllm:external_prefix_cache_hits_total") == page("ostinato_cached_tokens_total", tier="host")
    assert page("vllm:prompt_tokens_by_source_total") == prompt
    assert page("vllm:prompt_tokens_by_source_total", source="local_compute") == prompt - cached
    assert page("vllm:prompt_tokens_cached_by_source_total") == cached
    assert page("vllm:generation_tokens_total") == sum(one.completion_tokens for one in told)
    assert page("vllm:request_success_total") == len(told) + 1  # n=2 once
    assert page("vllm:e2e_request_latency_seconds_count") == len(told)
    for phase in ("queue", "prefill", "decode", "inference"):
        assert page(f"vllm:request_{phase}_time_seconds_count") == len(told)
    computing = page("vllm:request_prefill_time_seconds_sum") + page("vllm:request_decode_time_seconds_sum")
    assert page("vllm:request_inference_time_seconds_sum") == pytest.approx(computing)
    assert page("vllm:request_prompt_tokens_sum") == prompt
    assert page("vllm:request_prefill_kv_computed_tokens_sum") == prompt - cached


def test_blocks_and_bytes_add_up(tiered: Running) -> None:
    usage(tiered.client(), list(range(300, 420)))
    page = Page(tiered)
    layout = tiered.server.llm.llm.runtime.layout
    for tier in ("device", "host"):
        capacity = page("ostinato_tier_bytes", tier=tier, kind="capacity")
        assert page("ostinato_pool_blocks", tier=tier) * layout.page_bytes == capacity
        resident = page("ostinato_tier_bytes", tier=tier, kind="resident")
        free = page("ostinato_pool_blocks", tier=tier, state="free")
        assert resident == capacity - free * layout.page_bytes
        assert 0 <= page("ostinato_tier_bytes", tier=tier, kind="reserved") <= resident
        assert page("ostinato_pinned_blocks", tier=tier, direction="read") >= 0
        assert page("ostinato_cached_units", tier=tier) > 0
    assert page("ostinato_pool_blocks", tier="device") == 60
    assert page("vllm:kv_cache_usage_perc") == 0  # nothing runs: what is cached may be evicted
    loaded, stored = (page("ostinato_kv_transfer_bytes_total", dir=way, tier="host") for way in ("load", "store"))
    assert (loaded, stored) == tuple(page("ostinato_transferred_bytes", direction=way) for way in ("load", "store"))
    assert page("ostinato_kv_transfer_seconds_count", dir="store", tier="host") > 0
    assert page("ostinato_kv_store_outcomes_total", tier="host", outcome="stored") > 0
    assert page("ostinato_kv_store_outcomes_total", tier="host", outcome="failed") == 0
    assert page("ostinato_kv_load_failures_total", tier="host") == 0


def test_a_scored_prompt_is_not_counted_as_a_query(running: Running) -> None:
    before = Page(running)
    running.client().completions.create(model=MODEL, prompt=list(range(40)), max_tokens=0, echo=True, logprobs=1)
    after = Page(running)
    name = "vllm:prefix_cache_queries_total"
    assert after(name) == before(name)
    assert after("vllm:prompt_tokens_total") == before("vllm:prompt_tokens_total") + 40


def test_the_types_are_those_that_dashboards_expect(running: Running) -> None:
    page = Page(running)
    expected = {
        "vllm:num_requests_running": "gauge",
        "vllm:num_requests_waiting": "gauge",
        "vllm:kv_cache_usage_perc": "gauge",
        "vllm:cache_config_info": "gauge",
        "vllm:prefix_cache_queries": "counter",
        "vllm:prefix_cache_hits": "counter",
        "vllm:external_prefix_cache_queries": "counter",
        "vllm:external_prefix_cache_hits": "counter",
        "vllm:num_preemptions": "counter",
        "vllm:prompt_tokens": "counter",
        "vllm:generation_tokens": "counter",
        "vllm:request_success": "counter",
        "vllm:time_to_first_token_seconds": "histogram",
        "vllm:inter_token_latency_seconds": "histogram",
        "vllm:e2e_request_latency_seconds": "histogram",
        "vllm:request_time_per_output_token_seconds": "histogram",
        "vllm:request_prompt_tokens": "histogram",
        "vllm:request_generation_tokens": "histogram",
        "vllm:request_params_n": "histogram",
    }
    assert {name: page.types.get(name) for name in expected} == expected
    assert page("ostinato_cache_config_info", hash_unit="16", key_version="1") == 1
    assert page("vllm:cache_config_info", block_size="16", model_name=MODEL, engine="0") == 1


@pytest.mark.prometheus
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs apt-get install prometheus")
def test_a_prometheus_server_scrapes_it(running: Running, tmp_path: Path) -> None:
    usage(running.client(), list(range(60)))
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs:\n"
        f"  - {{job_name: ostinato, static_configs: [{{targets: ['127.0.0.1:{running.port}']}}]}}\n"
    )
    with subprocess.Popen(
        [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            "--web.listen-address=127.0.0.1:19390",
            "--log.level=error",
        ]
    ) as server:
        try:
            _wait_for(lambda: _ask('up{job="ostinato"}') == 1)
            page = Page(running)
            for query in ("vllm:prompt_tokens_total", "sum(ostinato_pool_blocks)", "vllm:request_success_total"):
                assert _ask(f"sum({query})") == page(query.removeprefix("sum(").removesuffix(")"))
        finally:
            server.terminate()


def _ask(query: str) -> float | None:
    try:
        answer = httpx.get("http://127.0.0.1:19390/api/v1/query", params={"query": query}).json()
    except httpx.TransportError:
        return None
    found = answer.get("data", {}).get("result", [])
    return float(found[0]["value"][1]) if found else None


def _wait_for(truth: object) -> None:
    deadline = time.monotonic() + 60
    while not truth():  # type: ignore[operator]
        assert time.monotonic() < deadline, "Prometheus has not scraped the server"
        time.sleep(0.25)
