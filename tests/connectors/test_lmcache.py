"""The LMCache connector without a server: what it asks, claims, stores and releases."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from connectors.memory_lmcache import MemoryLMCache
from connectors.memory_store import IDENTITY
from connectors.observer import session
from field.rig import Rig, expected_tokens, fake_rig, layout_of
from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import Chunked, Full, Kind, State, Window
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.connectors.api import Site
from ostinato.connectors.breaker import Breaker, Breakers
from ostinato.connectors.lmcache import LMCacheConnector
from ostinato.connectors.lmcache_claims import (
    Claims,
    Lookup,
    Written,
    peers,
    required_keys,
    stand_ins,
    trailing_tokens,
)
from ostinato.connectors.lmcache_lookups import Address
from ostinato.connectors.registry import make_connector
from ostinato.errors import ConfigError, ConnectorError
from ostinato.ids import GroupId

HYBRID = layout_of(Full(), Window(33), State())
PAGED = CacheLayout(
    (
        GroupSpec(GroupId(0), Full(), (0,), 16, 4, 16, 32, 64),
        GroupSpec(GroupId(1), Window(40), (1,), 16, 2, 16, 32, 128),
        GroupSpec(GroupId(2), State(), (2,), 16, 1, 16, 32, 256),
    ),
    256,
)
LAYOUTS = {
    "full": layout_of(Full()),
    "windows": layout_of(Window(20), Window(70)),
    "states": layout_of(State()),
    "hybrid": HYBRID,
    "paged": PAGED,
}


def eventually(condition: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "this never becomes true"
        time.sleep(0.001)


@contextmanager
def running(
    monkeypatch: pytest.MonkeyPatch, server: MemoryLMCache, layout: CacheLayout = HYBRID, pages: int = 200
) -> Iterator[tuple[LMCacheConnector, Rig]]:
    monkeypatch.setitem(sys.modules, "ostinato.connectors.lmcache_mover", server.module())
    connector = LMCacheConnector(Address("tcp://127.0.0.1:5555"))
    connector.breakers = Breakers(*(Breaker(pause_s=0.01, max_pause_s=0.05) for _ in range(3)))
    connector.open(Site(layout, IDENTITY))
    rig = fake_rig(layout, pages, [connector])
    yield connector, rig
    rig.engine.executor.close()
    connector.close()
    if not server.broken:
        eventually(lambda: not server.held)


def serve(rig: Rig, tokens: Sequence[int], count: int = 2, salt: str = "") -> int:
    """Tokens of the prompt that were found."""
    name = rig.add(tokens, count, salt=salt)

    def done() -> bool:
        rig.step()
        return not rig.engine.has_work and not len(rig.cache.core.book)

    eventually(done)
    output = rig.outputs[name]
    assert output.outputs[0].token_ids == expected_tokens(tokens, count, salt)
    return output.cached_tokens


def forget(connector: LMCacheConnector, rig: Rig) -> None:
    rig.cache.core.drop_idle(device_only=True)
    assert connector._desk is not None
    for claim in connector._desk.claims._known.values():
        claim.until = 0.0


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_stored_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by an engine that starts later; a hit ends before the last token, which is always computed."""
    server, prompt = MemoryLMCache(), session(1, 150)
    with running(monkeypatch, server, LAYOUTS[name]) as (connector, rig):
        assert serve(rig, prompt, 40) == 0
        forget(connector, rig)
        assert serve(rig, prompt) == 144
        forget(connector, rig)
        # Of a prompt that ends there the last unit is computed; a state was kept before it too.
        assert serve(rig, prompt[:144]) == 128
    with running(monkeypatch, server, LAYOUTS[name]) as (_, rig):
        assert serve(rig, prompt) == 144
        assert serve(rig, prompt) == 144, "from the device"
        answer = list(expected_tokens(prompt, 40))
        assert serve(rig, prompt + answer + [7] * 20) == 176


def test_nothing_is_stored_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    server, prompt = MemoryLMCache(), session(2, 150)
    with running(monkeypatch, server, PAGED) as (connector, rig):
        serve(rig, prompt, 60)
        serve(rig, prompt, 60)
        forget(connector, rig)
        serve(rig, prompt, 60)
        assert len(server.stored) == len(set(server.stored))
        full = {key for key in server.stored if key.group == 0}
        assert len(full) == 209 // 16


def test_only_the_states_that_others_resume_at_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    server = MemoryLMCache()
    with running(monkeypatch, server) as (_, rig):
        serve(rig, session(3, 300), 40)
        states = [key for key in server.stored if key.group == 2]
    assert len(states) <= 3


def test_salts_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(monkeypatch, MemoryLMCache()) as (connector, rig):
        serve(rig, session(4, 100), salt="a")
        forget(connector, rig)
        assert serve(rig, session(4, 100), salt="b") == 0
        forget(connector, rig)
        assert serve(rig, session(4, 100), salt="a") == 96


def test_a_lookup_that_nobody_uses_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    server = MemoryLMCache()
    with running(monkeypatch, server) as (connector, rig):
        serve(rig, session(5, 100))
        forget(connector, rig)
        assert connector._lookups is not None
        assert connector._desk is not None
        chain = next(iter(connector._desk.written._chains))[0]
        connector._lookups.ask(chain[-1], chain)
        eventually(lambda: connector._desk.claims.held(chain[-1]) is not None)
        for claim in connector._desk.claims._known.values():
            claim.until = 0.0
        eventually(lambda: not server.held)


