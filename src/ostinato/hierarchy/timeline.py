"""When each request was in which phase, seen from the hierarchy.

Owns: the spans of the requests that are open.  Does not own: what becomes of them (``engine.history``).  Thread: the
scheduler's only.

::

    begin         last try to admit        loaded                whole prompt committed        end
      |   queued         |  (lookup, load)    |     prefill               |       decode        |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ostinato.hierarchy.residency import Residency
from ostinato.ids import RequestId, Step
from ostinato.observe.timeline import RequestPhase, Span


class Timelines:
    """Observes ``requests``, the hierarchy's own map.  ``clock``: that of arrivals."""

    def __init__(self, requests: Mapping[RequestId, Residency], clock: Callable[[], float] = time.perf_counter) -> None:
        self._requests = requests
        self._clock = clock
        self._spans: dict[RequestId, list[Span]] = {}
        self._tried: dict[RequestId, float] = {}
        """When it was last tried to admit a request."""
        self._released: dict[RequestId, float] = {}
        """Requests that lost their tables in the step that is being settled: they are over, or wait again."""

    def begin(self, request_id: RequestId, arrival: float) -> None:
        self._spans[request_id] = [Span(RequestPhase.QUEUED, arrival)]

    def spans(self, request_id: RequestId) -> tuple[Span, ...]:
        """What is known of a request; nothing of one that never began."""
        return tuple(self._spans.get(request_id, ()))

    def end(self, request_id: RequestId, now: float) -> tuple[Span, ...]:
        """Forget the request; all of its spans, ended."""
        self._tried.pop(request_id, None)
        self._released.pop(request_id, None)
        spans = self._spans.pop(request_id, [])
        if spans:
            spans[-1] = Span(spans[-1].phase, spans[-1].start, now)
        return tuple(spans)

    # The hierarchy's observer.

    def on_admit(self, request_id: RequestId, tokens: int) -> None:  # noqa: ARG002
        self._tried[request_id] = self._clock()

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        spans = self._spans.get(request_id)
        if spans is None or spans[-1].phase is RequestPhase.DECODE:
            return
        self._enter(spans, RequestPhase.PREFILL, self._tried.get(request_id))
        if computed >= len(self._requests[request_id].tokens):  # a token comes out of this step
            self._enter(spans, RequestPhase.DECODE)

    def on_release(self, request_id: RequestId) -> None:
        if request_id in self._spans:
            self._released[request_id] = self._clock()

    def on_step_end(self, step: Step) -> None:  # noqa: ARG002
        for request_id, spans in self._spans.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            if request_id in self._released:
                self._enter(spans, RequestPhase.QUEUED, self._released[request_id])
            if request.probing_until is not None:
                self._enter(spans, RequestPhase.LOOKUP, self._tried.get(request_id))
            elif request.ticket is not None and request.table is not None:
                self._enter(spans, RequestPhase.LOAD, self._tried.get(request_id))
            elif spans[-1].phase is RequestPhase.LOAD and request.table is not None:
                self._enter(spans, RequestPhase.PREFILL)
        self._released.clear()

    def _enter(self, spans: list[Span], phase: RequestPhase, at: float | None = None) -> None:
        """Begin ``phase``, at ``at`` or now, unless it lasts already."""
        last = spans[-1]
        if last.phase is not phase:
            now = self._clock() if at is None else max(at, last.start)
            spans[-1] = Span(last.phase, last.start, now)
            spans.append(Span(phase, now))
