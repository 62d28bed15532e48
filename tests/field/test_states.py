"""Reports about recurrent state and mixed geometry: a hit is what all groups have, each in units of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from field.rig import Rig, expected_tokens, fake_rig, layout_of, shaped
from field.scripted import LOAD, ScriptedTier, kept
from ostinato.cache.kinds import Chunked, Full, State, Window, keeps_checkpoints
from ostinato.cache.layout import CacheLayout, LayerSpec, build_layout
from ostinato.connectors.api import Ownership
from ostinato.hierarchy.checkpoints import grid_step
from ostinato.ids import HOLE, RequestId
from ostinato.scheduler.plan import StepPlan, StepResult

STATES = layout_of(Full(), *[State()] * 5)
HYBRID = layout_of(Full(), Window(32), State(), State())
BIG_STATE = build_layout(
    [LayerSpec(0, Full(), (512, 512)), *(LayerSpec(index, State(), (64 * 1024,)) for index in (1, 2))]
)
"""A state has 64 times the bytes of a token of attention, so a page of attention has many units."""

Make = Callable[[], ScriptedTier] | None
below = pytest.mark.parametrize("make", [None, ScriptedTier, kept], ids=["device", "host", "disk"])


def session(number: int, length: int) -> list[int]:
    return [number * 10_000 + position for position in range(length)]


def rig_of(layout: CacheLayout, make: Make, pages: int = 600, **options: Any) -> Rig:
    return fake_rig(layout, pages, [make()] if make else [], **options)


def ask(rig: Rig, make: Make, tokens: Sequence[int], count: int = 1) -> tuple[int, list[int]]:
    """Tokens that were reused, and the answer, which is right; with a tier below, the device forgets everything."""
    output = rig.serve(tokens, count)
    answer = output.outputs[0].token_ids
    assert answer == expected_tokens(tokens, count)
    if make is not None:
        assert set(output.cached_by_tier) <= {"host", "disk"}
        rig.evict_device()
    return output.cached_tokens, list(answer)


def hits(rig: Rig, make: Make, *prompts: Sequence[int]) -> list[int]:
    return [ask(rig, make, tokens)[0] for tokens in prompts]


# ---------------------------------------------------------------------------------------- a hit is what all groups have


class AttentionOnly(ScriptedTier):
    """A connector that filters out the layers with recurrent state, in what it takes, and perhaps in what it says."""

    def __init__(self, layout: CacheLayout, says_all: bool) -> None:
        super().__init__("disk", Ownership.KEPT)
        self.says_all = says_all
        self._states = {spec.group for spec in layout.groups if keeps_checkpoints(spec.kind)}

    def offer(self, keys: Sequence[Any]) -> Sequence[bool]:
        return [key.group not in self._states and key not in self.stored for key in keys]

    def probe(self, keys: Sequence[Any]) -> Sequence[bool]:
        return [key in self.stored or (self.says_all and key.group in self._states) for key in keys]


@pytest.mark.parametrize("layout", [STATES, HYBRID, BIG_STATE], ids=["states", "hybrid", "big state"])
@pytest.mark.parametrize("says_all", [False, True])
def test_w04_attention_alone_is_no_hit(layout: CacheLayout, says_all: bool) -> None:
    """W04, LMCache PR#2863: a connector holds the attention groups only, and reports the full count.

    Right: only tokens covered in all groups count; the recurrent computation is never skipped.
    """
    tier = AttentionOnly(layout, says_all)
    rig = fake_rig(layout, 200, [tier])
    for _ in range(4):
        output = rig.serve(session(1, 200), 5)
        assert output.outputs[0].token_ids == expected_tokens(session(1, 200), 5)
        assert output.cached_tokens == 0
        rig.evict_device()
    assert tier.stored
    assert says_all == bool(tier.refutations)
    rig.check_quiet()


@pytest.mark.parametrize("mood", ["honest", "liar"])
def test_w04_the_hit_is_clipped_to_the_states_that_exist(mood: str) -> None:
    """W04: attention for 192 tokens, states for 128 at most.  Right: 128, or less when the tier lies about the rest."""
    tier = kept()
    rig = fake_rig(HYBRID, 300, [tier])
    rig.serve(session(1, 129))
    rig.serve(session(1, 193))
    states = {spec.group for spec in HYBRID.groups if keeps_checkpoints(spec.kind)}
    orders = [move for order in tier.mover.submitted for move in order.moves]
    for move in orders:
        if move.key.group == max(states) and move.ordinal >= 8:
            tier.stored.pop(move.key, None)
    tier.mood = mood
    rig.evict_device()
    output = rig.serve(session(1, 200), 4)
    assert output.outputs[0].token_ids == expected_tokens(session(1, 200), 4)
    assert output.cached_tokens == (128 if mood == "honest" else 0), "after two failures a tier is not asked again"
    rig.check_quiet()


@pytest.mark.parametrize("make", [ScriptedTier, kept])
def test_w09_one_common_boundary_for_all_windows(make: Callable[[], ScriptedTier]) -> None:
    """W09, TensorRT-LLM PR#10875: windows of 16, 32 and all, whose caches hold 4, 8 and 12 blocks of a prefix.

    Right: the reused length is the common valid boundary, 4 blocks, set once.
    """
    for order in itertools.permutations([(Window(16), 4), (Window(32), 8), (Full(), 12)]):
        layout = layout_of(*(kind for kind, _ in order))
        tier = make()
        rig = fake_rig(layout, 100, [tier])
        tier.mover.broken = {(group, m) for group, (_, blocks) in enumerate(order) for m in range(blocks, 12)}
        rig.serve(session(1, 192))
        rig.evict_device()
        tier.mover.broken = set()
        name = rig.add(session(1, 192), 4)
        rig.run(until=lambda rig=rig, name=name: rig.phase(name) == "running")
        assert {sum(request.hit.tokens for request in rig.cache.requests.values())} == {64}
        rig.run()
        output = rig.outputs[name]
        assert output.outputs[0].token_ids == expected_tokens(session(1, 192), 4)
        assert output.cached_tokens == 64
        assert output.blocks_by_group == tuple({Window(16): 1, Window(32): 2}.get(kind, 4) for kind, _ in order)
        rig.check_quiet()


# -------------------------------------------------------------------------------------------------- units of each group


SIZES = [(16, 64, 1024), (1024, 64, 16), (64, 1024, 16)]


@below
@pytest.mark.parametrize("units", SIZES)
@pytest.mark.parametrize("local", [Window(100), Chunked(256)], ids=["window", "chunked"])
def test_w15_each_group_divides_by_its_own_unit(units: tuple[int, int, int], local: Any, make: Make) -> None:
    """W15, vllm#55600: position to column with a global block size that another group had lowered.

    Three groups with blocks of 16, 64 and 1024 tokens.  Right: each uses its own, and no index leaves its row.
    """
    kinds = (Full(), local, State())
    layout = shaped(*((kind, unit, 1) for kind, unit in zip(kinds, units, strict=True)))
    rig = rig_of(layout, make, 400, step_tokens=256)
    tail = session(9, 40)
    assert hits(rig, make, session(1, 1100), session(1, 1100), [*session(1, 1024), *tail]) == [0, 1024, 1024]
    name = rig.add([*session(1, 1024), *tail], 3)
    rig.run(until=lambda: rig.phase(name) == "running")
    rows = rig.cache.table(RequestId(name)).rows
    assert all(len(row) == -(-1064 // unit) for row, unit in zip(rows, units, strict=True))
    rig.run()
    rig.check_quiet()


@below
@pytest.mark.parametrize("page_units", [(1, 4), (64, 4), (4, 64)])
def test_w15_pages_of_many_units(page_units: tuple[int, int], make: Make) -> None:
    """W15 with one hash unit and pages of 16, 64 and 1024 tokens; the hit of 1024 tokens ends where it should."""
    full, window = page_units
    layout = shaped((Full(), 16, full), (Window(100), 16, window), (State(), 16, 1))
    rig = rig_of(layout, make, 400, step_tokens=200)
    prompts = [session(1, 1025), session(1, 1025), [*session(1, 1000), 5], [*session(1, 1000), 6]]
    parted = 992 if make is None else 0  # only marked checkpoints go down, and where prompts part, there is one then
    assert hits(rig, make, *prompts) == [0, 1024, parted, 992]
    rig.check_quiet()


@below
def test_h10_a_hit_below_a_coarse_attention_page(make: Make) -> None:
    """H10, vllm PR#57216: full attention in chunks of 64, state at each 16, a prompt of 200.

    Right: 192 tokens are hit, from below too, whether 64 is the page or the hash unit of attention.
    """
    for full in ((Full(), 16, 4), (Full(), 64, 1)):
        rig = rig_of(shaped(full, (State(), 16, 1)), make)
        assert hits(rig, make, *[session(1, 200)] * 3) == [0, 192, 192]
        rig.check_quiet()


@below
def test_h04_a_short_prefix_beside_a_big_state(make: Make) -> None:
    """H04, vllm#40696: prompts below one (inflated) block never hit.  State = 64 times a token of attention.

    Right: a shared prefix of 48 tokens is hit, whole, from the second request on; hits are 16 tokens apart.
    """
    assert max(spec.page_tokens for spec in BIG_STATE.groups) >= 4 * 16
    assert BIG_STATE.granularity == 16
    rig = rig_of(BIG_STATE, make)
    assert hits(rig, make, *([*session(1, 48), *session(n, 20)] for n in range(2, 6))) == [0, 48, 48, 48]
    for length in (17, 33, 49):
        rig = rig_of(BIG_STATE, make)
        assert hits(rig, make, *[session(7, length)] * 2) == [0, length - 1]
    rig.check_quiet()


@below
def test_h05_a_context_shorter_than_a_page(make: Make) -> None:
    """H05, vllm#48401: the cache is silently inert when max_model_len (32) is less than the block size (64).

    Right: the page's size is no limit of a hit; a prompt of 31 tokens is hit like any other.
    """
    assert max(spec.page_tokens for spec in BIG_STATE.groups) >= 64
    rig = rig_of(BIG_STATE, make, 2 * BIG_STATE.peak_pages(32, 32), step_tokens=32)
    assert hits(rig, make, *[session(1, 31)] * 3) == [0, 16, 16]
    rig.check_quiet()


# ------------------------------------------------------------------------------------------------ where checkpoints are


@pytest.mark.parametrize("layout", [STATES, HYBRID], ids=["states", "hybrid"])
@pytest.mark.parametrize("step_tokens", [48, 512])
@pytest.mark.parametrize("shared", [256, 240])
def test_h02_a_shared_prefix_is_hit_at_its_second_sighting(layout: CacheLayout, step_tokens: int, shared: int) -> None:
    """H02, vllm#45238: system prompt of 256 tokens and 5 unique tails of 256.  Right: [0, 256, 256, 256, 256]."""
    rig = fake_rig(layout, 600, step_tokens=step_tokens)
    prompts = [session(0, shared) + session(number, 256) for number in range(1, 6)]
    assert hits(rig, None, *prompts) == [0] + [shared] * 4
    rig.check_quiet()


