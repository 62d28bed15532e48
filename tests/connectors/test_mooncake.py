"""The Mooncake connector over a stand-in for the package: codes, connecting, staging, groups, jobs."""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import threading
from collections import deque
from typing import Any

import msgspec
import pytest

from connectors.fake_mooncake import FakeStore, client_of
from connectors.memory_store import IDENTITY, LAYOUT, UNIT, Pages, eventually
from ostinato.cache.keys import BlockKey
from ostinato.connectors.api import Hook, Site
from ostinato.connectors.mooncake import MAX_OWNERS, MooncakeConnector, make_connector
from ostinato.connectors.mooncake_client import (
    ENVIRONMENT,
    FULL_TRIES,
    MooncakeError,
    MooncakeOptions,
    Span,
    set_environment,
)
from ostinato.connectors.mooncake_mover import MooncakeJob, MooncakeRecords, staging_bytes
from ostinato.connectors.record import TRAILER_BYTES
from ostinato.connectors.records import Record, record_name
from ostinato.connectors.registry import parse_spec
from ostinato.errors import ConfigError, ConnectorError
from ostinato.ids import HOLE, GroupId, JobId, Ordinal, RequestId, SlotId, Step, TierId
from ostinato.transfer.job import JobKind, Move, TransferOrder


def key(number: int, group: int = 0) -> BlockKey:
    return BlockKey(GroupId(group), number.to_bytes(32, "big"))


def batch_of(count: int, size: int = 500, group: int = 0) -> tuple[list[Record], bytearray]:
    memory = bytearray(random.Random(1).randbytes(count * size))
    view = memoryview(memory)
    return [
        Record(
            record_name(key(index, group)),
            key(index, group),
            view[index * size : (index + 1) * size],
            bytearray(random.Random(index).randbytes(TRAILER_BYTES)),
        )
        for index in range(count)
    ], memory


class TestCodes:
    @pytest.mark.parametrize("code", [-1, -800, -900, -901])
    @pytest.mark.parametrize("method", ["exist", "put", "get"])
    def test_trouble_raises(self, method: str, code: int) -> None:
        fake = FakeStore()
        records = MooncakeRecords(client := client_of(fake))
        batch, _ = batch_of(2)
        records.store(batch)
        fake.answers[method] = deque([[1 if method == "exist" else 0, code]])
        names = [record.name for record in batch]
        call = {"exist": lambda: client.contains(names), "put": lambda: records.store(batch)}.get(method)
        with pytest.raises(MooncakeError):
            (call or (lambda: records.load(batch)))()

    @pytest.mark.parametrize("code", [-704, -705, -600, -1000])
    def test_anything_else_is_a_miss(self, code: int) -> None:
        fake = FakeStore()
        records = MooncakeRecords(client_of(fake))
        batch, memory = batch_of(2)
        before = bytes(memory)
        fake.answers["get"] = deque([code])
        assert records.load(batch) == [False, False]
        fake.answers["put"] = deque([[0, code]])
        assert records.store(batch) == [True, False]
        assert bytes(memory) == before

    def test_too_few_answers_raise(self) -> None:
        fake = FakeStore()
        records = MooncakeRecords(client := client_of(fake))
        batch, _ = batch_of(2)
        for method in ("exist", "put", "get"):
            fake.answers[method] = deque([[0]])
        with pytest.raises(MooncakeError):
            client.contains(["a", "b"])
        with pytest.raises(MooncakeError):
            records.store(batch)
        with pytest.raises(MooncakeError):
            records.load(batch)

    def test_no_room_is_tried_a_few_times(self) -> None:
        fake = FakeStore()
        records = MooncakeRecords(client_of(fake))
        batch, _ = batch_of(3)
        fake.answers["put"] = deque([[0, -200, -200], [-200, 0], [0]])
        assert records.store(batch) == [True] * 3
        names = [record.name for record in batch]
        assert fake.names("put") == [names, names[1:], names[1:2]]
        fake.answers["put"] = deque([-200] * 20)
        assert records.store(batch) == [False] * 3
        assert len(fake.answers["put"]) == 20 - FULL_TRIES - 1

    @pytest.mark.parametrize("change", [lambda value: value[:-1], lambda value: value + b"x", lambda value: b"x"])
    def test_records_of_another_size_are_removed(self, change: Any) -> None:
        fake = FakeStore()
        records = MooncakeRecords(client_of(fake))
        batch, memory = batch_of(3)
        records.store(batch)
        fake.objects[batch[1].name] = change(fake.objects[batch[1].name])
        before = bytes(memory)
        assert records.load(batch) == [True, False, True]
        assert bytes(memory) == before
        assert batch[1].name not in fake.objects

    def test_a_code_that_only_looks_like_it_removes_nothing(self) -> None:
        fake = FakeStore()
        records = MooncakeRecords(client_of(fake))
        batch, _ = batch_of(3)
        records.store(batch)
        fake.answers["get"] = deque([-600])
        assert records.load(batch) == [False] * 3
        assert len(fake.objects) == 3


