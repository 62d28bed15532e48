"""The longest hit against brute force over all cuts, with requirements taken from the attention mask."""

from __future__ import annotations

import math
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from core.builders import PAGE_BYTES, Shape, make_group, random_shape
from core.masks import needed_units
from ostinato.cache.directory import Directory, Place
from ostinato.cache.keys import BlockKey, KeyChain
from ostinato.cache.kinds import Chunked, Full, State, Window
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.cache.match import longest_hit
from ostinato.cache.presence import Presence, tokens_by_tier
from ostinato.ids import DEVICE, HOLE, GroupId, JobId, Ordinal, SlotId, TierId

TIERS = (DEVICE, TierId("host"), TierId("far"), TierId("disk"), TierId("store"))
Held = dict[tuple[int, int], set[TierId]]
"""Group, ordinal -> the tiers that hold the unit."""


def granularity(groups: list[GroupSpec]) -> int:
    return math.lcm(*(spec.hit_granularity for spec in groups))


def brute_force(groups: list[GroupSpec], cap: int, step: int, held: Held) -> int:
    for n in range(cap // step * step, 0, -step):
        if all((g, m) in held for g, spec in enumerate(groups) for m in needed_units(spec.kind, n, spec.hash_unit)):
            return n
    return 0


def random_groups(rng: random.Random) -> list[GroupSpec]:
    while True:
        groups = [make_group(index, random_shape(rng)) for index in range(rng.randint(1, 4))]
        if granularity(groups) <= 24:
            return groups


def random_held(rng: random.Random, groups: list[GroupSpec], cap: int, tiers: int = 3) -> Held:
    """Each unit in a random subset of the tiers; long runs are likely, so that long hits are."""
    held: Held = {}
    for index, spec in enumerate(groups):
        density = rng.choice((0.3, 0.6, 0.9, 0.97, 1.0))
        for ordinal in range(cap // spec.hash_unit + 1):
            where = {tier for tier in TIERS[:tiers] if rng.random() < 1 - (1 - density) ** (1 / tiers)}
            if where or density == 1.0:
                held[index, ordinal] = where or {TIERS[0]}
    return held


def is_mixed(groups: list[GroupSpec]) -> bool:
    units = {(spec.hash_unit, spec.page_units, spec.hit_granularity) for spec in groups}
    return len(units) == len(groups) > 1


def test_longest_hit_equals_brute_force() -> None:
    rng, mixed, kinds, hits = random.Random(20), 0, Counter[type](), 0
    cases = 20_000
    for _ in range(cases):
        groups = random_groups(rng)
        step, cap = granularity(groups), rng.randint(0, 96)
        held = random_held(rng, groups, cap)
        kinds.update(type(spec.kind) for spec in groups)
        mixed += is_mixed(groups)
        found = longest_hit(groups, cap, step, lambda group, ordinal, held=held: (group, ordinal) in held)
        assert found == brute_force(groups, cap, step, held), (groups, cap, held)
        hits += found > 0
    assert mixed >= cases / 2, f"{mixed} of {cases} cases have groups with different units"
    assert hits >= cases / 10
    assert min(kinds[kind] for kind in (Full, Window, Chunked, State)) > cases / 4


SHAPES = st.builds(lambda seed: random_shape(random.Random(seed)), st.integers(0, 2**32))


@given(st.lists(SHAPES, min_size=1, max_size=4), st.integers(0, 60), st.integers(0, 2**32))
def test_longest_hit_shrinks(shapes: list[Shape], cap: int, seed: int) -> None:
    groups = [make_group(index, shape) for index, shape in enumerate(shapes)]
    held = random_held(random.Random(seed), groups, cap)
    step = granularity(groups)
    assert longest_hit(groups, cap, step, lambda g, m: (g, m) in held) == brute_force(groups, cap, step, held)


def test_each_unit_is_asked_once() -> None:
    """Sinks aside: where a window leaves a gap behind its sinks, they are asked about once a pass."""
    rng = random.Random(3)
    for _ in range(3000):
        groups = random_groups(rng)
        groups = [spec for spec in groups if not getattr(spec.kind, "sinks", 0)] or groups[:1]
        if getattr(groups[0].kind, "sinks", 0):
            continue
        cap, step = rng.randint(0, 200), granularity(groups)
        held, asked = random_held(rng, groups, cap), Counter[tuple[int, int]]()

        def present(group: int, ordinal: int, held: Held = held, asked: Counter[tuple[int, int]] = asked) -> bool:
            asked[group, ordinal] += 1
            return (group, ordinal) in held

        longest_hit(groups, cap, step, present)
        assert not asked or max(asked.values()) == 1, (groups, cap, asked.most_common(3))


def test_questions_are_linear_with_sinks() -> None:
    groups = [make_group(0, (Window(512, 4), 16, 1, 16)), make_group(1, (Full(), 16, 1, 16))]
    units, asked = 4096, 0

    def present(group: int, ordinal: int) -> bool:
        nonlocal asked
        asked += 1
        return group == 0

    assert longest_hit(groups, units * 16, 16, present) == 0
    assert asked <= 3 * units + 64


Answers = dict[TierId, dict[BlockKey, bool]]


def make_presence(
    rng: random.Random, answers: Answers | None = None
) -> tuple[Presence, CacheLayout, Held, int, list[TierId], Answers]:
    """Units spread over a directory of three owned tiers and the answers of two asked ones.

    ``answers``: what was said so far, instead of everything; the truth comes back as the last value.
    """
    groups = random_groups(rng)
    layout, cap = CacheLayout(tuple(groups), PAGE_BYTES), rng.randint(1, 90)
    chain = KeyChain(b"seed", layout.base_unit)
    chain.update([rng.randrange(100) for _ in range(cap)])
    held = random_held(rng, groups, cap, len(TIERS))
    held = {(g, m): where for (g, m), where in held.items() if (m + 1) * groups[g].hash_unit <= cap}
    directory = Directory()
    truth: Answers = {
        tier: {
            BlockKey(spec.group, chain.digest(spec.hash_unit, m)): False
            for spec in groups
            for m in range(cap // spec.hash_unit)
        }
        for tier in TIERS[3:]
    }
    for slot, ((g, m), where) in enumerate(held.items()):
        key = BlockKey(GroupId(g), chain.digest(groups[g].hash_unit, m))
        for tier in where:
            if tier in truth:
                truth[tier][key] = True
            else:
                writing = JobId(1) if tier == DEVICE and rng.random() < 0.2 else None
                directory.write(key, Ordinal(m), tier, Place(SlotId(slot), 0, writing), False)
    known = truth if answers is None else answers
    return Presence(directory, layout, chain, TIERS[1:3], known), layout, held, cap, list(TIERS), truth


def test_presence_merges_tiers_block_by_block() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        presence, layout, held, cap, order, _ = make_presence(rng)
        plan = presence.plan(cap)
        assert plan.tokens == brute_force(list(layout.groups), cap, layout.granularity, held)
        for spec, sources in zip(layout.groups, plan.sources, strict=True):
            assert set(sources) == needed_units(spec.kind, plan.tokens, spec.hash_unit)
            for ordinal, source in sources.items():
                fastest = min(held[spec.group, ordinal], key=order.index)
                assert source.tier == fastest
                assert (source.slot == HOLE) == (fastest in TIERS[3:])
                assert source.job is None or fastest == DEVICE
        assert sum(tokens_by_tier(layout, plan, order).values()) == plan.tokens


def test_asking_round_by_round_finds_the_same_hit() -> None:
    """Only what a hit would load is asked about, and in the end nothing that matters is unknown."""
    for seed in range(1500):
        answers: Answers = {tier: {} for tier in TIERS[3:]}
        rounds = 0
        while True:
            presence, layout, held, cap, _, truth = make_presence(random.Random(seed), answers)
            unknown = presence.unknown(cap)
            if not unknown:
                break
            rounds += 1
            for tier, known in answers.items():
                fresh = [key for key in unknown if key not in known]
                known.update((key, truth[tier][key]) for key in fresh)
        assert presence.plan(cap).tokens == brute_force(list(layout.groups), cap, layout.granularity, held)
        assert rounds <= 2 + cap // layout.granularity


def test_a_long_prompt_takes_few_rounds_and_no_needless_question() -> None:
    """Full attention, a window and recurrent state; the store has a prefix, one window and three checkpoints."""
    layout = CacheLayout(
        (make_group(0, (Full(), 4, 1, 4)), make_group(1, (Window(9), 4, 1, 4)), make_group(2, (State(), 4, 1, 4))),
        PAGE_BYTES,
    )
    chain, tier = KeyChain(b"s", 4), TierId("store")
    chain.update(range(4000))

    def key(group: int, ordinal: int) -> BlockKey:
        return BlockKey(GroupId(group), chain.digest(4, ordinal))

    stored = {key(0, m) for m in range(600)} | {key(1, m) for m in range(500)} | {key(2, m) for m in (99, 399, 499)}
    answers: dict[BlockKey, bool] = {}
    questions = []
    while unknown := Presence(Directory(), layout, chain, (), {tier: answers}).unknown(3999):
        questions.append(len(unknown))
        answers.update((name, name in stored) for name in unknown)
    assert Presence(Directory(), layout, chain, (), {tier: answers}).plan(3999).tokens == 2000
    assert len(questions) <= 5
    assert sum(name.group == 1 for name in answers) < 20


def test_a_copy_that_is_being_written_below_is_not_offered() -> None:
    layout = CacheLayout((make_group(0, (Full(), 4, 1, 4)),), PAGE_BYTES)
    chain, directory = KeyChain(b"s", 4), Directory()
    chain.update(range(4))
    key = BlockKey(GroupId(0), chain.digest(4, 0))
    directory.write(key, Ordinal(0), TierId("host"), Place(SlotId(0), 0, JobId(1)), False)
    assert Presence(directory, layout, chain, [TierId("host")]).plan(4).tokens == 0
