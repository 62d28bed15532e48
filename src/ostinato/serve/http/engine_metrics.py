"""Metrics of what the engine counts itself: pools, transfers, tiers' answers.

Owns: names and labels.  Does not own: the counting (``transfer.book``, ``hierarchy``, ``engine.load``).  Threads: one
scrape at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ostinato.engine.load import Load
from ostinato.observe.counts import SECONDS, Durations


class EngineCollector(Collector):
    """Shows the last :class:`Load` that it was given."""

    def __init__(self) -> None:
        self.load: Load | None = None

    def collect(self) -> Iterator[Metric]:
        if self.load is not None:
            yield from _pools(self.load)
            yield from _transfers(self.load)
            yield from _answers(self.load)
            yield _gauge("open_transfers", "Transfers under way", [], [([], self.load.open_transfers)])
            yield _gauge("requests_running", "Completions that hold blocks", [], [([], self.load.running)])
            yield _gauge("requests_waiting", "Completions that wait to start", [], [([], self.load.waiting)])
            states = [([state], count) for state, count in self.load.states.items()]
            yield _gauge("requests_by_state", "Completions", ["state"], states)

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: names are known when there is a load."""
        return ()


def _pools(load: Load) -> Iterator[Metric]:
    blocks, pinned, held, units = [], [], [], []
    for tier in load.tiers:
        states = {"free": tier.free, "idle": tier.idle, "used": tier.used, "quarantine": tier.quarantine}
        blocks += [([tier.tier, state], count) for state, count in states.items()]
        pinned += [([tier.tier, "read"], tier.read), ([tier.tier, "write"], tier.written)]
        sizes = {"capacity": tier.blocks, "resident": tier.blocks - tier.free, "reserved": tier.used}
        held += [([tier.tier, kind], count * tier.block_bytes) for kind, count in sizes.items()]
        units += [([tier.tier, str(group)], count) for group, count in enumerate(tier.units)]
    yield _gauge("pool_blocks", "Blocks of a tier", ["tier", "state"], blocks)
    yield _gauge("pinned_blocks", "Blocks that transfers read or write now", ["tier", "direction"], pinned)
    yield _gauge("tier_bytes", "Memory of a tier; reserved is what nobody else may take", ["tier", "kind"], held)
    yield _gauge("cached_units", "Cached hash units of a group", ["tier", "group"], units)
    evictions = [([tier.tier], tier.evictions) for tier in load.tiers]
    yield _gauge("evictions", "Blocks evicted since start", ["tier"], evictions)


def _transfers(load: Load) -> Iterator[Metric]:
    labels = ["dir", "tier"]
    places = [([flow.direction, flow.tier], flow) for flow in load.flows]
    yield _counter("kv_transfer_bytes", "Bytes that arrived", labels, [(at, flow.counts.bytes) for at, flow in places])
    yield _gauge("kv_transfers_inflight", "Jobs under way", labels, [(at, flow.open) for at, flow in places])
    took = [(at, flow.counts.seconds) for at, flow in places]
    yield _histogram("kv_transfer_seconds", "A job's time with its mover", labels, took)
    outcomes = [
        ([flow.tier, outcome], count)
        for flow in load.flows
        if flow.direction == "store"
        for outcome, count in (
            ("stored", flow.counts.units),
            ("failed", flow.counts.failed),
            ("revoked", flow.counts.revoked),
            ("skipped_policy", load.answers[flow.tier].declined if flow.tier in load.answers else 0),
        )
    ]
    yield _counter("kv_store_outcomes", "Units by what became of their copy", ["tier", "outcome"], outcomes)
    failures = [
        ([flow.tier, kind], count)
        for flow in load.flows
        if flow.direction == "load"
        for kind, count in (("failed", flow.counts.failed), ("deadline", flow.counts.late))
    ]
    yield _counter("kv_load_failures", "Units that were computed again instead", ["tier", "kind"], failures)
    yield _counter("late_completions", "Reports of jobs that were given up", [], [([], load.late_reports)])
    moved = [(["load"], load.bytes_loaded), (["store"], load.bytes_stored)]
    yield _gauge("transferred_bytes", "Bytes since start", ["direction"], moved)
    kinds = [(["failed"], load.failed_moves), (["in_doubt"], load.in_doubt), (["revoked"], load.revoked)]
    yield _gauge("transfer_failures", "Since start", ["kind"], kinds)


def _answers(load: Load) -> Iterator[Metric]:
    found = [
        ([tier, answer], count)
        for tier, counts in load.answers.items()
        for answer, count in (("held", counts.held), ("absent", counts.absent), ("silent", counts.silent))
    ]
    about = "Units that a tier was asked about, by what it said; used or not"
    yield _counter("tier_answers", about, ["tier", "answer"], found)
    took = [([tier], counts.seconds) for tier, counts in load.answers.items()]
    yield _histogram("kv_lookup_seconds", "From a prompt's first question to the answer", ["tier"], took)
    open_ = [([tier, call], int(state)) for (tier, call), state in load.breakers.items()]
    yield _gauge("tier_breaker_state", "1 while calls of this kind are held back", ["tier", "call"], open_)


def _gauge(name: str, about: str, labels: list[str], values: Iterable[tuple[list[str], float]]) -> Metric:
    made = GaugeMetricFamily(f"ostinato_{name}", about, labels=labels)
    for at, value in values:
        made.add_metric(at, value)
    return made


def _counter(name: str, about: str, labels: list[str], values: Iterable[tuple[list[str], float]]) -> Metric:
    made = CounterMetricFamily(f"ostinato_{name}", about, labels=labels)
    for at, value in values:
        made.add_metric(at, value)
    return made


def _histogram(name: str, about: str, labels: list[str], values: Iterable[tuple[list[str], Durations]]) -> Metric:
    made = HistogramMetricFamily(f"ostinato_{name}", about, labels=labels)
    bounds = [*map(str, SECONDS), "+Inf"]
    for at, durations in values:
        total, buckets = 0, []
        for bound, count in zip(bounds, durations.counts, strict=True):
            total += count
            buckets.append((bound, total))
        made.add_metric(at, buckets, durations.total_s)
    return made
