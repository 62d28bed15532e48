"""``AsyncLLM``: one engine for many asyncio tasks.

Owns: how much may be in flight, refusing, asking, the end.  Does not own: the engine's thread (``engine_thread``), what
a batch says (``calls``), any protocol (``serve.http``).  Thread: the event loop's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from ostinato.engine.calls import Batch, Call, Observer, OverloadedError
from ostinato.engine.engine_thread import EngineThread
from ostinato.engine.llm import LLM
from ostinato.engine.load import Load, look
from ostinato.errors import RequestError, StoppedError

T = TypeVar("T")
_LONGEST_RETRY_S: Final = 60
_PACE_WEIGHT: Final = 0.2


class AsyncLLM:
    """An :class:`LLM` whose requests come and go one by one.  Takes over ``llm``, and closes it.

    ``max_queue``: completions that may wait beside the ``max_num_seqs`` that run.  ``on_death`` is called when the
    engine fails; nothing can be served any more then.
    """

    def __init__(
        self,
        llm: LLM,
        max_queue: int = 256,
        observers: Sequence[Observer] = (),
        on_death: Callable[[], None] | None = None,
    ) -> None:
        self.llm = llm
        self.capacity = llm.config.max_num_seqs + max_queue
        self.longest = _longest(llm)
        """Tokens of the longest request, prompt and output, that context and pool allow."""
        self._on_death = on_death
        self._batches: set[Batch] = set()
        self._in_flight = 0
        self._pace_s = 1.0
        """What a request takes, as a moving mean."""
        self._refusing = ""
        self._thread = EngineThread(llm, observers, self._died)
        if llm.built.events is not None:
            llm.built.events.wake = lambda: self._thread.post(lambda: None)

    def start(self) -> None:
        """Begin; called in the event loop that will be served."""
        self._thread.start()

    @property
    def refusing(self) -> str:
        """Why nothing is taken in any more; empty while it is."""
        return self._refusing

    def submit(self, calls: Sequence[Call]) -> Batch:
        """Hand in requests.  Raises OverloadedError, StoppedError, or RequestError when they could never all fit."""
        if self._refusing:
            raise StoppedError(self._refusing)
        weight = sum(call.sampling.n for call in calls)
        if weight > self.capacity:
            raise RequestError(
                f"{weight} completions in one request, but at most {self.capacity} can run and wait at once: "
                "send fewer prompts, or a smaller n"
            )
        if self._in_flight + weight > self.capacity:
            wait = min(_LONGEST_RETRY_S, max(1, math.ceil(self._pace_s)))
            raise OverloadedError(f"{self._in_flight} completions run or wait already: try again in {wait} s", wait)
        batch = Batch(calls, self._ended)
        self._batches.add(batch)
        self._in_flight += weight
        self._thread.post(lambda: self._thread.add(batch))
        return batch

    async def ask(self, question: Callable[[LLM], T]) -> T:
        """Run ``question`` on the engine's thread, between two steps."""
        if not self._thread.thread.is_alive():
            raise StoppedError(self._refusing or "the engine does not run")
        loop: Final = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(settled: Callable[[], None]) -> None:
            if not answer.done():
                settled()

        def run() -> None:
            try:
                found = question(self.llm)
            except Exception as error:
                failure = error
                loop.call_soon_threadsafe(settle, lambda: answer.set_exception(failure))
            else:
                loop.call_soon_threadsafe(settle, lambda: answer.set_result(found))

        self._thread.post(run)
        return await answer

    async def load(self) -> Load:
        """What the engine is busy with; costs no walk over the pool, unlike ``LLM.stats``."""
        return await self.ask(look)

    def refuse(self, why: str) -> None:
        """Take in nothing new; what runs goes on."""
        self._refusing = self._refusing or why

    def abort_all(self, why: str) -> None:
        """End everything in flight with a StoppedError."""
        self.refuse(why)
        for batch in list(self._batches):
            batch.deliver(StoppedError(why))

    async def close(self) -> None:
        """Abort what runs, let the tiers take what they were to have, close the LLM (see ``LLM.close``)."""
        self.abort_all("the engine is closed")
        self._thread.post(self._thread.stop)
        await self._thread.join()

    def _ended(self, batch: Batch) -> None:
        self._batches.discard(batch)
        self._in_flight -= batch.weight
        outputs = [output for output in batch.outputs if output is not None]
        if len(outputs) == len(batch.calls):
            mean = sum(output.metrics.total_s for output in outputs) / len(outputs)
            self._pace_s += _PACE_WEIGHT * (mean - self._pace_s)
        else:
            self._thread.post(lambda: self._thread.abort(batch))

    def _died(self, error: BaseException) -> None:
        self.abort_all(f"the engine failed ({type(error).__name__}); the server has to be started again")
        if self._on_death is not None:
            self._on_death()


def _longest(llm: LLM) -> int:
    """The most tokens for which the device pool has pages; at least 1."""
    limits, step = llm.built.engine.limits, llm.config.max_num_batched_tokens
    low, high = 1, limits.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if llm.runtime.layout.peak_pages(middle, step) <= limits.max_pages:
            low = middle
        else:
            high = middle - 1
    return low