class TestConnecting:
    def test_nothing_is_set_up_where_nothing_listens(self) -> None:
        fake = FakeStore()
        fake.listening = False
        client = client_of(fake)
        with pytest.raises(MooncakeError, match="listens"):
            client.store()
        assert not fake.calls
        fake.listening = True
        assert client.store() is client.store() is fake
        assert [name for name, _ in fake.calls] == ["rehearse", "setup"]

    def test_what_fails_in_the_rehearsal_is_not_done(self) -> None:
        fake = FakeStore()
        fake.rehearsal = MooncakeError("hangs")
        with pytest.raises(MooncakeError, match="hangs"):
            client_of(fake).store()
        assert [name for name, _ in fake.calls] == ["rehearse"]

    def test_a_setup_that_fails_is_done_again(self) -> None:
        fake = FakeStore()
        fake.setup_code = -1
        client = client_of(fake)
        with pytest.raises(MooncakeError, match="setup failed"):
            client.store()
        fake.setup_code = 0
        assert client.store() is fake

    def test_arguments(self) -> None:
        fake = FakeStore()
        client_of(fake, segment=1 << 24, host="node7").store()
        assert ("setup", ("node7", "P2PHANDSHAKE", 1 << 24, 0, "tcp", "", "127.0.0.1:1")) in fake.calls
        fake = FakeStore()
        client = client_of(fake, shared_memory=True)
        for _ in range(2):
            client.take_staging()
        ((size, local, address),) = [words for name, words in fake.calls if name == "setup_dummy"]
        assert size >= 2 * (1 << 16)
        assert (local, address) == (0, "127.0.0.1:1")
        assert len(fake._pools) == len(fake.registered) == 2

    def test_a_client_is_closed_only_where_that_is_quick(self) -> None:
        for listening in (True, False):
            fake = FakeStore()
            client = client_of(fake)
            client.store()
            fake.listening = listening
            client.close()
            client.close()
            assert fake.closed == listening
            with pytest.raises(MooncakeError, match="closed"):
                client.store()

    def test_the_users_environment_wins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ENVIRONMENT:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "7")
        set_environment()
        assert os.environ["MC_TRANSFER_TIMEOUT"] == "7"
        assert {name: os.environ[name] for name in ENVIRONMENT if name != "MC_TRANSFER_TIMEOUT"}.items() < dict(
            ENVIRONMENT
        ).items()


class TestStaging:
    def test_a_batch_goes_in_pieces_that_fit(self) -> None:
        fake = FakeStore()
        records = MooncakeRecords(client_of(fake, staging=4096))
        batch, memory = batch_of(11, 900)
        before, trailers = bytes(memory), [bytes(record.trailer) for record in batch]
        assert records.store(batch) == [True] * 11
        assert {len(names) for names in fake.names("put")} == {3, 2}
        assert fake.objects[batch[5].name] == before[5 * 900 : 6 * 900] + trailers[5]
        memory[:] = bytes(len(memory))
        for record in batch:
            record.trailer[:] = bytes(TRAILER_BYTES)
        del fake.objects[batch[4].name]
        assert records.load(batch) == [index != 4 for index in range(11)]
        assert bytes(memory) == before[: 4 * 900] + bytes(900) + before[5 * 900 :]
        assert [bytes(record.trailer) for record in batch[5:]] == trailers[5:]

    def test_memory_is_used_again(self) -> None:
        client = client_of(FakeStore())
        first = MooncakeRecords(client)
        first.close()
        second, third = MooncakeRecords(client), MooncakeRecords(client)
        assert second._staging is first._staging
        assert third._staging is not first._staging

    def test_it_has_room_for_the_largest_unit(self) -> None:
        from dataclasses import replace

        big = 20_000_001
        layout = replace(LAYOUT, groups=(replace(LAYOUT.groups[0], unit_bytes=big),))
        assert big + TRAILER_BYTES <= staging_bytes(layout) < big + TRAILER_BYTES + 4096
        assert staging_bytes(LAYOUT) == 16 << 20

    def test_units_that_end_at_one_token_are_one_group(self) -> None:
        fake = FakeStore()
        records = MooncakeRecords(client_of(fake))
        for group in range(3):
            records.store(batch_of(4, group=group)[0])
        for number in range(4):
            assert len({fake.groups[record_name(key(number, group))] for group in range(3)}) == 1
        assert len(set(fake.groups.values())) == 4
        assert "" not in fake.groups.values()


