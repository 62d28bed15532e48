"""The engine on a thread of its own.

Owns: the thread, its inbox, what it does when there is nothing to do, handing results to the event loop.  Does not own:
the loop of a step (``loop``), what may come in (``async_llm``).

::

    event loop:     post(add) ... post(abort) ... post(anything)             batches' queues
                         |                                                         ^
    this thread:    take orders -> step -> deltas, outputs -> one call_soon_threadsafe for each step

Without work the thread sleeps in the inbox; while transfers are open it waits for those or for the inbox, whichever
comes first.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from ostinato.engine.calls import Batch, Event, Observer
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import CompletionDelta
from ostinato.errors import CapacityError, RequestError
from ostinato.transfer.job import JobState

log: Final = logging.getLogger(__name__)
IDLE_WAIT_S: Final = 0.05
Put: TypeAlias = Callable[[tuple[Batch, Event]], None]


class EngineThread:
    """Runs ``llm``, and closes it at the end.

    ``on_death`` is called on the event loop with what the engine failed of.  :meth:`start`, :meth:`post`, :meth:`join`
    are the event loop's; :meth:`add`, :meth:`abort`, :meth:`stop` are orders to post.
    """

    def __init__(self, llm: LLM, observers: Sequence[Observer], on_death: Callable[[BaseException], None]) -> None:
        self._llm = llm
        self._engine = llm.built.engine
        self._observers = tuple(observers)
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._known: dict[str, tuple[Batch, int, _Listener]] = {}
        self._outgoing: list[tuple[Batch, Event]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=self._run, name="ostinato-engine", daemon=True)

    def start(self) -> None:
        """Begin; results go to the event loop that this is called in."""
        self._loop = asyncio.get_running_loop()
        self.thread.start()

    def post(self, order: Callable[[], None]) -> None:
        """Have ``order`` run on the thread, between two steps."""
        self._inbox.put(order)
        self._llm.built.worker.notify()

    async def join(self) -> None:
        """Wait for the end; closes the LLM of a thread that never began."""
        if self.thread.ident is None:
            self._llm.close()
        else:
            await asyncio.to_thread(self.thread.join)

    def add(self, batch: Batch) -> None:
        """Take in all of the batch's calls, or none."""
        if batch.ended:
            return
        try:
            for index, call in enumerate(batch.calls):
                self._engine.add(call.request_id, call.prompt, call.sampling, call.priority, call.salt, call.arrival)
                for observer in self._observers:
                    observer.started(call)
                listener = _Listener(batch, index, self._outgoing.append, self._observers)
                self._known[call.request_id] = (batch, index, listener)
                self._engine.watch(call.request_id, listener)
        except Exception as error:
            # Also one that nobody thought of: the engine has not begun with it, so the others go on.
            self.abort(batch)
            self._outgoing.append((batch, error))
        else:
            self._outgoing.append((batch, None))

    def abort(self, batch: Batch) -> None:
        for call in batch.calls:
            known = self._known.get(call.request_id)
            if known is not None and known[0] is batch:
                del self._known[call.request_id]
                if self._engine.abort(call.request_id):
                    for observer in self._observers:
                        observer.aborted(call.request_id)

    def stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            log.exception("the engine failed; nothing can be served any more")
            died = error
            self._hand_out(lambda: self._on_death(died))
        finally:
            try:
                self._llm.close()
            except Exception:
                log.exception("closing the engine failed")

    def _serve(self) -> None:
        worker, book = self._llm.built.worker, self._llm.built.hierarchy.core.book
        while True:
            moving = any(job.state is not JobState.IN_DOUBT for job in book)
            self._take_orders(wait=not self._engine.has_work and not moving)
            if self._stopping:
                return
            # Without requests too, a step carries out transfers.
            self._step()
            self._flush()
            # An order that comes in from here on ends the wait, since it is put before the worker is notified.
            if not self._engine.has_work and self._inbox.empty() and moving:
                worker.wait(IDLE_WAIT_S)

    def _take_orders(self, wait: bool) -> None:
        try:
            while True:
                self._inbox.get(block=wait)()
                wait = False
        except queue.Empty:
            self._flush()  # whoever waits to be taken in need not wait for the step

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except CapacityError as error:
            # A request that starves is given up; when the engine itself is at an end, its next step says so.
            for request_id in [name for name, known in self._known.items() if not self._is_live(name, known[2])]:
                self._outgoing.append((self._known.pop(request_id)[0], error))
                for observer in self._observers:
                    observer.aborted(request_id)
            return
        for request_id, failure in self._engine.failures:
            self._outgoing.append((self._known.pop(request_id)[0], failure))
            for observer in self._observers:
                observer.aborted(request_id)
        for output in outputs:
            batch, index, _ = self._known.pop(output.request_id)
            for observer in self._observers:
                observer.finished(output)
            self._outgoing.append((batch, (index, output)))

    def _is_live(self, request_id: str, listener: _Listener) -> bool:
        try:
            self._engine.watch(request_id, listener)
        except RequestError:
            return False
        return True

    def _flush(self) -> None:
        if not self._outgoing:
            return
        news = list(self._outgoing)
        self._outgoing.clear()

        def deliver() -> None:
            for batch, event in news:
                batch.deliver(event)

        self._hand_out(deliver)

    def _hand_out(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the event loop is gone, and with it whoever waits
            log.debug("nobody is left to hear of the engine")


class _Listener:
    """Takes one request's deltas, on the engine's thread."""

    def __init__(self, batch: Batch, index: int, put: Put, observers: Sequence[Observer]) -> None:
        self._batch = batch
        self._index = index
        self._put = put
        self._observers = observers
        self._last: dict[int, float] = {}

    def __call__(self, delta: CompletionDelta) -> None:
        now = time.perf_counter()
        last = self._last.get(delta.index)
        if last is not None:
            for observer in self._observers:
                observer.token_gap(now - last)
        self._last[delta.index] = now
        self._put((self._batch, (self._index, delta)))
