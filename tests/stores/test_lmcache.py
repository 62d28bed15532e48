"""A real LMCache server: hybrid groups come back bit for bit, and whatever happens to the server is a miss."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from connectors.memory_store import IDENTITY
from e2e.support import assert_at_rest, greedy, make_llm, same, settle
from field.rig import layout_of
from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import Full, State, Window
from ostinato.connectors.api import Site
from ostinato.connectors.lmcache import LMCacheConnector
from ostinato.connectors.lmcache_claims import Claims, Lookup, Written, required_keys
from ostinato.connectors.lmcache_lookups import Address, Desk, make_names
from ostinato.connectors.record import TRAILER_BYTES
from ostinato.connectors.records import Record, record_name
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.errors import ConnectorError
from ostinato.ids import GroupId
from stores.conftest import Subject
from stores.lmcache_server import UNIT, LMCacheServer

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("lmcache is not installed (docs/stores/lmcache.md says how)", allow_module_level=True)

pytestmark = pytest.mark.stores
LENGTH = 105
WHOLE = 96
"""Tokens of whole units in a prompt of LENGTH, less the last token."""


@pytest.fixture(scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheServer]:
    server = LMCacheServer(tmp_path_factory.mktemp("lmcache"))
    yield server
    server.kill()


@pytest.fixture
def server(_server: LMCacheServer) -> Iterator[LMCacheServer]:
    """Empty at first; at the end nothing is held for us."""
    _server.clear()
    yield _server
    eventually(lambda: _server.memory()["read_locked_count"] == 0)


def eventually(condition: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "this never becomes true"
        time.sleep(0.01)


def tokens(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, 256) for _ in range(count)]


def connector_of(llm: LLM) -> LMCacheConnector:
    found = llm.built.connectors[0]
    assert isinstance(found, LMCacheConnector)
    return found


@contextmanager
def engine(subject: Subject, server: LMCacheServer, options: str = "", **more: Any) -> Iterator[LLM]:
    with make_llm(subject.runtime, kv=[server.url + options], max_num_batched_tokens=43, **more) as llm:
        yield llm
        settle(llm)
        assert_at_rest(llm)


def ask(llm: LLM, prompt: Sequence[int], count: int = 4) -> RequestOutput:
    output = llm.generate(list(prompt), greedy(count))[0]
    settle(llm)
    return output


def forget(llm: LLM) -> None:
    """Empty the device; what the server said before counts no more, and is visible there."""
    llm.reset_prefix_cache(device_only=True)
    claims = connector_of(llm)._desk
    assert claims is not None
    for claim in claims.claims._known.values():
        claim.until = 0.0
    time.sleep(0.3)  # the server says that it has stored a little before it is found


# ------------------------------------------------------------------------------------------------------ one client

HYBRID = layout_of(Full(), Window(33), State(), Full())
CHAIN = tuple(bytes([number]) * 32 for number in range(1, 13))
SITE = Site(HYBRID, IDENTITY)


def records_of(keys: Sequence[BlockKey], seed: int) -> list[Record]:
    source = random.Random(seed)
    return [
        Record(
            record_name(key),
            key,
            memoryview(bytearray(source.randbytes(HYBRID.groups[key.group].unit_bytes))),
            bytearray(source.randbytes(TRAILER_BYTES)),
        )
        for key in keys
    ]


@contextmanager
def clients(server: LMCacheServer, buffer: int = 1 << 20) -> Iterator[tuple[Any, Any, Desk]]:
    from ostinato.connectors.lmcache_mover import LMCacheClient, LMCacheRecords

    address = Address(f"tcp://127.0.0.1:{server.port}", buffer, 5.0)
    desk = Desk(HYBRID, Claims(time.monotonic, 60.0), Written(), make_names())
    asking, moving = LMCacheClient(address, SITE), LMCacheClient(address, SITE, buffer)
    yield asking, LMCacheRecords(moving, desk), desk
    asking.close()
    moving.close()


def put(records: Any, desk: Desk, chain: tuple[bytes, ...], batch: Sequence[Record]) -> None:
    desk.written.expect(chain, [record.key for record in batch])
    assert all(records.store(batch))


def get(asking: Any, records: Any, desk: Desk, chain: tuple[bytes, ...], keys: Sequence[BlockKey]) -> list[Record]:
    name = desk.names()
    assert asking.look_up(name, chain) == len(chain)
    desk.claims.answer(chain[-1], chain, required_keys(HYBRID, chain), Lookup(name, chain))
    empty = records_of(keys, 999)
    assert records.load(empty) == [True] * len(empty)
    return empty


@pytest.mark.parametrize("buffer", [0, 1 << 20])
def test_all_groups_of_a_prompt_come_back(server: LMCacheServer, buffer: int) -> None:
    """Two full groups, a window over two units, states at two cuts; in one piece, and unit by unit."""
    keys = [BlockKey(GroupId(group), digest) for digest in CHAIN for group in (0, 1, 3)]
    keys += [BlockKey(GroupId(2), CHAIN[at]) for at in (4, 11)]
    stored = records_of(keys, 1)
    by_key = {record.key: record for record in stored}
    with clients(server, buffer) as (asking, records, desk):
        put(records, desk, CHAIN, stored[: 3 * 12])
        put(records, desk, CHAIN, stored[3 * 12 :])
        eventually(lambda: server.memory()["write_locked_count"] == 0)
        lengths = {}
        for count in (12, 11, 5, 4):
            lookup = Lookup(desk.names(), CHAIN[:count])
            found = asking.look_up(lookup.name, lookup.chain)
            lengths[count] = found
            if found:
                asking.end(Lookup(lookup.name, CHAIN[:found]))
        assert lengths == {12: 12, 11: 5, 5: 5, 4: 0}
        for count in (12, 5):
            needed = sorted(required_keys(HYBRID, CHAIN[:count]))
            some = [key for index, key in enumerate(needed) if index % 3]
            for wanted in (needed, some, needed[:1]):
                for record in get(asking, records, desk, CHAIN[:count], wanted):
                    assert (record.payload, record.trailer) == (by_key[record.key].payload, by_key[record.key].trailer)


def test_what_is_gone_is_a_miss(server: LMCacheServer) -> None:
    keys = sorted(required_keys(HYBRID, CHAIN))
    with clients(server) as (_, records, desk):
        put(records, desk, CHAIN, records_of(keys, 1))
        eventually(lambda: server.memory()["write_locked_count"] == 0)
        desk.claims.answer(CHAIN[-1], CHAIN, frozenset(keys), None)
        server.clear()
        assert records.load(records_of(keys, 2)) == [False] * len(keys)
        assert records.load(records_of([BlockKey(GroupId(0), b"?" * 32)], 2)) == [False]


def test_a_server_with_other_chunks_is_refused(server: LMCacheServer) -> None:
    from ostinato.connectors.lmcache_mover import check_server

    address = Address(f"tcp://127.0.0.1:{server.port}")
    check_server(address, UNIT)
    with pytest.raises(ConnectorError, match="--chunk-size 32"):
        check_server(address, 2 * UNIT)


# ---------------------------------------------------------------------------------------------------------- engines


def test_a_prompt_comes_back_bit_for_bit(subject: Subject, server: LMCacheServer) -> None:
    prompt = tokens(LENGTH)
    with engine(subject, server) as llm:
        assert ask(llm, prompt).cached_tokens == 0
        forget(llm)
        output = ask(llm, prompt)
        assert same(output, subject.cold(prompt))
        assert output.cached_by_tier == {"lmcache": WHOLE}
        longer = prompt + tokens(40, 1)
        forget(llm)
        output = ask(llm, longer)
        assert same(output, subject.cold(longer))
        assert output.cached_by_tier == {"lmcache": WHOLE}
        assert dict(connector_of(llm).faults) == {}
    eventually(lambda: server.status()["active_sessions"] == 0)


def test_an_answer_is_stored_too(subject: Subject, server: LMCacheServer) -> None:
    prompt = tokens(LENGTH, 2)
    with engine(subject, server) as llm:
        turn = ask(llm, prompt, 40)
        forget(llm)
        again = [*prompt, *turn.outputs[0].token_ids, *tokens(20, 3)]
        output = ask(llm, again)
        assert same(output, subject.cold(again))
        assert output.cached_by_tier == {"lmcache": 144}  # the last token was never computed


def test_a_small_buffer_only_costs_time(subject: Subject, server: LMCacheServer) -> None:
    prompt = tokens(LENGTH, 4)
    with engine(subject, server, "?buffer=1KiB") as llm:
        ask(llm, prompt)
        forget(llm)
        output = ask(llm, prompt)
        assert same(output, subject.cold(prompt))
        assert output.cached_tokens == WHOLE


def test_many_prompts_with_a_common_start_beside_each_other(subject: Subject, server: LMCacheServer) -> None:
    prompts = [tokens(50, 6) + tokens(30 + 7 * number, 7 + number) for number in range(5)]
    with engine(subject, server, pages=120) as llm:
        for _ in range(3):
            for prompt, output in zip(prompts, llm.generate(prompts, greedy(3)), strict=True):
                assert same(output, subject.cold(prompt, 3))
            settle(llm)
            forget(llm)
        assert output.cached_tokens > 0


SECOND = """
import sys, torch
from e2e.support import greedy, make_llm, tiny_gemma3
torch.set_num_threads(1)
prompt = [int(word) for word in sys.argv[2].split()]
with make_llm(tiny_gemma3(torch.float32), kv=[sys.argv[1]]) as llm:
    output = llm.generate(prompt, greedy(4))[0]