class TestKnown:
    def test_it_is_doubted_when_one_is_missing(self) -> None:
        fake = FakeStore()
        client = client_of(fake)
        fake.objects["a"] = b""
        client.known.note(["a", "b", "c"])
        assert client.contains(["a"]) == [True]
        assert client.contains(["never seen"]) == [False]
        assert all(name in client.known for name in "abc")
        assert client.contains(["b"]) == [False]
        assert not any(name in client.known for name in "abc")
        client.known.note(["a", "b"])
        client.get([Span("b", client.take_staging().address, 10)])
        assert "a" not in client.known

    def test_it_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        client = client_of(FakeStore())
        client.known.note(["a"])
        now = __import__("time").monotonic()
        monkeypatch.setattr("ostinato.connectors.mooncake_client.time.monotonic", lambda: now + 31)
        assert "a" not in client.known


def order_of(numbers: list[int], job: int = 1, blocks: Any = None, kind: JobKind = JobKind.STORE) -> TransferOrder:
    moves = tuple(Move(key(n), Ordinal(n), SlotId(n), HOLE, 0, UNIT) for n in numbers)
    rows = ((HOLE, *map(SlotId, numbers)), (), (HOLE, HOLE)) if blocks is None else blocks
    return TransferOrder(JobId(job), kind, TierId("mooncake"), moves, Step(3), rows)


class TestJob:
    def test_it_crosses_as_plain_bytes(self) -> None:
        order = order_of([4, 5, 9])
        job = MooncakeJob.of(order, "r1")
        raw = msgspec.msgpack.encode(job)
        assert msgspec.msgpack.decode(raw)[:3] == [1, "r1", 3]
        again = msgspec.msgpack.decode(raw, type=MooncakeJob)
        assert again == job
        assert again.blocks[0][0] == HOLE
        assert again.order(order.tier) == order
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode([1, "r1", 3, [["x"]], []]), type=MooncakeJob)


@pytest.fixture
def opened(request: pytest.FixtureRequest) -> Any:
    fake = FakeStore()
    connector = MooncakeConnector(MooncakeOptions("127.0.0.1:1", segment=1), True, fake.library())
    connector.open(Site(LAYOUT, IDENTITY))
    device = Pages()
    mover = connector.make_mover(device, lambda: None)
    yield fake, connector, mover, device
    mover.close()
    connector.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ostinato-mooncake")]


def carried_out(mover: Any, order: TransferOrder) -> tuple[int, ...]:
    mover.submit(order)
    reports: list[Any] = []
    eventually(lambda: (reports.extend(mover.poll()), reports)[1])
    (report,) = reports
    return report.failed  # type: ignore[no-any-return]


