"""A real Mooncake master: every request is answered, and equal to the cold one, whatever happens to the store.

Both ways into the store (emitted orders, offered blocks) and both clients (a segment of one's own, shared memory).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from connectors.memory_store import IDENTITY
from e2e.support import assert_at_rest, greedy, make_llm, same, settle
from field.rig import Rig, expected_tokens, fake_rig, layout_of
from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import Full, State, Window
from ostinato.connectors.answers import Answers
from ostinato.connectors.api import Site
from ostinato.connectors.mooncake import MooncakeConnector
from ostinato.connectors.mooncake_client import MooncakeClient, MooncakeError, MooncakeOptions
from ostinato.connectors.mooncake_mover import MooncakeRecords
from ostinato.connectors.records import Record, record_name
from ostinato.connectors.registry import make_connector
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.ids import GroupId
from ostinato.transfer.job import JobKind
from stores.conftest import Subject
from stores.mooncake_server import LEASE_MS, Program, master, private_network, storage_owner

pytest.importorskip("mooncake", reason="pip install ostinato[mooncake]")
pytestmark = pytest.mark.stores
LENGTH = 105
WHOLE = 96
MODES = ["direct", "shm", "direct-offer"]


@pytest.fixture(scope="module", autouse=True)
def _network() -> Iterator[None]:
    with private_network():
        yield


@pytest.fixture
def store() -> Iterator[Program]:
    with master() as program:
        yield program


@contextmanager
def urls(store: Program, mode: str) -> Iterator[str]:
    """A specification of a tier in that mode."""
    if mode == "shm":
        with storage_owner(store) as owner:
            yield f"mooncake://{owner.address}?mode=shm"
    else:
        yield f"mooncake://{store.address}?segment=64MiB" + ("&store=offer" if mode == "direct-offer" else "")


def tokens(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, 256) for _ in range(count)]


def connector_of(llm: LLM) -> MooncakeConnector:
    found = llm.built.connectors[0]
    assert isinstance(found, MooncakeConnector)
    return found


def ask(llm: LLM, prompt: Sequence[int], count: int = 4) -> RequestOutput:
    output = llm.generate(list(prompt), greedy(count))[0]
    settle(llm)
    return output


def forget(llm: LLM) -> None:
    """Empty the device, and the memory of answers."""
    llm.reset_prefix_cache(device_only=True)
    connector_of(llm)._answers = Answers(time.monotonic)


def library(llm: LLM) -> Any:
    """The client of the package, to play tricks with."""
    return connector_of(llm)._opened().store()


def stored_names(llm: LLM) -> list[str]:
    """What the engine's store thread put, by the client's own memory."""
    return sorted(connector_of(llm)._opened().known.names())


@contextmanager
def engine(subject: Subject, url: str, **options: Any) -> Iterator[LLM]:
    with make_llm(subject.runtime, kv=[url], max_num_batched_tokens=43, **options) as llm:
        connector_of(llm)._opened().store()  # connected
        yield llm
        settle(llm)
        assert_at_rest(llm)


def has_ended(thread: threading.Thread) -> bool:
    thread.join(10)
    return not thread.is_alive()


# ----------------------------------------------------------------------------------------------------- one client


def batch_of(count: int, size: int, seed: int = 1) -> tuple[list[Record], bytearray]:
    memory = bytearray(random.Random(seed).randbytes(count * size))
    view = memoryview(memory)
    records = []
    for index in range(count):
        key = BlockKey(GroupId(1), (seed * 1000 + index).to_bytes(32, "big"))
        trailer = bytearray(random.Random(index).randbytes(192))
        records.append(Record(record_name(key), key, view[index * size : (index + 1) * size], trailer))
    return records, memory


@contextmanager
def client(address: str, shared: bool = False, segment: int = 64 << 20) -> Iterator[MooncakeClient]:
    made = MooncakeClient(MooncakeOptions(address, shared, 0 if shared else segment), 4 << 20)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def clients(store: Program, mode: str) -> Iterator[MooncakeClient]:
    if mode == "shm":
        with storage_owner(store) as owner, client(owner.address, shared=True) as made:
            yield made
    else:
        with client(store.address) as made:
            yield made


@pytest.mark.parametrize("mode", ["direct", "shm"])
def test_records_come_back(store: Program, mode: str) -> None:
    with clients(store, mode) as made:
        records = MooncakeRecords(made)
        for seed, size in enumerate((0, 1, 4000, 1 << 20), 1):
            batch, memory = batch_of(7, size, seed)
            before, trailers = bytes(memory), [bytes(record.trailer) for record in batch]
            names = [record.name for record in batch]
            assert made.contains(names) == [False] * 7
            assert records.load(batch) == [False] * 7
            assert bytes(memory) == before
            assert records.store(batch[:6]) == [True] * 6
            memory[:] = bytes(len(memory))
            for record in batch:
                record.trailer[:] = bytes(192)
            assert made.contains(names) == [True] * 6 + [False]
            assert records.load(batch) == [True] * 6 + [False]
            assert bytes(memory) == before[: 6 * size] + bytes(size)
            assert [bytes(record.trailer) for record in batch[:6]] == trailers[:6]
        records.close()


def test_other_lengths_are_misses_and_go_away(store: Program) -> None:
    with client(store.address) as made, client(store.address, segment=0) as other:
        records = MooncakeRecords(made)
        batch, memory = batch_of(4, 5000)
        assert records.store(batch) == [True] * 4
        before = bytes(memory)
        foreign = other.take_staging()
        other.store().upsert_from(batch[0].name, foreign.address, 100)
        other.store().upsert_from(batch[1].name, foreign.address, 9000)
        assert records.load(batch) == [False, False, True, True]
        assert bytes(memory) == before
        assert made.contains([record.name for record in batch]) == [False, False, True, True]
        assert records.store(batch) == [True] * 4
        assert records.load(batch) == [True] * 4
        records.close()


def test_a_full_store_takes_what_it_can(store: Program) -> None:
    """It evicts behind our back, and what was just asked about is protected: no room, or none soon enough."""
    with client(store.address, segment=16 << 20) as made:
        records = MooncakeRecords(made)
        batch, _ = batch_of(60, 1 << 20)
        taken = [records.store([record])[0] for record in batch]
        assert sum(taken) > 14
        held = made.contains([record.name for record in batch])
        assert 0 < sum(held) <= 16
        more, _ = batch_of(16, 1 << 20, seed=2)
        assert not all(records.store(more)), "everything there is protected"
        time.sleep(2 * LEASE_MS / 1000)
        assert any(records.store(more)), "no longer"
        records.close()


def test_groups_are_evicted_together(store: Program) -> None:
    """Units of three groups that end at the same token, stored at different times: all of them stay, or none."""
    with client(store.address, segment=16 << 20) as made:
        records = MooncakeRecords(made)
        _, memory = batch_of(1, 200_000)
        view = memoryview(memory)

        def record(group: int, cut: int) -> Record:
            key = BlockKey(GroupId(group), cut.to_bytes(32, "big"))
            return Record(record_name(key), key, view, bytearray(192))

        for group in range(3):
            assert all(records.store([record(group, cut) for cut in range(20)]))
        time.sleep(2 * LEASE_MS / 1000)
        assert made.contains([record(1, 5).name]) == [True]
        for cut in range(100, 140):
            records.store([record(0, cut)])
            time.sleep(0.01)
        held = [sum(made.contains([record(group, cut).name for group in range(3)])) for cut in range(20)]
        assert held[5] == 3, "one of them was in use"
        assert set(held) == {0, 3}, held
        records.close()


def test_calls_fail_in_time_when_the_master_is_gone(store: Program) -> None:
    made = MooncakeClient(MooncakeOptions(store.address, segment=1 << 24), 1 << 20)
    records = MooncakeRecords(made)
    batch, _ = batch_of(2, 100)
    assert records.store(batch) == [True, True]
    for event in (store.hang, store.kill):
        event()
        for call in (records.store, records.load, lambda batch: made.contains([record.name for record in batch])):
            start = time.monotonic()
            with pytest.raises(MooncakeError, match=r"trouble|not known"):
                call(batch)
            assert time.monotonic() - start < 6
        store.resume()
    start = time.monotonic()
    made.close()
    assert time.monotonic() - start < 2
    with pytest.raises(MooncakeError, match="closed"):
        made.store()


def test_connecting_holds_up_nobody(store: Program) -> None:
    """The library's setup holds the interpreter: where it would take long, another process does it."""
    for event, words in ((store.hang, "does not work|hangs"), (store.kill, "nothing listens")):
        event()
        gaps, ended = [0.0], threading.Event()

        def watch(gaps: list[float] = gaps, ended: threading.Event = ended) -> None:
            last = time.perf_counter()
            while not ended.wait(0.001):
                now = time.perf_counter()
                gaps[0], last = max(gaps[0], now - last), now

        thread = threading.Thread(target=watch)
        thread.start()
        with client(store.address) as made, pytest.raises(MooncakeError, match=words):
            made.store()
        ended.set()
        assert has_ended(thread)
        assert gaps[0] < 0.5


