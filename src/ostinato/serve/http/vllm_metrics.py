"""The metrics that dashboards and routers of vLLM read, under vLLM's names.

Owns: names, labels (``model_name``, ``engine``) and their meaning here.  Does not own: our own metrics (``metrics``,
``engine_metrics``).  Threads: any; the client library locks.

Where a tier is meant, vLLM knows its own pool (``prefix_cache_*``) and all others (``external_prefix_cache_*``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ostinato.engine.load import Load
from ostinato.engine.outputs import RequestOutput
from ostinato.ids import DEVICE
from ostinato.observe.timeline import RequestPhase, RequestRecord

M = TypeVar("M", Counter, Gauge, Histogram)
FIRST_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
GAP_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)
REQUEST_S: Final = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
COUNTS: Final = (0, 1, 2, 5, 10, 20)
ENDS: Final = ("stop", "length", "abort", "error")
_SOURCES: Final = ("device", "host", "disk")


class VllmMetrics:
    """``longest``: tokens of the longest request, for buckets.  ``info``: labels of ``cache_config_info``."""

    def __init__(self, registry: CollectorRegistry, model: str, longest: int, info: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = {"model_name": model, "engine": "0"}
        tokens = tuple(_tokens_up_to(longest))
        count, seconds = self._counter, self._histogram
        self._queries = count("prefix_cache_queries", "Prompt tokens that were looked up")
        self._hits = count("prefix_cache_hits", "Of these, tokens found in the device pool")
        self._external_queries = count("external_prefix_cache_queries", "Tokens looked up in lower tiers")
        self._external_hits = count("external_prefix_cache_hits", "Of these, tokens found")
        self._preemptions = count("num_preemptions", "Requests begun again for want of room")
        self._prompt = count("prompt_tokens", "Tokens of prompts")
        self._by_source = count("prompt_tokens_by_source", "Tokens of prompts by where their KV came from", "source")
        self._cached = count("prompt_tokens_cached", "Prompt tokens that were not computed")
        self._cached_by_source = count("prompt_tokens_cached_by_source", "The same by tier", "source")
        self._generated = count("generation_tokens", "Tokens of outputs")
        self._success = count("request_success", "Completions by how they ended", "finished_reason")
        self._first = seconds("time_to_first_token_seconds", "From arrival", FIRST_S)
        self._gap = seconds("inter_token_latency_seconds", "Between tokens of a completion", GAP_S)
        self._per_token = seconds("request_time_per_output_token_seconds", "A request's mean", GAP_S)
        self._latency = seconds("e2e_request_latency_seconds", "From arrival to the last token", REQUEST_S)
        self._queue_time = seconds("request_queue_time_seconds", "Until its first step", REQUEST_S)
        self._prefill_time = seconds("request_prefill_time_seconds", "Until its first token", REQUEST_S)
        self._decode_time = seconds("request_decode_time_seconds", "From there to its last", REQUEST_S)
        self._inference_time = seconds("request_inference_time_seconds", "Both together", REQUEST_S)
        self._prompt_length = seconds("request_prompt_tokens", "Tokens of a prompt", tokens)
        self._computed = seconds("request_prefill_kv_computed_tokens", "Tokens of it that were computed", tokens)
        self._output_length = seconds("request_generation_tokens", "Tokens of a completion", tokens)
        self._n = seconds("request_params_n", "Completions of a request", COUNTS)
        self._request_preemptions = seconds("request_num_preemptions", "Preemptions of a request", COUNTS)
        self._running = self._gauge("num_requests_running", "Completions that hold blocks")
        self._waiting = self._gauge("num_requests_waiting", "Completions that wait to start")
        self._usage = self._gauge("kv_cache_usage_perc", "Share of the device pool that requests hold; 1 is all")
        self._gauge("cache_config_info", "The cache's shape", *info).labels(**self._labels, **info).set(1)
        for reason in ENDS:
            self._success.labels(**self._labels, finished_reason=reason)

    def token_gap(self, seconds: float) -> None:
        self._gap.labels(**self._labels).observe(seconds)

    def finished(self, output: RequestOutput) -> None:
        labels = self._labels
        prompt, cached = len(output.prompt_token_ids), output.cached_tokens
        near = output.cached_by_tier.get(DEVICE, 0)
        if output.prompt_logprobs is None:  # else it was to be computed as a whole, and nobody looked
            self._queries.labels(**labels).inc(prompt)
            self._hits.labels(**labels).inc(near)
            self._external_queries.labels(**labels).inc(prompt - near)
            self._external_hits.labels(**labels).inc(cached - near)
        self._prompt.labels(**labels).inc(prompt)
        self._cached.labels(**labels).inc(cached)
        sources = {"local_compute": prompt - cached, "local_cache_hit": near, "external_kv_transfer": cached - near}
        for source, count in sources.items():
            self._by_source.labels(**labels, source=source).inc(count)
        for tier, count in output.cached_by_tier.items():
            source = tier if tier in _SOURCES else "external_unspecified"
            self._cached_by_source.labels(**labels, source=source).inc(count)
        self._preemptions.labels(**labels).inc(output.metrics.preemptions)
        self._observe(output)

    def ended(self, record: RequestRecord) -> None:
        """Phases of one that has finished, as vLLM parts them: waiting for a load is queueing."""
        if record.outcome != "finished":
            return
        labels, phase = self._labels, RequestPhase
        computing = record.seconds(phase.PREFILL) + record.seconds(phase.DECODE)
        self._queue_time.labels(**labels).observe(sum(map(record.seconds, phase)) - computing)
        self._prefill_time.labels(**labels).observe(record.seconds(phase.PREFILL))
        self._decode_time.labels(**labels).observe(record.seconds(phase.DECODE))
        self._inference_time.labels(**labels).observe(computing)

    def aborted(self, completions: int = 1) -> None:
        self._success.labels(**self._labels, finished_reason="abort").inc(completions)

    def look_at(self, load: Load) -> None:
        """Take over what the engine says of itself now."""
        self._running.labels(**self._labels).set(load.running)
        self._waiting.labels(**self._labels).set(load.waiting)
        device = load.tiers[0]
        self._usage.labels(**self._labels).set((device.used + device.quarantine) / device.blocks)

    def _observe(self, output: RequestOutput) -> None:
        labels, times = self._labels, output.metrics
        self._first.labels(**labels).observe(times.ttft_s)
        self._latency.labels(**labels).observe(times.total_s)
        self._prompt_length.labels(**labels).observe(len(output.prompt_token_ids))
        self._computed.labels(**labels).observe(len(output.prompt_token_ids) - output.cached_tokens)
        self._n.labels(**labels).observe(len(output.outputs))
        self._request_preemptions.labels(**labels).observe(times.preemptions)
        longest = max(len(one.token_ids) for one in output.outputs)
        if longest > 1:
            self._per_token.labels(**labels).observe((times.total_s - times.ttft_s) / (longest - 1))
        for one in output.outputs:
            self._generated.labels(**labels).inc(len(one.token_ids))
            self._output_length.labels(**labels).observe(len(one.token_ids))
            self._success.labels(**labels, finished_reason=one.finish_reason or "abort").inc()

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return self._begun(Counter(f"vllm:{name}", about, [*self._labels, *labels], registry=self._registry), labels)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return self._begun(Gauge(f"vllm:{name}", about, [*self._labels, *labels], registry=self._registry), labels)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"vllm:{name}", about, list(self._labels), buckets=buckets, registry=self._registry)
        return self._begun(made, ())

    def _begun(self, metric: M, labels: tuple[str, ...]) -> M:
        """``metric``, which begins at 0 rather than being absent, where that is one series."""
        if not labels:
            metric.labels(**self._labels)
        return metric


def _tokens_up_to(longest: int) -> Iterator[float]:
    """1, 2, 5, 10, 20, 50, ... up to ``longest``."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if power * factor > longest:
                return
            yield float(power * factor)
        power *= 10