class TestMover:
    def test_emitted_orders_are_stored_and_come_back(self, opened: Any) -> None:
        fake, connector, mover, device = opened
        connector._remember_owner(JobId(1), RequestId("r1"))
        assert carried_out(mover, order_of([3, 4, 5])) == ()
        assert not connector._owners
        assert set(fake.objects) == {record_name(key(number)) for number in (3, 4, 5)}
        before = device.pages[3:6].clone()
        device.pages[3:6] = 0
        assert carried_out(mover, order_of([3, 4, 5], 2, (), JobKind.LOAD)) == ()
        assert (device.pages[3:6] == before).all()

    def test_what_is_known_to_be_there_is_not_stored_again(self, opened: Any) -> None:
        fake, _, mover, _ = opened
        assert carried_out(mover, order_of([1, 2], 1)) == ()
        assert carried_out(mover, order_of([2, 3], 2)) == ()
        assert carried_out(mover, order_of([1, 3], 3)) == ()
        assert [len(names) for names in fake.names("put")] == [2, 1]
        fake.answers["put"] = deque([[0, -1000]])
        assert carried_out(mover, order_of([3, 7, 8, 1], 4)) == (2,)

    def test_damaged_records_are_removed(self, opened: Any) -> None:
        fake, connector, mover, _ = opened
        carried_out(mover, order_of([1, 2, 3]))
        name = record_name(key(2))
        fake.objects[name] = bytes([fake.objects[name][0] ^ 1]) + fake.objects[name][1:]
        assert carried_out(mover, order_of([1, 2, 3], 2, (), JobKind.LOAD)) == (1,)
        assert name not in fake.objects
        assert dict(connector.faults) == {"checksum": 1}
        assert carried_out(mover, order_of([1, 2, 3], 3)) == ()
        assert name in fake.objects, "not taken for known"

    def test_trouble_fails_the_order_and_opens_the_breaker(self, opened: Any) -> None:
        fake, connector, mover, _ = opened
        for job in range(1, 4):
            fake.answers["put"] = deque([-900])
            assert carried_out(mover, order_of([job], job)) == (0,)
        assert connector.breakers.store.is_open
        assert not connector._has_room()
        fake.answers["put"].clear()
        fake.calls.clear()
        assert carried_out(mover, order_of([9], 9)) == (0,)
        assert not fake.names("put")


class TestConnector:
    def test_specifications(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        made = make_connector(parse_spec("mooncake://127.0.0.1:50051"))
        assert made.options == MooncakeOptions("127.0.0.1:50051", False, 512 << 20, "127.0.0.1")
        assert made.capabilities.hooks == {Hook.COMMIT, Hook.RELEASE}
        made = make_connector(parse_spec("mooncake://[::1]:7?segment=0&host=node7&store=offer"))
        assert made.options == MooncakeOptions("[::1]:7", False, 0, "node7")
        assert made.capabilities.hooks == frozenset()
        assert make_connector(parse_spec("mooncake://a:1?mode=shm")).options == MooncakeOptions("a:1", True)

    @pytest.mark.parametrize(
        "text",
        [
            "mooncake",
            "mooncake:127.0.0.1:50051",
            "mooncake://127.0.0.1",
            "mooncake://127.0.0.1:0",
            "mooncake://127.0.0.1:99999",
            "mooncake://user@host:1:2",
            "mooncake://h:1?mode=rdma",
            "mooncake://h:1?store=all",
            "mooncake://h:1?segment=much",
            "mooncake://h:1?mode=shm&segment=1GiB",
            "mooncake://h:1?lease=3",
        ],
    )
    def test_mistakes_are_told(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        with pytest.raises(ConfigError):
            make_connector(parse_spec(text))

    def test_a_missing_package_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConnectorError, match=r"ostinato\[mooncake\]"):
            make_connector(parse_spec("mooncake://h:1"))

    def test_the_open_doors_are_told(self, caplog: pytest.LogCaptureFixture) -> None:
        for shared in (False, True):
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                fake = FakeStore()
                connector = MooncakeConnector(MooncakeOptions("h:1", shared), True, fake.library())
                connector.open(Site(LAYOUT, IDENTITY))
                eventually(lambda fake=fake: bool(fake.calls))
                connector.close()
            assert ("all network interfaces" in caplog.text) != shared

    def test_memory_of_owners_is_bounded(self) -> None:
        connector = MooncakeConnector(MooncakeOptions("h:1"), True, FakeStore().library())
        for number in range(MAX_OWNERS + 10):
            connector._remember_owner(JobId(number), RequestId("r"))
        assert len(connector._owners) == MAX_OWNERS
        assert connector._take_owner(JobId(3)) == ""

    def test_no_lease_for_what_is_not_asked(self, opened: Any) -> None:
        """Stores ask nothing: a successful question would hold off eviction."""
        fake, _, mover, _ = opened
        carried_out(mover, order_of([1, 2, 3]))
        assert not fake.names("exist")
