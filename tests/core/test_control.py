"""Deleting, pinning, and hints, against a model that knows who may be found and nothing of how it is done.

The model: a unit may be found only if somebody still stands for it, that is, a request that was opened after its
deletion, that may be stored, and whose time is not up.  What is pinned stays where it was.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.builders import plain_layout
from core.harness import seed_of
from core.scenarios import MAX_DECODE, MAX_PROMPT, SETUPS, prompt
from core.world import Client, Setup, World
from ostinato.cache.hints import PLAIN, CacheHints
from ostinato.cache.keys import BlockKey, KeyChain
from ostinato.cache.kinds import Full, State, Window
from ostinato.cache.layout import CacheLayout
from ostinato.errors import CacheLimitError, NotCachedError, RequestError
from ostinato.hierarchy.inspection import unit_keys
from ostinato.hierarchy.removal import Removal
from ostinato.hierarchy.tiers import StoreMode
from ostinato.ids import DEVICE, TierId
from ostinato.transfer.job import JobKind

SMALL: Final = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
LARGE: Final = settings(SMALL, max_examples=1500, stateful_step_count=100)
NO_STORE: Final = CacheHints(no_store=True)
SHORT: Final = CacheHints(ttl_s=3.0)
SPENT: Final = CacheHints(end_of_use=True)
BITES: Final = settings(SMALL, max_examples=400, derandomize=True, phases=[Phase.generate])
INDEX = st.integers(0, 30)


def keys_of(layout: CacheLayout, tokens: Iterable[int], salt: str = "") -> list[BlockKey]:
    chain = KeyChain(seed_of(salt), layout.base_unit)
    chain.update(list(tokens))
    return [key for spec in layout.groups for key in unit_keys(spec, chain)]


def is_findable(world: World, key: BlockKey) -> bool:
    core = world.cache.core
    return key in core.directory or any(tier.holds(key) and key not in core.hidden[tier.tier] for tier in world.asked)


@dataclass
class Model:
    """What was asked for, in order."""

    world: World
    born: dict[Client, int] = field(default_factory=dict)
    hints: dict[Client, CacheHints] = field(default_factory=dict)
    ended: dict[Client, float] = field(default_factory=dict)
    deleted: dict[BlockKey, int] = field(default_factory=dict)
    pinned: dict[str, dict[tuple[TierId, BlockKey], Any]] = field(default_factory=dict)
    events: int = 0

    def open(self, tokens: list[int], decode: int, salt: str, hints: CacheHints) -> None:
        self.events += 1
        client = self.world.open(tokens, decode, salt, hints)
        self.born[client], self.hints[client] = self.events, hints

    def delete(self, tokens: list[int], salt: str) -> None:
        self.events += 1
        self.world.cache.control.delete(tokens, salt)
        self.deleted.update((key, self.events) for key in keys_of(self.world.setup.layout, tokens, salt))

    def pin(self, tokens: list[int], salt: str, ttl_s: float) -> None:
        cache = self.world.cache
        try:
            view = cache.control.pin(tokens, salt, ttl_s)
        except (CacheLimitError, NotCachedError):
            return
        pin = cache.control.pins.get(view.pin)
        assert pin is not None
        self.pinned[view.pin] = {
            (tier.tier, key): place.slot
            for tier in cache.core.owned()
            for key in pin.keys
            if (place := cache.core.directory.place(key, tier.tier)) is not None and place.ready
        }

    def check(self) -> None:
        world, now = self.world, self.world.clock.now
        world.cache.control.tick()
        for client in world.finished:
            self.ended.setdefault(client, now)
        by_key: defaultdict[BlockKey, list[Client]] = defaultdict(list)
        for client in self.born:
            for key in keys_of(world.setup.layout, client.tokens, client.salt):
                by_key[key].append(client)
        for key, clients in by_key.items():
            alive = [client for client in clients if self.born[client] > self.deleted.get(key, 0)]
            if not any(self._stands_for_it(client) for client in alive):
                assert not is_findable(world, key), f"{key} can be found: {[(c.name, self.hints[c]) for c in clients]}"
        timed = {key for key, clients in by_key.items() if any(self.hints[c].ttl_s is not None for c in clients)}
        for name, places in self.pinned.items():
            pin = world.cache.control.pins.get(name)
            for (tier, key), slot in places.items() if pin is not None else ():
                if tier in pin.leases and key not in timed:
                    place = world.cache.core.directory.place(key, tier)
                    assert place is not None, f"{name}: {key} is gone from {tier}"
                    assert place.slot == slot, f"{name}: {key} was moved in {tier}"
        for tier in world.cache.core.owned():
            most = int(world.cache.core.config.pinned_share * tier.pool.capacity)
            assert len(world.cache.control.pins.held(tier.tier)) <= most

    def _stands_for_it(self, client: Client) -> bool:
        hints = self.hints[client]
        if hints.no_store:
            return False
        ended = self.ended.get(client)
        return hints.ttl_s is None or ended is None or self.world.clock.now < ended + hints.ttl_s


class ControlMachine(RuleBasedStateMachine):
    """Honest movers, late ones too; requests with all hints; pins and deletions at any moment."""

    @initialize(name=st.sampled_from(sorted(SETUPS)), deletes=st.sampled_from((True, None, False)))
    def begin(self, name: str, deletes: bool | None) -> None:
        self.world = World(SETUPS[name])
        self.model = Model(self.world)
        for tier in self.world.asked:
            tier.deletes = deletes

    @precondition(lambda self: len(self.world.clients) < 6)
    @rule(
        family=st.integers(0, 1),
        shared=st.sampled_from((56, 40, 24, 8)),
        length=st.integers(5, MAX_PROMPT),
        decode=st.sampled_from((0, 3, MAX_DECODE)),
        salt=st.sampled_from(("", "", "salt")),
        hints=st.sampled_from((PLAIN, PLAIN, NO_STORE, SHORT, SPENT, CacheHints(expect_return=True))),
    )
    def open(self, family: int, shared: int, length: int, decode: int, salt: str, hints: CacheHints) -> None:
        self.model.open(prompt(family, shared, length, length % 3), decode, salt, hints)

    @precondition(lambda self: self.world.in_flight is None)
    @rule(chunks=st.lists(st.sampled_from((100, 8, 3)), min_size=1, max_size=3))
    def plan(self, chunks: list[int]) -> None:
        self.world.plan(chunks)

    @precondition(lambda self: self.world.in_flight is not None)
    @rule()
    def apply(self) -> None:
        self.world.apply()

    @precondition(lambda self: self.world.in_flight is None)
    @rule()
    def step(self) -> None:
        self.world.plan()
        for errand in list(self.world.worker.open_errands()):
            self.world.worker.report(errand)
        self.world.apply()

    @precondition(lambda self: self.world.worker.open_errands())
    @rule(index=INDEX, says_so=st.booleans())
    def move(self, index: int, says_so: bool) -> None:
        errands = self.world.worker.open_errands()
        errand = errands[index % len(errands)]
        if says_so:
            self.world.worker.report(errand)
        else:
            self.world.worker.move(errand)

    @precondition(lambda self: self.world.clients)
    @rule(index=INDEX)
    def abort(self, index: int) -> None:
        clients = list(self.world.clients.values())
        self.world.close(clients[index % len(clients)])

    @precondition(lambda self: self.world.in_flight is None and self.world.running)
    @rule(index=INDEX)
    def preempt(self, index: int) -> None:
        self.world.preempt(self.world.running[index % len(self.world.running)])

    @precondition(lambda self: not self.world.worker.errands)
    @rule(seconds=st.sampled_from((0.5, 2.0, 4.0)))
    def wait(self, seconds: float) -> None:
        self.world.clock.now += seconds

    @precondition(lambda self: self.model.born)
    @rule(index=INDEX, cut=st.sampled_from((0, 0, 7, 20)))
    def delete(self, index: int, cut: int) -> None:
        client = self._client(index)
        self.model.delete(client.tokens[: len(client.tokens) - cut], client.salt)

    @precondition(lambda self: self.model.born)
    @rule(index=INDEX, cut=st.sampled_from((0, 0, 7, 20)), ttl_s=st.sampled_from((2.0, 60.0)))
    def pin(self, index: int, cut: int, ttl_s: float) -> None:
        client = self._client(index)
        self.model.pin(client.tokens[: len(client.tokens) - cut], client.salt, ttl_s)

    @precondition(lambda self: len(self.world.cache.control.pins))
    @rule(index=INDEX)
    def unpin(self, index: int) -> None:
        pins = list(self.world.cache.control.pins)
        self.world.cache.control.unpin(pins[index % len(pins)].pin_id, ["", "salt"])

    @rule(device_only=st.booleans())
    def reset(self, device_only: bool) -> None:
        self.world.cache.core.drop_idle(device_only)

    @invariant()
    def nobody_finds_what_is_gone(self) -> None:
        if hasattr(self, "world"):
            self.world.cache.audit()
            self.model.check()

    def _client(self, index: int) -> Client:
        clients = list(self.model.born)
        return clients[index % len(clients)]

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run()
            self.model.check()
            control = self.world.cache.control
            for pin in list(control.pins):
                control.pins.drop(pin)
            self.world.clock.now += 100
            for _ in range(2):
                control.tick()
            self.model.check()
            assert not control.removal.pending
            if all(tier.deletes is not False for tier in self.world.asked):
                assert not any(self.world.cache.core.hidden.values())
            self.world.check_quiet()


def test_machine() -> None:
    run_state_machine_as_test(ControlMachine, settings=SMALL)


@pytest.mark.slow
def test_long_machine() -> None:
    run_state_machine_as_test(ControlMachine, settings=LARGE)


@pytest.mark.parametrize(
    "broken",
    [pytest.param("no fence against stores", marks=pytest.mark.slow), "what is open is published again"],
)
def test_the_model_bites(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    if broken == "no fence against stores":
        monkeypatch.setattr(Removal, "_stores", lambda *_: set())
    else:
        monkeypatch.setattr("ostinato.hierarchy.residency.Residency.is_erased", lambda *_: False)
    with pytest.raises(AssertionError, match="can be found"):
        run_state_machine_as_test(ControlMachine, settings=BITES)


# Deleting

LAYOUT: Final = plain_layout(Full(), Window(10), State())


def small_world(*asked: str, host: int = 40, **more: Any) -> World:
    return World(Setup(LAYOUT, 80, (("host", host, StoreMode.EAGER),), asked, **more))


def test_a_deleted_prompt_is_found_nowhere_and_others_are_untouched() -> None:
    world = small_world("disk")
    kept, gone = prompt(0, 40, 40, 0), prompt(1, 40, 40, 0)
    for tokens in (kept, gone):
        world.serve(tokens)
    world.run()
    view, deletion = world.cache.control.delete(gone, "")
    assert view.units == 30
    assert view.forgotten[DEVICE] > 0
    assert view.forgotten["host"] > 0
    assert dict(view.tiers) == {"disk": "deleted"}
    assert deletion.is_settled
    assert not any(world.asked[0].holds(key) for key in keys_of(LAYOUT, gone))
    assert world.serve(gone).hits == [0]
    assert world.serve(kept).hits == [36]
    world.run()
    world.check_quiet()


def test_only_the_end_of_a_prompt_is_deleted() -> None:
    world = small_world()
    tokens = prompt(0, 41, 41, 0)
    world.serve(tokens[:21])
    world.serve(tokens)
    world.run()
    world.cache.control.delete(tokens, "", start=20)
    assert world.serve(tokens).hits == [20]


def test_a_tier_that_cannot_delete_hides_what_it_has() -> None:
    world = small_world("store", host=8)
    world.asked[0].deletes = False
    tokens = prompt(0, 40, 40, 0)
    world.serve(tokens)
    world.run()
    view, _ = world.cache.control.delete(tokens, "")
    assert dict(view.tiers) == {"store": "hidden"}
    assert any(world.asked[0].holds(key) for key in keys_of(LAYOUT, tokens))
    assert world.serve(tokens).hits == [0]
    world.cache.core.drop_idle()
    assert world.serve(tokens).hits == [0], "it was computed anew, and not given to the tier again"


def test_deleting_waits_for_a_store_that_is_under_way() -> None:
    world = small_world("disk")
    tokens = prompt(0, 40, 40, 0)
    world.open(tokens)
    for _ in range(4):
        world.plan()
        world.apply()
    stores = [errand for errand in world.worker.open_errands() if errand.order.tier == "disk"]
    assert stores
    view, deletion = world.cache.control.delete(tokens, "")
    assert dict(view.tiers) == {"disk": "pending"}
    for errand in stores:
        assert errand.order.kind is JobKind.STORE
        world.worker.move(errand)
    assert any(world.asked[0].holds(key) for key in keys_of(LAYOUT, tokens))
    assert world.cache.control.inspect(tokens, "").longest_hit == 0  # type: ignore[union-attr]
    world.run()
    assert deletion.is_settled
    assert not any(world.asked[0].holds(key) for key in keys_of(LAYOUT, tokens))


def test_a_running_request_keeps_its_blocks_and_shows_them_to_nobody() -> None:
    world = small_world()
    tokens = prompt(0, 40, 40, 0)
    client = world.open(tokens, decode=8)
    world.plan()
    world.apply()
    held = world.cache.table(client.name).held()
    world.cache.control.delete(tokens, "")
    assert world.cache.table(client.name).held() == held
    world.run()
    assert client.computed == 48
    assert world.serve(tokens).hits == [0]


# Pins


def test_a_pin_outlives_pressure_and_ends_with_its_time() -> None:
    world = small_world(host=8)
    tokens = prompt(0, 41, 41, 0)
    world.serve(tokens)
    view = world.cache.control.pin(tokens, "", 60.0)
    assert view.tokens == 40
    fill(world)
    assert world.serve(tokens).hits == [40]
    world.clock.now += 61
    assert world.cache.control.summary([""]).pins == ()
    fill(world)
    assert world.serve(tokens).hits == [0]
    world.run()
    world.check_quiet()


def fill(world: World) -> None:
    """So many other prompts that nothing else stays."""
    for number in range(10):
        world.serve([100 + number + position % 50 for position in range(60)])
    world.run()


def test_pins_have_a_bounded_share_and_nothing_else_can_be_pinned() -> None:
    world = small_world()
    first, second = prompt(0, 41, 41, 0), prompt(1, 41, 41, 0)
    for tokens in (first, second):
        world.serve(tokens)
    pin = world.cache.control.pin(first, "", 60.0)
    with pytest.raises(CacheLimitError, match="may hold 20 of the 80 blocks of tier device; they hold"):
        world.cache.control.pin(second, "", 60.0)
    assert world.cache.control.pin(first, "", 60.0).tokens == pin.tokens, "the same blocks count once"
    with pytest.raises(NotCachedError):
        world.cache.control.pin([9] * 20, "", 60.0)
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(RequestError, match="ttl"):
            world.cache.control.pin(first, "", bad)
    assert world.cache.control.unpin(pin.pin, [""]).pin == pin.pin
    with pytest.raises(NotCachedError):
        world.cache.control.unpin(pin.pin, [""])


def test_pins_yield_to_a_request_that_could_not_run_otherwise() -> None:
    world = World(Setup(LAYOUT, 46, step_tokens=16))
    tokens = prompt(0, 25, 25, 0)
    world.serve(tokens)
    view = world.cache.control.pin(tokens, "", 1e6)
    client = world.serve([20 + position % 7 for position in range(120)])
    assert client in world.finished
    pins = world.cache.control.summary([""]).pins
    assert [(pin.pin, pin.yielded) for pin in pins] == [(view.pin, True)]
    world.cache.control.unpin(view.pin, [""])
    world.check_quiet()


def test_deleting_ends_pins() -> None:
    world = small_world()
    tokens = prompt(0, 41, 41, 0)
    world.serve(tokens)
    pin = world.cache.control.pin(tokens, "", 60.0)
    view, _ = world.cache.control.delete(tokens, "")
    assert view.unpinned == (pin.pin,)
    assert world.serve(tokens).hits == [0]


def test_key_spaces_do_not_reach_one_another() -> None:
    world = small_world()
    tokens = prompt(0, 41, 41, 0)
    world.serve(tokens, salt="mine")
    pin = world.cache.control.pin(tokens, "mine", 60.0)
    with pytest.raises(NotCachedError):
        world.cache.control.pin(tokens, "theirs", 60.0)
    with pytest.raises(NotCachedError):
        world.cache.control.unpin(pin.pin, ["theirs", ""])
    assert world.cache.control.summary(["theirs"]).pins == ()
    view, _ = world.cache.control.delete(tokens, "theirs")
    assert not any(view.forgotten.values())
    seen = world.cache.control.inspect(tokens, "theirs")
    assert seen is not None
    assert (seen.longest_hit, seen.resumable, seen.pins) == (0, (), ())
    assert world.serve(tokens, salt="mine").hits == [40]


# Inspecting


@pytest.mark.parametrize("seed", range(20))
def test_an_inspection_says_where_prompts_resume(seed: int) -> None:
    """Every cut it names is taken by a prompt that parts there, and no other cut is."""
    rng = random.Random(seed)
    world = World(Setup(LAYOUT, 80, (("host", 12, StoreMode.EAGER),), ("disk",)))
    tokens = prompt(0, 56, 56, 0)
    for _ in range(6):
        world.serve(tokens[: rng.randint(5, 56)] + [7] * rng.randint(0, 20))
    world.run()
    if rng.random() < 0.5:
        world.cache.core.drop_idle(device_only=True)
    seen = world.cache.control.inspect(tokens, "")
    assert seen is not None
    cuts = {cut for first, last in seen.resumable for cut in range(first, last + 1, seen.unit)}
    assert seen.longest_hit == max(cuts, default=0)
    assert sum(seen.by_tier.values()) == seen.longest_hit
    for group in seen.groups:
        for spans in group.cached.values():
            assert all(low % group.unit == 0 and low < high <= 56 for low, high in spans)
    cut = rng.choice(range(4, 53, 4))
    resumed = world.serve([*tokens[:cut], 8]).hits[-1]
    assert resumed == max((other for other in cuts if other <= cut), default=0)


def test_an_inspection_waits_for_tiers_only_when_it_is_patient() -> None:
    world = small_world("disk")
    world.serve(prompt(0, 40, 40, 0))
    world.run()
    world.asked[0].mood = "silent"
    assert world.cache.control.inspect(prompt(0, 40, 40, 0), "") is None
    seen = world.cache.control.inspect(prompt(0, 40, 40, 0), "", patient=False)
    assert seen is not None
    assert seen.silent == ("disk",)
    assert seen.longest_hit == 40


# Hints


def test_what_is_not_stored_leaves_no_trace_and_may_read() -> None:
    world = small_world("disk")
    tokens = prompt(0, 41, 41, 0)
    world.serve(tokens, hints=NO_STORE)
    world.run()
    assert not len(world.cache.core.directory)
    assert not world.asked[0].stored
    world.serve(tokens)
    client = world.serve([*tokens, *range(10, 30)], hints=NO_STORE)
    assert client.hits == [40]
    seen = world.cache.control.inspect([*tokens, *range(10, 30)], "")
    assert seen is not None
    assert seen.longest_hit == 40


def test_what_has_a_time_ends_with_it_unless_others_use_it() -> None:
    world = small_world("disk")
    mine, shared = prompt(0, 41, 41, 0), prompt(1, 41, 41, 0)
    for tokens in (mine, shared):
        world.serve(tokens, hints=SHORT)
    world.run()
    assert not world.asked[0].stored, "a disk outlives the process, and with it the clock"
    assert world.serve(shared).hits == [40]
    world.run()
    world.clock.now += 4
    assert world.serve(mine).hits == [0]
    assert world.serve(shared).hits == [40]
    assert world.asked[0].stored


def test_what_is_done_goes_first() -> None:
    world = World(Setup(LAYOUT, 80))
    old, done = prompt(0, 41, 41, 0), prompt(1, 41, 41, 0)
    world.serve(old)
    world.serve(done, hints=SPENT)
    for number in range(2):
        world.serve([100 + number] * 60)
    assert world.serve(done).hits == [0]
    assert world.serve(old).hits == [40]


def test_what_returns_is_kept_longer() -> None:
    world = World(Setup(LAYOUT, 80))
    first, second = prompt(0, 41, 41, 0), prompt(1, 41, 41, 0)
    world.serve(first, hints=CacheHints(expect_return=True))
    world.serve(second)
    for number in range(4):
        world.serve([100 + number] * 60)
    assert world.serve(first).hits == [40]
    assert world.serve(second).hits == [0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"no_store": True, "ttl_s": 5.0},
        {"no_store": True, "end_of_use": True},
        {"end_of_use": True, "expect_return": True},
        {"ttl_s": 0.0},
        {"ttl_s": float("nan")},
        {"ttl_s": 1e9},
    ],
    ids=str,
)
def test_hints_that_contradict_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        CacheHints(**wrong)
