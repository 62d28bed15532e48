"""Requests handed in from an event loop, and what comes back.

Owns: the values that go in, the queue that a batch's deltas and outputs come out of.  Does not own: how they get from
one thread to another (``engine_thread``).  Thread: the event loop's, except for :class:`Observer`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from ostinato.engine.live import Prompt
from ostinato.engine.outputs import CompletionDelta, RequestOutput
from ostinato.errors import RequestError, StoppedError
from ostinato.sampling_params import SamplingParams

Event: TypeAlias = tuple[int, CompletionDelta | RequestOutput] | Exception | None
"""Of call ``int`` of a batch; an exception ends the batch; None: all calls were taken in."""


class OverloadedError(RequestError):
    """So much is in flight that one more request would only wait; come again after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the engine.  ``arrival``: when it was handed in (``time.perf_counter``), for its times."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    priority: int = 0
    salt: str = ""
    arrival: float = field(default_factory=time.perf_counter)


class Observer(Protocol):
    """Whoever counts.  Called on the engine's thread; must neither block nor raise."""

    def started(self, call: Call) -> None:
        """The engine has taken it in."""

    def token_gap(self, seconds: float) -> None:
        """Between two tokens of one completion."""

    def finished(self, output: RequestOutput) -> None: ...

    def aborted(self, request_id: str) -> None: ...


class Batch:
    """Requests that were handed in together: all are taken in, or none.

    Iterate for ``(call, delta)`` as they come; ``outputs`` are complete after the last.  Close it whatever happens.
    """

    def __init__(self, calls: Sequence[Call], on_end: Callable[[Batch], None]) -> None:
        self.calls = tuple(calls)
        self.outputs: list[RequestOutput | None] = [None] * len(calls)
        self.ended = False
        self._on_end = on_end
        self._events: asyncio.Queue[tuple[int, CompletionDelta] | Exception | None] = asyncio.Queue()
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def weight(self) -> int:
        """Completions in all."""
        return sum(call.sampling.n for call in self.calls)

    async def accepted(self) -> None:
        """Wait until the engine has taken all in; raises RequestError when one of them can never be served."""
        await asyncio.shield(self._accepted)

    async def __aiter__(self) -> AsyncIterator[tuple[int, CompletionDelta]]:
        while (event := await self._events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    async def finish(self) -> list[RequestOutput]:
        """Wait for the outputs, in the order of the calls."""
        async for _ in self:
            pass
        return [output for output in self.outputs if output is not None]

    def close(self) -> None:
        """Abort what still runs.  Calling it again does nothing."""
        if not self.ended:
            self._end(None)

    def deliver(self, event: Event) -> None:
        """Take in what the engine says."""
        if self.ended:
            return
        match event:
            case None:
                if not self._accepted.done():
                    self._accepted.set_result(None)
            case Exception():
                self._end(event)
            case (index, RequestOutput() as output):
                self.outputs[index] = output
                if all(self.outputs):
                    self._end(None)
            case (index, CompletionDelta() as delta):
                self._events.put_nowait((index, delta))

    def _end(self, error: Exception | None) -> None:
        self.ended = True
        if not self._accepted.done():
            self._accepted.set_exception(error or StoppedError("the request was closed"))
            self._accepted.exception()  # nobody need be waiting for it
        self._events.put_nowait(error)
        self._on_end(self)
