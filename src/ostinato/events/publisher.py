"""Sending KV events over ZeroMQ: PUB for what happens, ROUTER for what was missed and for everything.

Owns: sequence numbers, the batches kept for replay, the thread that sends.  Does not own: what an event says.

::

    PUB     topic | sequence, 8 bytes, big-endian | batch
    ROUTER  request:  "" | first sequence wanted, 8 bytes        vLLM's replay: the batches kept from there on
            request:  "" | "snapshot"                            ours: one batch that clears and tells everything
            answers:  "" | topic | sequence | batch   ...   "" | "" | -1 | ""   ends them

A batch that finds the queue full is lost, its sequence number with it: subscribers see the gap, and the next batch
tells everything.  Threads: :meth:`publish` and :meth:`list_everything` are the engine's and never wait; the sockets
belong to the publisher's own thread.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ostinato.errors import ConfigError
from ostinato.events.config import KvEventsConfig
from ostinato.observe.kv_events import AllBlocksCleared, KvEvent, encode

log: Final = logging.getLogger(__name__)
END: Final = (-1).to_bytes(8, "big", signed=True)
SNAPSHOT: Final = b"snapshot"
_CLOSE_S: Final = 2.0
_WARN_EVERY_S: Final = 60.0


class _Batch(NamedTuple):
    """``listing``: everything that is held, for those who asked, as of ``sequence``."""

    sequence: int
    ts: float
    events: list[KvEvent]
    listing: bool = False


class ZmqPublisher:
    """The hierarchy's event sink.  ``wake``: makes an idle engine take a step, so that a listing need not wait."""

    def __init__(self, config: KvEventsConfig) -> None:
        zmq = _zmq()
        self.wake: Callable[[], None] = lambda: None
        self.dropped = 0
        """Batches lost because the queue was full."""
        self._queue: queue.Queue[_Batch | None] = queue.Queue(config.max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self.topic = config.topic
        self._next = 0
        self._wanted = threading.Event()
        self._waiting: list[bytes] = []
        self._warned = -_WARN_EVERY_S
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._context = zmq.Context()
        try:
            self._pub = self._bound(zmq.PUB, config.endpoint, config.hwm)
            self._router = self._bound(zmq.ROUTER, config.replay_endpoint, config.hwm)
        except BaseException:
            self._release()
            raise
        self.endpoint = _address(zmq, self._pub)
        self.replay_endpoint = _address(zmq, self._router) if self._router is not None else None
        self._thread = threading.Thread(target=self._run, name="ostinato-kv-events", daemon=True)
        self._thread.start()

    # The engine's thread.

    def publish(self, events: list[KvEvent]) -> bool:
        sequence, self._next = self._next, self._next + 1
        return self._put(_Batch(sequence, time.time(), events))

    @property
    def wants_everything(self) -> bool:
        return self._wanted.is_set()

    def list_everything(self, events: list[KvEvent]) -> None:
        self._wanted.clear()
        if not self._put(_Batch(self._next - 1, time.time(), [AllBlocksCleared(), *events], listing=True)):
            self._wanted.set()

    def _put(self, batch: _Batch) -> bool:
        try:
            self._queue.put_nowait(batch)
        except queue.Full:
            self.dropped += 1
            now = time.monotonic()
            if now - self._warned >= _WARN_EVERY_S:
                self._warned = now
                log.warning("KV events: the queue is full, %d batches were lost so far", self.dropped)
            return False
        with contextlib.suppress(OSError):  # so many bells ring already that one more changes nothing
            self._ours.send(b"!")
        return True

    # Any thread.

    def close(self) -> None:
        """Send what waits, then stop.  Calling it again does nothing."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_S)
        with contextlib.suppress(OSError):
            self._ours.send(b"!")
        self._thread.join(_CLOSE_S)

    # The publisher's own thread.

    def _run(self) -> None:
        zmq = _zmq()
        poller = zmq.Poller()
        poller.register(self._theirs, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._theirs.fileno() in ready:
                    self._theirs.recv(4096)
                    if not self._send_queued():
                        return
                if self._router in ready:
                    self._answer(self._router.recv_multipart())
        except Exception:
            log.exception("KV events stop: their publisher failed")
        finally:
            self._release()

    def _send_queued(self) -> bool:
        """Send what is in the queue; False at the end."""
        with contextlib.suppress(queue.Empty):
            while (batch := self._queue.get_nowait()) is not None:
                self._send(batch)
            return False
        return True

    def _send(self, batch: _Batch) -> None:
        payload = encode(batch.ts, batch.events)
        if batch.listing:
            waiting, self._waiting = self._waiting, []
            for client in waiting:
                self._reply(client, batch.sequence, payload)
                self._end(client)
            return
        self._kept.append((batch.sequence, payload))
        self._pub.send_multipart((self.topic.encode(), batch.sequence.to_bytes(8, "big"), payload))

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("KV events: a request of %d frames for replay is none", len(frames))
            return
        client, _, wanted = frames
        if wanted == SNAPSHOT:
            self._waiting.append(client)
            self._wanted.set()
            self.wake()
            return
        first = int.from_bytes(wanted, "big")
        for sequence, payload in self._kept:
            if sequence >= first:
                self._reply(client, sequence, payload)
        self._end(client)

    def _reply(self, client: bytes, sequence: int, payload: bytes) -> None:
        self._router.send_multipart((client, b"", self.topic.encode(), sequence.to_bytes(8, "big"), payload))

    def _end(self, client: bytes) -> None:
        self._router.send_multipart((client, b"", b"", END, b""))

    def _bound(self, kind: int, endpoint: str | None, hwm: int) -> Any:
        if endpoint is None:
            return None
        zmq = _zmq()
        sock = self._context.socket(kind)
        sock.set_hwm(hwm)
        sock.linger = 0
        sock.ipv6 = "[" in endpoint
        try:
            sock.bind(endpoint)
        except zmq.ZMQError as error:
            sock.close()
            raise ConfigError(f"KV events cannot be published on {endpoint}: {error}") from None
        return sock

    def _release(self) -> None:
        self._context.destroy(linger=int(_CLOSE_S * 1000))
        self._ours.close()
        self._theirs.close()


def _address(zmq: Any, sock: Any) -> str:
    """The address that a socket got; port 0 or ``*`` is any."""
    return str(sock.getsockopt_string(zmq.LAST_ENDPOINT))


def _zmq() -> Any:
    try:
        import zmq
    except ImportError:
        raise ConfigError("KV events over ZeroMQ need pyzmq: pip install 'ostinato[events]'") from None
    return zmq
