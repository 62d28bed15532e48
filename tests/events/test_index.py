"""An index that is made from events alone knows what the engine will reuse."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

from field.rig import Rig, fake_rig, shaped
from field.scripted import LOAD, STORE, ScriptedTier
from ostinato.cache.kinds import Chunked, Full, Kind, State, Window
from ostinato.events.index import EventIndex, describe_groups
from ostinato.hierarchy.kv_events import KvEventSource
from ostinato.observe.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, decode, encode

Shape = tuple[Kind, int, int]
MODELS: dict[str, Sequence[Shape]] = {
    "full": [(Full(), 16, 1)],
    "window": [(Full(), 16, 1), (Window(40), 16, 1), (Window(40), 16, 1)],
    "state": [(Full(), 16, 2), (State(), 16, 1)],
    "all": [(Full(), 16, 1), (Window(70), 16, 2), (Chunked(64), 16, 1), (State(), 16, 1)],
    "states alone": [(State(), 16, 1)],
    "units of two sizes": [(Full(), 32, 1), (Window(40), 16, 2)],
}
EVERYBODY = hashlib.sha256(b"").digest()


class Wire:
    """A sink that hands every batch through its encoding to an index; ``full`` loses them."""

    def __init__(self, index: EventIndex) -> None:
        self.index = index
        self.batches: list[list[KvEvent]] = []
        self.full = False
        self.wants_everything = False
        self.listed: list[KvEvent] = []

    def publish(self, events: list[KvEvent]) -> bool:
        if self.full:
            return False
        self.batches.append(decode(encode(0.0, events)).events)
        self.index.apply(self.batches[-1])
        return True

    def list_everything(self, events: list[KvEvent]) -> None:
        self.wants_everything, self.listed = False, events

    @property
    def events(self) -> list[KvEvent]:
        return [event for batch in self.batches for event in batch]


def observed(shapes: Sequence[Shape], pages: int, host: int = 0) -> tuple[Rig, Wire, KvEventSource]:
    layout = shaped(*shapes)
    rig = fake_rig(layout, pages, [ScriptedTier("host", slots=host)] if host else [])
    wire = Wire(EventIndex.of(describe_groups(layout)))
    source = KvEventSource(rig.cache.core, rig.cache.requests, wire, EVERYBODY)
    rig.cache.core.directory.listeners = (source,)
    rig.cache.observers = (*rig.cache.observers, source)
    return rig, wire, source


def held(rig: Rig) -> dict[tuple[str, int], set[bytes]]:
    """What the directory would hit, by tier and group."""
    found: dict[tuple[str, int], set[bytes]] = defaultdict(set)
    for entry in rig.cache.core.directory:
        for tier, place in entry.places.items():
            if place.ready:
                found[str(tier), entry.key.group].add(entry.key.digest)
    return dict(found)


def prompt(rng: random.Random, known: list[list[int]]) -> list[int]:
    """A new prompt, one that shares a prefix with an old one, or one that continues it."""
    tail = [rng.randrange(1000) for _ in range(rng.randrange(1, 120))]
    if not known or rng.random() < 0.3:
        return tail
    old = rng.choice(known)
    return old[: rng.randrange(len(old) + 1)] + tail if rng.random() < 0.5 else [*old, *tail]


@pytest.mark.parametrize("host", [0, 60], ids=["device", "device and host"])
@pytest.mark.parametrize("model", MODELS)
def test_o07_predicted_hits_are_the_engines(model: str, host: int) -> None:
    rig, wire, _ = observed(MODELS[model], 60, host)
    rng, known, reused = random.Random(f"{model}{host}"), list[list[int]](), 0
    for _ in range(25):
        tokens = prompt(rng, known)[:420]
        salt = rng.choice(["", "", "tenant"])
        predicted = wire.index.predict(tokens, hashlib.sha256(salt.encode()).digest())
        output = rig.serve(tokens, count=rng.randrange(1, 40), salt=salt)
        assert output.cached_tokens == predicted
        assert wire.index.blocks() == held(rig)
        reused += predicted
        known.append([*tokens, *output.outputs[0].token_ids])
        if rng.random() < 0.1:
            rig.cache.core.drop_idle(device_only=True)
            rig.step()
    assert reused
    assert any(isinstance(event, BlockRemoved) for event in wire.events)


def test_o05_an_event_has_tokens_parent_group_and_tier() -> None:
    rig, wire, _ = observed(MODELS["window"], 70, 60)
    tokens = list(range(100, 148))
    rig.serve(tokens)
    assert isinstance(wire.events[0], AllBlocksCleared)
    stored = [event for event in wire.events if isinstance(event, BlockStored)]
    assert {(event.medium, event.ownership) for event in stored} == {("GPU", None), ("CPU", "host")}
    assert {event.group_idx for event in stored} == {0, 1, 2}
    assert {(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in stored} == {
        ("full_attention", None),
        ("sliding_window", 40),
    }
    # The key chain, from its definition.
    digests, previous = [], EVERYBODY
    for start in (0, 16, 32):
        unit = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + 16])
        previous = hashlib.sha256(previous + unit).digest()
        digests.append(previous)
    for event in stored:
        first = digests.index(event.block_hashes[0])
        assert event.block_hashes == digests[first : first + len(event.block_hashes)]
        assert event.parent_block_hash == (digests[first - 1] if first else None)
        assert event.token_ids == tokens[16 * first : 16 * (first + len(event.block_hashes))]
        assert event.block_size == 16
        assert event.extra_keys is None


def test_a_tenants_blocks_are_not_everybodys() -> None:
    rig, wire, _ = observed(MODELS["full"], 70)
    rig.serve(list(range(40)), salt="tenant")
    stored = [event for event in wire.events if isinstance(event, BlockStored)]
    space = hashlib.sha256(b"tenant").hexdigest()
    assert [event.extra_keys for event in stored] == [[(space,)] * 2]
    assert "tenant" not in str(stored)


def test_a_load_is_told_when_it_has_arrived_and_not_before() -> None:
    rig, wire, _ = observed(MODELS["full"], 70, 60)
    tier = rig.cache.core.lower
    assert tier
    tokens = list(range(64))
    rig.serve(tokens)
    rig.evict_device()
    rig.step()
    assert set(wire.index.blocks()) == {("host", 0)}
    mover = rig.engine.executor.movers["host"]  # type: ignore[attr-defined]
    mover.shut(LOAD)
    rig.add(tokens)
    rig.step(3)
    assert mover.waiting(LOAD)
    assert set(wire.index.blocks()) == {("host", 0)}
    mover.open(LOAD, STORE)
    rig.run()
    assert wire.index.blocks()["device", 0] == wire.index.blocks()["host", 0]


def test_o06_a_lost_batch_is_made_good_by_the_next() -> None:
    rig, wire, _ = observed(MODELS["all"], 70)
    rig.serve(list(range(64)))
    wire.full = True
    rig.serve(list(range(500, 600)))
    assert wire.index.blocks() != held(rig)
    wire.full = False
    rig.step()
    assert wire.index.blocks() == held(rig)


def test_a_listing_is_all_that_is_held() -> None:
    rig, wire, _ = observed(MODELS["all"], 90, 60)
    rng, known = random.Random(5), list[list[int]]()
    for _ in range(20):
        known.append(prompt(rng, known)[:300])
        rig.serve(known[-1], 20)
    wire.wants_everything = True
    rig.step()
    late = EventIndex.of(describe_groups(rig.cache.core.layout))
    late.apply(decode(encode(0.0, wire.listed)).events)
    assert late.blocks() == held(rig)
    assert late.predict(known[-1], EVERYBODY) == wire.index.predict(known[-1], EVERYBODY) > 0


def test_a_reset_leaves_nothing() -> None:
    rig, wire, _ = observed(MODELS["all"], 70, 60)
    rig.serve(list(range(100)))
    rig.cache.core.drop_idle()
    rig.step()
    assert wire.index.blocks() == {}
    assert rig.serve(list(range(100))).cached_tokens == 0


def test_nothing_is_remembered_of_what_is_gone() -> None:
    rig, _, source = observed(MODELS["all"], 70)
    for start in range(0, 2000, 100):
        rig.serve(list(range(start, start + 100)), 20)
    rig.add(list(range(90)))
    rig.step()
    rig.engine.close()
    rig.cache.core.drop_idle()
    rig.cache.settle(rig.cache.step, ())
    assert not len(source.provenance)
