"""The requests that live and the last ones that ended, as records without content.

Owns: the records.  Does not own: phases (``hierarchy.timeline``), what is made of a record (``listeners``).
Thread: the engine's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from ostinato.engine.calls import Call
from ostinato.engine.live import completion_id
from ostinato.engine.outputs import RequestOutput
from ostinato.hierarchy.hierarchy import CacheHierarchy
from ostinato.hierarchy.timeline import Timelines
from ostinato.ids import RequestId
from ostinato.observe.timeline import RequestRecord

Listener: TypeAlias = Callable[[RequestRecord], None]
KEPT: Final = 200


@dataclass(frozen=True, slots=True)
class _Live:
    record: RequestRecord
    first: RequestId
    """The scheduler's name of the first completion, whose phases are shown."""


class History:
    """An observer.  ``listeners`` are called with each record when it ends; they must neither block nor raise."""

    def __init__(self, hierarchy: CacheHierarchy, listeners: tuple[Listener, ...] = (), kept: int = KEPT) -> None:
        self._timelines = Timelines(hierarchy.requests)
        hierarchy.observers = (*hierarchy.observers, self._timelines)
        self._listeners = listeners
        self._live: dict[str, _Live] = {}
        self._ended: deque[RequestRecord] = deque(maxlen=kept)

    def started(self, call: Call) -> None:
        first = completion_id(call.request_id, 0, call.sampling.n)
        self._timelines.begin(first, call.arrival)
        # The clock of arrivals has no date.
        started_at = time.time() - (time.perf_counter() - call.arrival)
        record = RequestRecord(
            call.request_id,
            call.salt,
            started_at,
            call.arrival,
            len(call.prompt.token_ids),
            call.sampling.n,
            self._timelines.spans(first),
        )
        self._live[call.request_id] = _Live(record, first)

    def finished(self, output: RequestOutput) -> None:
        self._end(
            output.request_id,
            lambda record: replace(
                record,
                outcome="finished",
                generated_tokens=sum(len(one.token_ids) for one in output.outputs),
                cached_by_tier=dict(output.cached_by_tier),
                ttft_s=output.metrics.ttft_s,
                total_s=output.metrics.total_s,
                preemptions=output.metrics.preemptions,
                finish_reasons=tuple(one.finish_reason or "" for one in output.outputs),
            ),
        )

    def aborted(self, request_id: str) -> None:
        self._end(
            request_id,
            lambda record: replace(record, outcome="aborted", total_s=time.perf_counter() - record.arrival),
        )

    def token_gap(self, seconds: float) -> None: ...

    def records(self) -> list[RequestRecord]:
        """Live ones, then those that ended, the last one first."""
        live = [replace(one.record, spans=self._timelines.spans(one.first)) for one in self._live.values()]
        return [*reversed(live), *reversed(self._ended)]

    def _end(self, request_id: str, complete: Callable[[RequestRecord], RequestRecord]) -> None:
        live = self._live.pop(request_id, None)
        if live is None:
            return
        record = replace(complete(live.record), spans=self._timelines.end(live.first, time.perf_counter()))
        self._ended.append(record)
        for listener in self._listeners:
            listener(record)
