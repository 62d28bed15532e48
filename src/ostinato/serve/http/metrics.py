"""Numbers for Prometheus.

Owns: our own counts of requests and answers, the page to scrape.  Does not own: vLLM's names (``vllm_metrics``), what
the engine counts (``engine_metrics``), what is counted where (``AsyncLLM`` calls the observer, the journal counts
answers).  Nothing of a request's content is in a label.  Threads: any; the client library locks.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ostinato.cache.keys import FORMAT_VERSION
from ostinato.engine.calls import Call
from ostinato.engine.llm import LLM
from ostinato.engine.load import Load
from ostinato.engine.outputs import RequestOutput
from ostinato.observe.timeline import RequestPhase, RequestRecord
from ostinato.serve.http.engine_metrics import EngineCollector
from ostinato.serve.http.vllm_metrics import VllmMetrics

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_FIRST_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAP_S: Final = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """One server's numbers, in a registry of their own.  It is the ``Observer`` of its ``AsyncLLM``.

    ``model``: what clients call it.
    """

    def __init__(self, llm: LLM, model: str) -> None:
        self.registry = registry = CollectorRegistry()
        self._vllm = VllmMetrics(registry, model, llm.startup.max_model_len, _vllm_info(llm))
        self._engine = EngineCollector()
        registry.register(self._engine)
        self._answers = Counter("ostinato_http_requests", "Answers", ["path", "status"], registry=registry)
        self._requests = Counter("ostinato_requests", "Prompts by how they ended", ["outcome"], registry=registry)
        self._prompt = Counter("ostinato_prompt_tokens", "Tokens of prompts", registry=registry)
        self._generated = Counter("ostinato_generated_tokens", "Tokens of outputs", registry=registry)
        self._cached = Counter("ostinato_cached_tokens", "Prompt tokens not computed", ["tier"], registry=registry)
        self._preempted = Counter("ostinato_preemptions", "Requests begun again for want of room", registry=registry)
        self._first = Histogram(
            "ostinato_time_to_first_token_seconds", "From arrival", buckets=_FIRST_S, registry=registry
        )
        self._gap = Histogram(
            "ostinato_inter_token_seconds", "Between tokens of a completion", buckets=_GAP_S, registry=registry
        )
        self._total = Histogram("ostinato_request_seconds", "From arrival", buckets=_FIRST_S, registry=registry)
        self._load = Histogram(
            "ostinato_wait_for_load_seconds", "For a prefix on its way", buckets=_FIRST_S, registry=registry
        )
        info = _info(llm)
        Gauge("ostinato_cache_config_info", "The cache's shape", list(info), registry=registry).labels(**info).set(1)
        for tier in llm.built.hierarchy.core.order:
            self._cached.labels(str(tier))

    def token_gap(self, seconds: float) -> None:
        self._vllm.token_gap(seconds)
        self._gap.observe(seconds)

    def finished(self, output: RequestOutput) -> None:
        self._vllm.finished(output)
        self._requests.labels("finished").inc()
        self._prompt.inc(len(output.prompt_token_ids))
        self._generated.inc(sum(len(one.token_ids) for one in output.outputs))
        for tier, count in output.cached_by_tier.items():
            self._cached.labels(tier).inc(count)
        self._preempted.inc(output.metrics.preemptions)
        self._first.observe(output.metrics.ttft_s)
        self._total.observe(output.metrics.total_s)

    def started(self, call: Call) -> None: ...

    def ended(self, record: RequestRecord) -> None:
        """A request's record, with its phases."""
        self._vllm.ended(record)
        if any(span.phase is RequestPhase.LOAD for span in record.spans):
            self._load.observe(record.seconds(RequestPhase.LOAD))

    def aborted(self, request_id: str) -> None:  # noqa: ARG002
        self._vllm.aborted()
        self._requests.labels("aborted").inc()

    def answered(self, path: str, status: int) -> None:
        """``path``: a route, not what a client made up."""
        self._answers.labels(path, str(status)).inc()

    def page(self, load: Load | None) -> bytes:
        """The text to scrape; without ``load`` what the engine counts keeps its last values."""
        if load is not None:
            self._vllm.look_at(load)
            self._engine.load = load
        return generate_latest(self.registry)


def _info(llm: LLM) -> dict[str, str]:
    layout, identity = llm.runtime.layout, llm.runtime.identity
    return {
        "groups": str(len(layout.groups)),
        "hash_unit": str(layout.base_unit),
        "min_hit_tokens": str(layout.granularity),
        "weights": identity.weights.hex()[:16],
        "kv_dtype": identity.dtype,
        "key_version": str(FORMAT_VERSION),
    }


def _vllm_info(llm: LLM) -> dict[str, str]:
    return {
        "block_size": str(llm.runtime.layout.base_unit),
        "cache_dtype": llm.runtime.identity.dtype,
        "enable_prefix_caching": str(llm.config.enable_prefix_caching),
        "num_gpu_blocks": str(llm.built.hierarchy.core.device.pool.capacity),
    }
