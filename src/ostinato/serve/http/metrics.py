"""Numbers for Prometheus.

Owns: names and buckets.  Does not own: what is counted where (``AsyncLLM`` calls the observer, the journal counts
answers).  Nothing of a request's content is in a label.  Threads: any; the client library locks.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ostinato.engine.async_llm import Load
from ostinato.engine.outputs import RequestOutput

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_FIRST_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAP_S: Final = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """One server's numbers, in a registry of their own.  It is the ``Observer`` of its ``AsyncLLM``."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
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
        self._running = Gauge("ostinato_requests_running", "Completions that hold blocks", registry=registry)
        self._waiting = Gauge("ostinato_requests_waiting", "Completions that wait to start", registry=registry)
        self._pool = Gauge("ostinato_pool_blocks", "Blocks of a tier", ["tier", "state"], registry=registry)
        self._evicted = Gauge("ostinato_evictions", "Blocks evicted since start", ["tier"], registry=registry)
        self._moved = Gauge("ostinato_transferred_bytes", "Bytes since start", ["direction"], registry=registry)
        self._open = Gauge("ostinato_open_transfers", "Transfers under way", registry=registry)
        self._failures = Gauge("ostinato_transfer_failures", "Since start", ["kind"], registry=registry)

    def token_gap(self, seconds: float) -> None:
        self._gap.observe(seconds)

    def finished(self, output: RequestOutput) -> None:
        self._requests.labels("finished").inc()
        self._prompt.inc(len(output.prompt_token_ids))
        self._generated.inc(sum(len(one.token_ids) for one in output.outputs))
        for tier, count in output.cached_by_tier.items():
            self._cached.labels(tier).inc(count)
        self._preempted.inc(output.metrics.preemptions)
        self._first.observe(output.metrics.ttft_s)
        self._total.observe(output.metrics.total_s)

    def aborted(self) -> None:
        self._requests.labels("aborted").inc()

    def answered(self, path: str, status: int) -> None:
        """``path``: a route, not what a client made up."""
        self._answers.labels(path, str(status)).inc()

    def page(self, load: Load | None) -> bytes:
        """The text to scrape; without ``load`` the gauges keep their last values."""
        if load is not None:
            self._look_at(load)
        return generate_latest(self.registry)

    def _look_at(self, load: Load) -> None:
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        for tier in load.tiers:
            used = tier.blocks - tier.free - tier.idle - tier.quarantine
            counts = {"free": tier.free, "idle": tier.idle, "used": used, "quarantine": tier.quarantine}
            for state, count in counts.items():
                self._pool.labels(tier.tier, state).set(count)
            self._evicted.labels(tier.tier).set(tier.evictions)
        self._moved.labels("load").set(load.bytes_loaded)
        self._moved.labels("store").set(load.bytes_stored)
        self._open.set(load.open_transfers)
        for kind, count in (("failed", load.failed_moves), ("in_doubt", load.in_doubt), ("revoked", load.revoked)):
            self._failures.labels(kind).set(count)
