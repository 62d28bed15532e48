"""Over real sockets: sequence, replay, snapshot, loss, and a server's events."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.errors import ConfigError, ConnectorError
from ostinato.events.config import KvEventsConfig
from ostinato.events.follower import EventFollower
from ostinato.events.index import EventIndex
from ostinato.events.publisher import END, ZmqPublisher
from ostinato.observe.kv_events import AllBlocksCleared, BlockStored, KvEvent, KvEventBatch, decode

zmq = pytest.importorskip("zmq")
GROUPS = [{"kind": "full", "hash_unit": 16, "hit_granularity": 16}]


def stored(number: int) -> list[KvEvent]:
    return [BlockStored([bytes([number]) * 32], None, [number] * 16, 16, None, "GPU", None, group_idx=0)]


def publisher(**more: Any) -> ZmqPublisher:
    return ZmqPublisher(
        KvEventsConfig(
            enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", **more
        )
    )


class Engine:
    """What an engine does for a publisher that wakes it."""

    def __init__(self, sink: ZmqPublisher) -> None:
        self.sink = sink
        self.events: list[KvEvent] = []
        sink.wake = self.step

    def store(self, number: int) -> None:
        self.events += stored(number)
        assert self.sink.publish(stored(number))

    def step(self) -> None:
        if self.sink.wants_everything:
            self.sink.list_everything(list(self.events))


def follower(sink: ZmqPublisher, patience_s: float = 10.0) -> EventFollower:
    assert sink.replay_endpoint is not None
    return EventFollower(EventIndex.of(GROUPS), sink.endpoint, sink.replay_endpoint, patience_s=patience_s)


def numbers(one: EventFollower) -> list[int]:
    return sorted(block[0] for block in one.index.blocks().get(("device", 0), ()))


def test_a_subscriber_of_vllms_kind_gets_topic_sequence_and_batch() -> None:
    sink = publisher(topic="kv@pod")
    context = zmq.Context()
    sub, req = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        sub.subscribe(b"kv@")
        sub.connect(sink.endpoint)
        first = 0
        while first < 2 or not sub.poll(20):  # until the subscription has arrived
            sink.publish(stored(1))
            first += 1
        topic, sequence, payload = sub.recv_multipart()
        assert topic == b"kv@pod"
        assert int.from_bytes(sequence, "big") < first
        assert decode(payload).events == stored(1)
        req.connect(sink.replay_endpoint)
        req.send_multipart((b"", (first - 2).to_bytes(8, "big")))
        replayed = []
        while req.poll(10_000) and (frames := req.recv_multipart())[2] != END:
            assert frames[:2] == [b"", b"kv@pod"]
            replayed.append(int.from_bytes(frames[2], "big"))
        assert replayed == [first - 2, first - 1]
    finally:
        context.destroy(linger=0)
        sink.close()


def test_a_late_follower_begins_with_a_snapshot_and_goes_on() -> None:
    sink = publisher()
    engine = Engine(sink)
    one = follower(sink)
    try:
        for number in range(3):
            engine.store(number)
        one.follow()
        assert numbers(one) == [0, 1, 2]
        engine.store(3)
        while not one.follow(0.05):
            engine.store(4)
        assert {0, 1, 2, 3, 4} >= set(numbers(one)) >= {0, 1, 2, 3}
    finally:
        one.close()
        sink.close()


def test_o06_missed_batches_are_replayed() -> None:
    sink = publisher()
    engine = Engine(sink)
    one = follower(sink)
    try:
        engine.store(0)
        one.follow()
        for number in range(1, 20):
            engine.store(number)
        while not one.follow(0.05):
            engine.store(20)
        take = one._take
        sequence = one._sequence
        for number in range(100, 105):
            engine.store(number)
        # As if batch after batch had been lost on the way, up to the last.
        while one._events.poll(200):
            *_, last, payload = one._events.recv_multipart()
        take(int.from_bytes(last, "big"), decode(payload))
        assert one.gaps >= 1
        assert one._sequence > sequence
        assert {100, 101, 102, 103, 104} <= set(numbers(one))
    finally:
        one.close()
        sink.close()


def test_what_is_not_kept_any_more_comes_by_snapshot() -> None:
    sink = publisher(buffer_steps=2)
    engine = Engine(sink)
    one = follower(sink)
    try:
        engine.store(0)
        one.follow()
        for number in range(1, 30):
            engine.store(number)
        one._fill(30)
        assert numbers(one) == list(range(30))
    finally:
        one.close()
        sink.close()


def test_an_engine_that_was_started_anew_is_noticed() -> None:
    sink = publisher()
    engine = Engine(sink)
    one = follower(sink)
    try:
        for number in range(5):
            engine.store(number)
        one.follow()
        engine.events = []
        one._take(0, KvEventBatch(one._ts + 1, [AllBlocksCleared()]))
        assert numbers(one) == []
    finally:
        one.close()
        sink.close()


def test_a_full_queue_loses_batches_and_holds_nobody_up() -> None:
    sink = publisher(max_queue_size=1)
    try:
        taken = [sink.publish(stored(1)) for _ in range(5000)]
        assert taken.count(False) == sink.dropped
        if sink.dropped:  # the sequence shows them
            assert sink._next == 5000
    finally:
        sink.close()


def test_nobody_answers_is_told() -> None:
    sink = publisher()
    one = follower(sink, patience_s=0.05)
    try:
        with pytest.raises(ConnectorError, match="does not answer"):
            one.follow()  # no engine steps here
    finally:
        one.close()
        sink.close()


def test_an_address_in_use_is_refused() -> None:
    sink = publisher()
    try:
        with pytest.raises(ConfigError, match="cannot be published"):
            ZmqPublisher(KvEventsConfig(enable_kv_cache_events=True, endpoint=sink.endpoint))
    finally:
        sink.close()
