"""Reports of lost hits: what is cached is found, for every session and every request, and look-ups damage nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from field.rig import DEVICE, Rig, expected_tokens, fake_rig, layout_of
from field.scripted import LOAD, ScriptedTier, kept
from ostinato.cache.kinds import Full, Window
from ostinato.ids import RequestId

GEMMA = layout_of(Full(), *[Window(64)] * 5)
SMALL = layout_of(Full(), Window(32), unit=16)


def session(number: int, length: int = 512) -> list[int]:
    return [number * 10_000 + position for position in range(length)]


def rounds(rig: Rig, sessions: int, suffix: int) -> list[list[int]]:
    """Cached tokens of each session, three times round."""
    return [
        [rig.serve(session(number) + [7] * (suffix if turn else 0)).cached_tokens for number in range(sessions)]
        for turn in range(3)
    ]


def test_h01_ten_sessions_round_robin_all_hit() -> None:
    """vllm#48435: ten sessions of 57 boundary pages each fit 600 pages, so none of them is ever computed again."""
    first, *others = rounds(fake_rig(GEMMA, 600), 10, suffix=1)
    assert first == [0] * 10
    assert others == [[512] * 10] * 2


def test_h01_the_same_prompt_again_resumes_one_unit_before_its_end() -> None:
    """The last token is always computed, so the cut before it has to be kept as well."""
    assert rounds(fake_rig(GEMMA, 600), 10, suffix=0)[1:] == [[496] * 10] * 2


def test_h01_a_session_too_many_degrades_without_a_cliff() -> None:
    """Beyond what fits, some sessions miss; reuse does not fall to zero for everybody."""
    rig = fake_rig(GEMMA, 600)
    for turn in range(4):
        hits = [rig.serve([*session(number), 7]).cached_tokens for number in range(9)]
        hits += [rig.serve([*session(100 + turn), 7]).cached_tokens]
    assert sum(hits) >= 7 * 512


@pytest.mark.parametrize("shared", [256, 240, 208])
def test_h01_a_shared_prefix_is_hit_from_the_second_request_on(shared: int) -> None:
    rig = fake_rig(GEMMA, 600)
    hits = [rig.serve(session(0, shared) + session(number, 512 - shared)).cached_tokens for number in range(1, 4)]
    assert hits == [0, shared, shared]


def test_h01_a_growing_chat_resumes_at_the_end_of_its_last_answer() -> None:
    """Each turn computes its own tokens only (and the unfinished unit at the end of the turn before)."""
    rig, chat, hits = fake_rig(GEMMA, 600), session(0, 370), []
    for _ in range(4):
        output = rig.serve(chat, 36)
        hits.append(output.cached_tokens)
        chat = [*chat, *output.outputs[0].token_ids, *session(50 + len(hits), 100)]
    assert hits == [0, 400, 528, 672]


@pytest.mark.parametrize("make", [None, ScriptedTier, kept])
def test_r02_a_partial_hit_consumes_nothing(make: Callable[[], ScriptedTier] | None) -> None:
    """llama-server: a request that shares half of a stored prompt leaves the stored one cold."""
    rig = fake_rig(SMALL, 200, [make()] if make else [])
    stored, other = session(1, 256), session(1, 128) + session(2, 128)
    rig.serve(stored, 4)
    for tokens, hit in ((other, 128), (stored, 240), (stored[:100], 96), (stored, 240), (other, 240), (stored, 240)):
        if make is not None:
            rig.evict_device()
        output = rig.serve(tokens, 4)
        assert output.cached_tokens == hit
        assert output.outputs[0].token_ids == expected_tokens(tokens, 4)


@pytest.mark.parametrize("count", [2, 8, 32])
@pytest.mark.parametrize("make", [None, ScriptedTier, kept])
def test_r03_all_requests_of_a_step_reuse_one_prefix(make: Callable[[], ScriptedTier] | None, count: int) -> None:
    """llama-server: of two concurrent requests with one cached prefix one reuses it all, the other nothing."""
    tier = make() if make else None
    rig = fake_rig(SMALL, 400, [tier] if tier else [], step_tokens=512)
    prefix = session(1, 256)
    rig.serve(prefix)
    if tier is not None:
        rig.evict_device()
        tier.mover.shut(LOAD)
    names = [rig.add([*prefix, 77, number], 3) for number in range(count)]
    rig.step(2)
    if tier is not None:
        assert {rig.phase(name) for name in names} == {"parked"}
        (order,) = tier.mover.orders(LOAD)
        assert len(order.moves) == 16 + 2
        assert len({move.device_slot for move in order.moves}) == 18
        tier.mover.open(LOAD)
        rig.step(2)
    assert len(held_pages(rig)) == 18 + 2 * count
    rig.run()
    for number, name in enumerate(names):
        assert rig.outputs[name].cached_tokens == 256
        assert rig.outputs[name].outputs[0].token_ids == expected_tokens([*prefix, 77, number], 3)
    assert tier is None or len(tier.mover.orders(LOAD)) == 1
    rig.check_quiet()


def held_pages(rig: Rig) -> set[int]:
    return {slot for lease in rig.pool.leases if lease.owner.startswith("table") for slot in lease.slots}