@pytest.mark.parametrize("name", ["hybrid", "paged"])
def test_random_sessions_under_pressure_and_faults(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is checked by the rig, unit by unit, whatever was found where."""
    server, source, hits = MemoryLMCache(), random.Random(name), 0
    with running(monkeypatch, server, LAYOUTS[name], pages=70) as (connector, rig):
        turns = {number: session(number, 40) for number in range(4)}
        for _ in range(40):
            number = source.randrange(4)
            hits += serve(rig, turns[number], source.randint(1, 20))
            turns[number] = turns[number][:200] + [source.randrange(900) for _ in range(source.randint(1, 40))]
            server.broken, server.forgets = source.random() < 0.15, source.random() < 0.15
            if source.random() < 0.5:
                forget(connector, rig)
        server.broken = False
    assert hits > 500


def test_a_broken_server_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    server, prompt = MemoryLMCache(), session(6, 100)
    with running(monkeypatch, server) as (connector, rig):
        server.broken = True
        for _ in range(3):
            assert serve(rig, prompt) == 0
            forget(connector, rig)
        server.broken = False

        def back() -> bool:
            forget(connector, rig)
            return serve(rig, prompt) == 96

        eventually(back)


# ------------------------------------------------------------------------------------------------------- the parts


def chain_of(count: int) -> tuple[bytes, ...]:
    return tuple(bytes([number]) * 32 for number in range(count))


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        (Full(), -1),
        (Window(33), 32),
        (Window(34), 48),
        (Window(1), 16),
        (Window(33, 4), -1),
        (Chunked(40), 48),
        (State(), 16),
    ],
)
def test_lmcache_is_told_to_require_enough(kind: Kind, tokens: int) -> None:
    assert trailing_tokens(kind, 16) == tokens
    for cut in range(16, 400, 16):
        first = min((low for low, high in kind.required(cut, 16) if high > low), default=cut // 16)
        assert tokens < 0 or first * 16 >= cut - tokens


def test_groups_of_one_object_stand_together() -> None:
    layout = layout_of(Full(), Window(33), State(), Full(), Window(40), State(), Window(60))
    assert peers(layout) == [[0, 3], [1], [2, 5], [4], [6]]
    assert peers(layout_of(Window(33), Window(30))) == [[0, 1]], "windows of as many units"


def test_stand_ins_are_the_digests() -> None:
    chain = (bytes(range(32)), b"\xff" * 32)
    words = stand_ins(chain, 16)
    assert b"".join(word.to_bytes(2, "little") for word in words) == b"".join(chain)
    assert stand_ins(chain, 32)[:32] == (*words[:16], *[0] * 16)


def test_a_claim_is_for_whoever_loads_first() -> None:
    now = [0.0]
    claims, chain = Claims(lambda: now[0], 3.0), chain_of(6)
    held = required_keys(HYBRID, chain)
    assert claims.held(chain[-1]) is None
    assert claims.ask(chain[-1])
    assert not claims.ask(chain[-1])
    claims.answer(chain[-1], chain, held, Lookup("one", chain))
    assert claims.held(chain[-1]) == held
    wanted = [BlockKey(GroupId(0), chain[2]), BlockKey(GroupId(2), chain[5])]
    assert claims.take(wanted) == (chain, Lookup("one", chain))
    assert claims.take(wanted) == (chain, None)
    assert claims.take([*wanted, BlockKey(GroupId(2), chain[4])]) is None, "a state that is not the last"
    claims.answer(chain[-1], chain, held, Lookup("two", chain))
    claims.answer(chain[-1], chain, held, Lookup("three", chain))
    assert claims.overdue() == [Lookup("two", chain)]
    now[0] = 3.5
    assert claims.held(chain[-1]) is None
    assert claims.overdue() == [Lookup("three", chain)]
    claims.answer(chain[-1], chain, held, Lookup("four", chain))
    claims.refute(wanted[:1])
    assert claims.held(chain[-1]) == frozenset()
    assert claims.overdue() == [Lookup("four", chain)]


def test_the_prompt_of_units_that_are_stored() -> None:
    written, chain = Written(), chain_of(3)
    keys = [BlockKey(GroupId(0), digest) for digest in chain]
    written.expect(chain, keys)
    assert written.chain_of(keys[1:]) == chain
    assert written.chain_of([BlockKey(GroupId(1), chain[0])]) is None
    written.add(keys)
    written.discard(keys[:1])
    assert [key in written for key in keys] == [False, True, True]


# ------------------------------------------------------------------------------------------------- specifications


def test_specifications() -> None:
    plain = make_connector("lmcache:")
    assert isinstance(plain, LMCacheConnector)
    assert plain.address == Address("tcp://127.0.0.1:5555", 64 << 20, 2.0)
    other = make_connector("lmcache://[::1]:7000?buffer=1GiB&timeout=0.5")
    assert isinstance(other, LMCacheConnector)
    assert other.address == Address("tcp://[::1]:7000", 1 << 30, 0.5)


@pytest.mark.parametrize(
    "text",
    ["lmcache://h:x", "lmcache://u@h", "lmcache://h/p", "lmcache:?ttl=1", "lmcache:?timeout=0", "lmcache:?buffer=x"],
)
def test_wrong_specifications(text: str) -> None:
    with pytest.raises(ConfigError):
        make_connector(text)


def test_a_missing_package_is_told_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ostinato.connectors.lmcache_mover", None)
    with pytest.raises(ConnectorError, match=r"docs/stores/lmcache\.md"):
        LMCacheConnector(Address("tcp://127.0.0.1:5555")).open(Site(HYBRID, IDENTITY))


def test_other_hash_units_are_refused() -> None:
    with pytest.raises(ConnectorError, match="hash unit"):
        LMCacheConnector(Address("tcp://127.0.0.1:5555")).open(Site(layout_of(Full(), unit=8), IDENTITY))