# ------------------------------------------------------------------------------------------------------- end to end


@pytest.mark.parametrize("mode", MODES)
def test_what_the_device_forgot_comes_back(subject: Subject, store: Program, mode: str) -> None:
    prompt = tokens(LENGTH)
    with urls(store, mode) as url, engine(subject, url) as llm:
        first = ask(llm, prompt, 30)
        assert same(first, subject.cold(prompt, 30))
        for _ in range(3):
            forget(llm)
            output = ask(llm, prompt)
            assert same(output, subject.cold(prompt))
            assert output.cached_tokens == WHOLE
            assert set(output.cached_by_tier) == {"mooncake"}
            assert output.bytes_loaded > 0
        assert set(ask(llm, prompt).cached_by_tier) == {"device"}
        turn = [*prompt, *first.outputs[0].token_ids, *tokens(9, seed=1)]
        forget(llm)
        output = ask(llm, turn)
        assert same(output, subject.cold(turn))
        assert output.cached_by_tier == {"mooncake": (LENGTH + 29) // 16 * 16}
        assert not connector_of(llm).faults


@pytest.mark.parametrize("mode", MODES)
def test_a_chat_continues_on_another_engine(subject: Subject, store: Program, mode: str) -> None:
    turn = tokens(60)
    with urls(store, mode) as url, engine(subject, url) as first, engine(subject, url) as second:
        for number in range(4):
            llm = (first, second)[number % 2]
            output = ask(llm, turn, 20)
            assert same(output, subject.cold(turn, 20))
            if number:
                assert output.cached_by_tier.get("mooncake", 0) > 0
                assert output.cached_tokens >= (len(turn) - 10) // 16 * 16 - 16
            turn = turn + list(output.outputs[0].token_ids) + tokens(9, seed=number)


def test_records_outlive_the_engine_where_others_own_the_storage(windowed: Subject, store: Program) -> None:
    prompt = tokens(LENGTH)
    with storage_owner(store) as owner:
        urls = (f"mooncake://{store.address}?segment=0", f"mooncake://{owner.address}?mode=shm")
        for number, url in enumerate((*urls, *urls)):
            with engine(windowed, url) as llm:
                output = ask(llm, prompt)
                assert same(output, windowed.cold(prompt))
                assert output.cached_by_tier == ({"mooncake": WHOLE} if number else {})


def test_windows_and_states_go_in_sparingly(subject: Subject, store: Program) -> None:
    """A long prompt: of what windows and states pass through, only what some cut needs."""
    counts = {}
    for mode in ("direct", "direct-offer"):
        with urls(store, mode) as url, engine(subject, url) as llm:
            output = ask(llm, tokens(400))
            assert same(output, subject.cold(tokens(400)))
            forget(llm)
            assert ask(llm, tokens(400)).cached_by_tier == {"mooncake": 384}
            counts[mode] = llm.built.hierarchy.core.book.stats.bytes_stored
    if subject.name == "windowed":
        assert counts["direct"] < 0.7 * counts["direct-offer"]


@pytest.mark.parametrize("place", ["payload", "trailer", "truncated", "extended"])
def test_changed_bytes_are_found_and_replaced(subject: Subject, store: Program, place: str) -> None:
    """Another client overwrites records.  The store keeps first values: ours come back since the bad ones go."""
    prompt = tokens(LENGTH)
    with urls(store, "direct") as url, engine(subject, url) as llm:
        ask(llm, prompt)
        client, staging = library(llm), connector_of(llm)._opened().take_staging()
        for name in stored_names(llm):
            value = bytearray(client.get_size(name))
            assert client.get_into(name, staging.address, len(value)) == len(value)
            staging.get(0, value)
            if place == "payload":
                value[len(value) // 3] ^= 0x10
            elif place == "trailer":
                value[-100] ^= 0x10
            else:
                value = value[:-1] if place == "truncated" else value + b"\0"
            staging.put(0, value)
            assert client.upsert_from(name, staging.address, len(value)) == 0
        forget(llm)
        output = ask(llm, prompt)
        assert same(output, subject.cold(prompt))
        assert output.cached_tokens == 0
        if place in ("payload", "trailer"):
            assert sum(connector_of(llm).faults.values()) > 0
        for _ in range(3):  # what a failed load did not get as far as comes up in the next one
            forget(llm)
            output = ask(llm, prompt)
            assert same(output, subject.cold(prompt))
        assert output.cached_tokens == WHOLE


@pytest.mark.parametrize("mode", ["direct", "direct-offer"])
def test_holes_shorten_the_hit(subject: Subject, store: Program, mode: str) -> None:
    """As the store evicts: any record.  Emitted windows and states are few, so that then the next lower cut is far."""
    prompt, source = tokens(LENGTH), random.Random(3)
    with urls(store, mode) as url, engine(subject, url) as llm:
        reused = set()
        for _ in range(8):
            ask(llm, prompt)
            library(llm).remove(source.choice(stored_names(llm)), True)
            forget(llm)
            output = ask(llm, prompt)
            assert same(output, subject.cold(prompt))
            reused.add(output.cached_tokens)
            forget(llm)
            ask(llm, prompt)  # stores again what was lost
            forget(llm)
            assert ask(llm, prompt).cached_tokens == WHOLE
        assert min(reused) < WHOLE
        assert mode == "direct" or subject.name == "recurrent" or len(reused) > 1
        assert not connector_of(llm).faults


def test_a_store_for_hardly_anything(subject: Subject, store: Program) -> None:
    """Most stores find no room; all requests are answered, some with what is left."""
    with engine(subject, f"mooncake://{store.address}?segment=16MiB") as llm:
        filler = connector_of(llm)._opened().take_staging()
        for number in range(15):
            library(llm).put_from(f"filler{number}", filler.address, 1 << 20)
        for number in range(12):
            prompt = tokens(LENGTH, number % 3)
            assert same(ask(llm, prompt), subject.cold(prompt))
            forget(llm)


# ------------------------------------------------------------------------------------------------- a failing store


def serve_for(llm: LLM, subject: Subject, seconds: float) -> tuple[float, int]:
    """Requests one after the other, the device emptied between them: the longest one's time, tokens from Mooncake."""
    until, longest, reused = time.monotonic() + seconds, 0.0, 0
    source = random.Random(5)
    while time.monotonic() < until:
        prompt = tokens(LENGTH, source.randrange(5))
        start = time.monotonic()
        output = llm.generate(list(prompt), greedy(4))[0]
        longest = max(longest, time.monotonic() - start)
        assert same(output, subject.cold(prompt))
        reused += output.cached_by_tier.get("mooncake", 0)
        llm.built.hierarchy.core.drop_idle(device_only=True)
    return longest, reused


EVENTS: dict[str, Callable[[Program], None]] = {"killed": Program.kill, "hung": Program.hang}


@pytest.mark.parametrize("event", EVENTS)
def test_a_master_that_fails_and_comes_back(windowed: Subject, store: Program, event: str) -> None:
    """Requests go on without it, and use it again soon after it is back (empty, when it was killed)."""
    for seed in range(5):
        windowed.cold(tokens(LENGTH, seed))
    with urls(store, "direct") as url, engine(windowed, url) as llm:
        _, reused = serve_for(llm, windowed, 2)
        assert reused > 0
        EVENTS[event](store)
        longest, _ = serve_for(llm, windowed, 9)
        assert longest < 7, "one probe's deadline, at most"
        store.resume() if event == "hung" else store.start()
        until, reused = time.monotonic() + 60, 0
        while not reused and time.monotonic() < until:
            _, reused = serve_for(llm, windowed, 2)
        assert reused > 0


def test_an_engine_starts_without_a_master(windowed: Subject, store: Program) -> None:
    store.kill()
    prompt = tokens(LENGTH)
    start = time.monotonic()
    with make_llm(windowed.runtime, kv=[f"mooncake://{store.address}?segment=16MiB"]) as llm:
        assert same(ask(llm, prompt), windowed.cold(prompt))
        assert time.monotonic() - start < 12
        store.start()
        until, reused = time.monotonic() + 60, 0
        while not reused and time.monotonic() < until:
            forget(llm)
            output = ask(llm, prompt)
            assert same(output, windowed.cold(prompt))
            reused = output.cached_by_tier.get("mooncake", 0)
        assert reused == WHOLE
        settle(llm)
        assert_at_rest(llm)


def test_a_storage_owner_that_is_killed(windowed: Subject, store: Program) -> None:
    with storage_owner(store) as owner, engine(windowed, f"mooncake://{owner.address}?mode=shm") as llm:
        _, reused = serve_for(llm, windowed, 1)
        assert reused > 0
        owner.kill()
        longest, _ = serve_for(llm, windowed, 6)
        assert longest < 7
        owner.start()
        until, reused = time.monotonic() + 60, 0
        while not reused and time.monotonic() < until:
            _, reused = serve_for(llm, windowed, 2)
        assert reused > 0


def test_a_peer_that_is_killed_takes_its_records_along(windowed: Subject, store: Program) -> None:
    """The master says for some seconds that they are there; reading them fails, and the tokens are computed."""
    prompt = tokens(LENGTH)
    with storage_owner(store) as owner, engine(windowed, f"mooncake://{store.address}?segment=0") as llm:
        ask(llm, prompt)
        owner.kill()
        forget(llm)
        output = ask(llm, prompt)
        assert same(output, windowed.cold(prompt))
        assert output.cached_tokens == 0
        assert_at_rest(llm)


# -------------------------------------------------------------------------------------------------- the checked rig


def rig_over(connector: MooncakeConnector, pages: int = 60) -> Rig:
    layout = layout_of(Full(), Window(32), State())
    connector.open(Site(layout, IDENTITY))
    return fake_rig(layout, pages, [connector])  # type: ignore[list-item]


def drive(rig: Rig, seconds: float = 60) -> None:
    """Run to the end in real time."""
    until = time.monotonic() + seconds
    while rig.engine.has_work or len(rig.cache.core.book):
        rig.clock.now = time.monotonic()
        rig.step()
        time.sleep(0.001)
        assert time.monotonic() < until, rig.dump()


@pytest.mark.parametrize("mode", MODES)
def test_two_checked_engines_share_a_store(store: Program, mode: str) -> None:
    """Every unit that a sequence reads is the one that belongs there; windows and states among them."""
    with urls(store, mode) as url:
        connectors = [make_connector(url) for _ in range(2)]
        rigs = [rig_over(connector) for connector in connectors if isinstance(connector, MooncakeConnector)]
        source, expected = random.Random(7), {}
        for _ in range(8):
            for which, rig in enumerate(rigs):
                for _ in range(3):
                    # A chat of one of four users that goes on, or forks.
                    user, length = source.randrange(4), source.choice((48, 80, 130))
                    stem = [user * 1000 + position for position in range(length)]
                    prompt = stem + [source.randrange(3)] * source.randrange(1, 20)
                    expected[which, rig.add(prompt, 3)] = expected_tokens(prompt, 3)
            for rig in rigs:
                drive(rig)
                rig.cache.core.drop_idle(device_only=True)
        for (which, name), answer in expected.items():
            assert rigs[which].outputs[name].outputs[0].token_ids == answer
        hits = sum(output.cached_by_tier.get("mooncake", 0) for rig in rigs for output in rig.outputs.values())
        assert hits > 500
        for rig, connector in zip(rigs, connectors, strict=True):
            rig.cache.audit()
            rig.engine.close()
            connector.close()
            assert not getattr(connector, "faults")  # noqa: B009
            assert not [job for job in rig.cache.core.book if job.order.kind is JobKind.LOAD]
