"""Following one engine's KV events over ZeroMQ, without missing any.

Owns: the order of batches, filling gaps by replay, starting from a snapshot.  Does not own: what is made of the events.
Thread: one.
"""

from __future__ import annotations

from typing import Any, Final

from ostinato.errors import ConnectorError
from ostinato.events.index import EventIndex
from ostinato.events.publisher import END, SNAPSHOT
from ostinato.observe.kv_events import KvEventBatch, decode

_NEVER: Final = -1


class EventFollower:
    """Keeps ``index`` as the engine's cache is.

    It begins with a snapshot; a gap in the sequence is filled by replay, or by a snapshot when too much is missing or
    the engine has been started anew.  ``patience_s``: how long an answer of the replay endpoint is waited for.
    """

    def __init__(
        self, index: EventIndex, endpoint: str, replay_endpoint: str, topic: str = "", patience_s: float = 10.0
    ) -> None:
        import zmq

        self.index = index
        self.gaps = 0
        """Gaps that were filled."""
        self._sequence = _NEVER
        self._ts = 0.0
        self._replay_endpoint = replay_endpoint
        self._patience_ms = int(patience_s * 1000)
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._events.connect(endpoint)

    def follow(self, wait_s: float = 0.0) -> int:
        """Take in the batches that have arrived, waiting up to ``wait_s`` seconds for the first; how many they were."""
        if self._sequence == _NEVER:
            self._begin_anew()
        count, wait = 0, int(wait_s * 1000)
        while self._events.poll(wait):
            _, sequence, payload = self._events.recv_multipart()
            self._take(int.from_bytes(sequence, "big"), decode(payload))
            count, wait = count + 1, 0
        return count

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _take(self, sequence: int, batch: KvEventBatch) -> None:
        if sequence <= self._sequence:
            if batch.ts > self._ts:  # not an old batch: the engine was started anew, and counts from 0 again
                self._begin_anew()
            return
        if sequence > self._sequence + 1:
            self.gaps += 1
            self._fill(sequence)
        if sequence == self._sequence + 1:
            self._apply(sequence, batch)

    def _fill(self, sequence: int) -> None:
        """Everything up to before ``sequence``, or beyond."""
        first = self._sequence + 1
        for number, batch in self._ask(first.to_bytes(8, "big")):
            if number == self._sequence + 1:
                self._apply(number, batch)
        if self._sequence + 1 < sequence:
            self._begin_anew()

    def _begin_anew(self) -> None:
        answer = self._ask(SNAPSHOT)
        if not answer:
            raise ConnectorError(f"{self._replay_endpoint} has no snapshot: it is not Ostinato's")
        self._apply(*answer[0])

    def _apply(self, sequence: int, batch: KvEventBatch) -> None:
        self.index.apply(batch.events)
        self._sequence, self._ts = sequence, batch.ts

    def _ask(self, request: bytes) -> list[tuple[int, KvEventBatch]]:
        import zmq

        # A socket for each question: one that was not answered in time would take the next answer for its own.
        sock: Any = self._context.socket(zmq.DEALER)
        try:
            sock.connect(self._replay_endpoint)
            sock.send_multipart((b"", request))
            found: list[tuple[int, KvEventBatch]] = []
            while sock.poll(self._patience_ms):
                _, _, sequence, payload = sock.recv_multipart()
                if sequence == END:
                    return found
                found.append((int.from_bytes(sequence, "big"), decode(payload)))
            raise ConnectorError(f"{self._replay_endpoint} does not answer")
        finally:
            sock.close(linger=0)