@pytest.mark.parametrize("count", [2, 8])
def test_r03_when_the_one_load_fails_all_of_them_recover(count: int) -> None:
    tier = ScriptedTier()
    rig = fake_rig(SMALL, 400, [tier], step_tokens=512)
    prefix = session(1, 256)
    rig.serve(prefix)
    rig.evict_device()
    tier.mover.broken = {(0, 5)}
    names = [rig.add([*prefix, number], 2) for number in range(count)]
    rig.run()
    for number, name in enumerate(names):
        assert rig.outputs[name].outputs[0].token_ids == expected_tokens([*prefix, number], 2)
    rig.check_quiet()


@pytest.mark.parametrize("make", [lambda: ScriptedTier(slots=2000), kept])
def test_e01_window_groups_take_window_blocks_and_holes(make: Callable[[], ScriptedTier]) -> None:
    """vllm#25363: an external hit of 4096 tokens takes blocks for the whole prefix in groups that need a window."""
    pages = GEMMA.peak_pages(4097, 16)
    assert pages == 257 + 5 * 6
    tier = make()
    rig = fake_rig(GEMMA, pages, [tier], step_tokens=16)
    rig.serve(session(1, 4096))
    rig.evict_device()
    tier.mover.shut(LOAD)
    name = rig.add([*session(1, 4096), 5])
    rig.step(2)
    full, *windows = rig.cache.table(RequestId(name)).rows
    assert len(full) == 256
    assert -1 not in full
    for row in windows:
        assert row[:252] == [-1] * 252
        assert -1 not in row[252:]
        assert len(row) == 256
    tier.mover.open(LOAD)
    rig.run()
    output = rig.outputs[name]
    assert output.cached_tokens == 4096
    assert output.blocks_by_group == (256, 4, 4, 4, 4, 4)
    assert output.outputs[0].token_ids == expected_tokens([*session(1, 4096), 5], 1)


def full_host(slots: int, eager: bool = True) -> tuple[ScriptedTier, Rig]:
    """A host tier that session 1 fills exactly."""
    tier = ScriptedTier(slots=slots, eager=eager)
    rig = fake_rig(SMALL, 60, [tier])
    rig.serve(session(1, 128))
    rig.evict_device()
    return tier, rig


def test_e02_a_store_between_look_up_and_load_takes_nothing_from_the_hit() -> None:
    """vllm#39702: the host tier is full, and another request's store evicts the blocks that were just looked up."""
    tier, rig = full_host(16)
    host = rig.cache.core.lower[tier.tier].pool
    assert host.available == 16
    assert not host.free_slots
    tier.mover.shut(LOAD)
    first = rig.add([*session(1, 128), 5], 2)
    rig.step()
    assert rig.phase(first) == "parked"
    other = rig.add(session(2, 128), 8)
    rig.run(until=lambda: other in rig.outputs)
    rig.step(3)
    assert rig.phase(first) == "parked"
    tier.mover.open(LOAD)
    rig.run()
    assert rig.outputs[first].cached_tokens == 128
    assert rig.outputs[first].outputs[0].token_ids == expected_tokens([*session(1, 128), 5], 2)
    rig.check_quiet()


def test_e02_what_is_lost_while_another_tier_is_asked_is_looked_up_again() -> None:
    """The hit shrinks between the first look and the last; the request sees the last one only."""
    host, disk = ScriptedTier(slots=16), kept()
    rig = fake_rig(SMALL, 60, [host, disk])
    rig.serve(session(1, 128))
    rig.evict_device()
    disk.stored.clear()
    disk.mood = "silent"
    first = rig.add([*session(1, 128), 5], 2)
    rig.step(2)
    disk.mood = "honest"
    other = rig.add(session(2, 128), 4)
    disk.mood = "silent"
    rig.step(4)
    disk.mood = "honest"
    rig.run()
    for name, tokens, count in ((first, [*session(1, 128), 5], 2), (other, session(2, 128), 4)):
        assert rig.outputs[name].outputs[0].token_ids == expected_tokens(tokens, count)
    rig.check_quiet()


def test_a_kept_tier_that_forgot_or_lies_costs_time_only() -> None:
    """Mooncake, LMCache: a key that was there at the look-up is gone at the load."""
    disk = kept()
    rig = fake_rig(SMALL, 100, [disk])
    rig.serve(session(1, 256))
    for mood in ("honest", "liar", "liar"):
        rig.evict_device()
        for key in list(disk.stored)[::3]:
            del disk.stored[key]
        disk.mood = mood
        output = rig.serve([*session(1, 256), 5], 3)
        assert output.outputs[0].token_ids == expected_tokens([*session(1, 256), 5], 3)
    assert disk.refutations
    rig.check_quiet()


def test_prompts_of_two_tenants_never_meet() -> None:
    rig = fake_rig(SMALL, 100, [ScriptedTier()])
    for salt, hit in (("a", 0), ("b", 0), ("a", 112), ("", 0), ("b", 112)):
        output = rig.serve(session(1, 128), 2, salt=salt)
        assert output.cached_tokens == hit
        assert output.outputs[0].token_ids == expected_tokens(session(1, 128), 2, salt)
    assert DEVICE in output.cached_by_tier


def test_r03_a_request_waits_no_longer_than_until_its_prefix_is_there() -> None:
    """Too big to enter cold; a few pages once the one before it has computed what they share, and still runs."""
    rig = fake_rig(layout_of(Full()), 40, step_tokens=512)
    first = rig.add(session(1, 320), 60)
    others = [rig.add([*session(1, 320), number], 2) for number in range(2)]
    rig.run(until=lambda: all(name in rig.outputs for name in others))
    assert first not in rig.outputs
    assert [rig.outputs[name].cached_tokens for name in others] == [320, 320]
    rig.run()
    rig.check_quiet()