print("found", output.cached_tokens, output.logits_sha256)
"""


def test_another_process_finds_what_the_first_stored(windowed: Subject, server: LMCacheServer) -> None:
    prompt = tokens(LENGTH, 8)
    with engine(windowed, server) as llm:
        ask(llm, prompt)
    time.sleep(0.3)
    words = [sys.executable, "-c", SECOND, server.url, " ".join(map(str, prompt))]
    done = subprocess.run(words, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=120, check=True)
    assert f"found {WHOLE} {windowed.cold(prompt).logits_sha256}" in done.stdout


def test_salts_do_not_meet(windowed: Subject, server: LMCacheServer) -> None:
    prompt = tokens(LENGTH, 9)
    with engine(windowed, server) as llm:
        llm.generate(prompt, greedy(), cache_salt="a")
        settle(llm)
        forget(llm)
        assert ask(llm, prompt).cached_tokens == 0


def test_changed_bytes_are_noticed(subject: Subject, server: LMCacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from ostinato.connectors.lmcache_mover import Buffer

    prompt = tokens(LENGTH, 10)
    read = Buffer.read

    def spoil(self: Buffer, part: Any, offsets: Any) -> None:
        self._memory[offsets[-1] + 7] ^= 1
        read(self, part, offsets)

    with engine(subject, server) as llm:
        ask(llm, prompt)
        forget(llm)
        monkeypatch.setattr(Buffer, "read", spoil)
        output = ask(llm, prompt)
        assert same(output, subject.cold(prompt))
        assert set(connector_of(llm).faults) == {"checksum"}


# ---------------------------------------------------------------------------------------------- a server that fails


def test_a_server_that_dies_and_comes_back(subject: Subject, server: LMCacheServer) -> None:
    prompt = tokens(LENGTH, 11)
    with engine(subject, server, "?timeout=0.5") as llm:
        ask(llm, prompt)
        forget(llm)
        assert ask(llm, prompt).cached_tokens == WHOLE
        server.kill()
        forget(llm)
        assert same(ask(llm, prompt), subject.cold(prompt))
        server.start()

        def back() -> bool:
            forget(llm)
            output = ask(llm, prompt)
            assert same(output, subject.cold(prompt))
            return output.cached_tokens == WHOLE

        eventually(back, 60)


def test_a_server_that_hangs(windowed: Subject, server: LMCacheServer) -> None:
    prompt = tokens(LENGTH, 12)
    with engine(windowed, server, "?timeout=0.5") as llm:
        ask(llm, prompt)
        server.pause()
        try:
            for _ in range(4):
                forget(llm)
                start = time.monotonic()
                assert same(ask(llm, prompt), windowed.cold(prompt))
                assert time.monotonic() - start < 6
        finally:
            server.resume()
        # Lookups that were never answered are released when the server can be asked again.
        eventually(lambda: server.memory()["read_locked_count"] == 0, 40)


def test_no_server_at_all(windowed: Subject) -> None:
    prompt = tokens(LENGTH, 13)
    with make_llm(windowed.runtime, kv=["lmcache://127.0.0.1:9?timeout=0.3"]) as llm:
        for _ in range(2):
            assert same(ask(llm, prompt), windowed.cold(prompt))
            llm.reset_prefix_cache(device_only=True)