@pytest.mark.parametrize("make", [ScriptedTier, kept])
@pytest.mark.parametrize("layout", [STATES, HYBRID], ids=["states", "hybrid"])
def test_h02_a_shared_prefix_comes_back_from_below(layout: CacheLayout, make: Callable[[], ScriptedTier]) -> None:
    """H02 where the device has evicted all of it: from the first request that found it on, it is in the tier below."""
    rig = rig_of(layout, make)
    prompts = [session(0, 256) + session(number, 256) for number in range(1, 6)]
    assert hits(rig, None, *prompts[:2]) == [0, 256]
    rig.evict_device()
    assert hits(rig, make, *prompts[2:]) == [256] * 3
    rig.check_quiet()


@below
def test_h03_a_growing_chat_finds_its_answers(make: Make) -> None:
    """H03, vllm#50551: 300 tokens, 100 decoded, 40 new, 4 turns.  Right: [0, 400, 528, 672] of [300, 440, 580, 720].

    Decoded state is kept as well as prefilled one, and comes back from every tier.
    """
    rig, chat, found, prompts = rig_of(HYBRID, make), session(0, 300), [], []
    for turn in range(4):
        prompts.append(len(chat))
        hit, answer = ask(rig, make, chat, 101)
        found.append(hit)
        chat = [*chat, *answer[:100], *session(50 + turn, 40)]
    assert prompts == [300, 440, 580, 720]
    assert found == [0, 400, 528, 672]
    rig.check_quiet()


@pytest.mark.parametrize("length", [63, 64, 65, 67, 68, 69, 333, 700, 1501])
def test_h12_a_turn_whose_last_tokens_were_replaced(length: int) -> None:
    """H12, llama.cpp#20225: the next turn is this one with its last 4 tokens replaced, and 50 new.

    Right: computed again are at most one interval of checkpoints, and what is new.
    """
    rig = fake_rig(HYBRID, 1000, step_tokens=256)
    turn = session(0, length)
    for number in range(1, 4):
        ask(rig, None, turn, 3)
        kept_part = len(turn) - 4
        turn = turn[:-4] + session(number, 54)
        hit, _ = ask(rig, None, turn)
        assert kept_part - hit < grid_step(kept_part // 16) * 16, (length, number)
    rig.check_quiet()


# ---------------------------------------------------------------------------------------- states are restored, not used


class Watched:
    """A worker that notes which state pages are read and which are written."""

    def __init__(self, rig: Rig) -> None:
        self.read: list[int] = []
        self.written: list[int] = []
        self._rig = rig
        self._execute = rig.engine.executor.execute
        rig.engine.executor.execute = self.execute  # type: ignore[method-assign]

    def execute(self, plan: StepPlan) -> StepResult:
        for sequence in plan.sequences:
            assert sequence.state is not None
            self.read += [slot for slot in sequence.state.read if slot != HOLE]
            written = [slot for _, pages in sequence.state.stops for slot in pages if slot != HOLE]
            self.written += written
            for slot in written:
                assert not self._rig.cache.core.directory.contents("device", slot), "a checkpoint is written to"
        return self._execute(plan)


@below
@pytest.mark.parametrize("length", [64, 70])
def test_w13_a_checkpoint_gives_the_same_five_times(make: Make, length: int) -> None:
    """W13, llama.cpp#21769: checkpoint, decode 20 tokens, restore, decode the same 20, five times.

    Right: five equal runs, equal to one without checkpoints; the page that is restored from is never written.
    """
    rig = rig_of(HYBRID, make)
    ask(rig, make, session(1, length), 20)
    for _ in range(5):
        watched = Watched(rig)
        assert ask(rig, make, session(1, length), 20)[0] == (length - 1) // 16 * 16
        restored = set(watched.read) - set(watched.written)
        assert len(restored) >= 2, "a page per group of states was read and not written"
    rig.check_quiet()


@below
@pytest.mark.parametrize("step_tokens", [40, 64, 512])
@pytest.mark.parametrize("warm", [False, True])
def test_w16_the_same_prompt_twice_in_one_batch(step_tokens: int, warm: bool, make: Make) -> None:
    """W16, vllm#57266: two equal prompts in one batch crash or differ.  Right: equal answers, equal to a solo run."""
    rig = rig_of(HYBRID, make, step_tokens=step_tokens)
    if warm:
        ask(rig, make, session(1, 100), 2)
    names = [rig.add(session(1, 100), 20) for _ in range(2)]
    rig.run()
    for name in names:
        assert rig.outputs[name].outputs[0].token_ids == expected_tokens(session(1, 100), 20)
        assert not warm or rig.outputs[name].cached_tokens == 96
    if warm and make is not None:
        tier = next(iter(rig.engine.executor.movers.values()))  # type: ignore[attr-defined]
        assert len(tier.orders(LOAD)) == 1, "one load serves both"
    rig.check_quiet()
