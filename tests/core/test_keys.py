"""Block keys: chained, namespaced, equal in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from ostinato.cache.keys import KeyChain, Namespace, chain_digests

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=60)
BASE = Namespace(b"weights", b"layout", b"config", "bf16", "cpu", b"salt", b"adapter")


def one_shot(seed: bytes, tokens: Sequence[int], unit: int) -> list[bytes]:
    chain = KeyChain(seed, unit)
    chain.update(tokens)
    return chain.digests


@given(TOKENS, st.integers(1, 7), st.lists(st.integers(0, 60)))
def test_incremental_equals_one_shot(tokens: list[int], unit: int, stops: list[int]) -> None:
    chain = KeyChain(b"seed", unit)
    for stop in sorted(stops):
        chain.update(tokens[:stop])
    chain.update(tokens)
    assert chain.digests == one_shot(b"seed", tokens, unit)
    assert len(chain.digests) == len(tokens) // unit
    assert all(len(digest) == 32 for digest in chain.digests)


@given(TOKENS, st.integers(1, 7), st.data())
def test_one_token_changes_all_later_digests(tokens: list[int], unit: int, data: st.DataObject) -> None:
    if not tokens:
        return
    index = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:index], tokens[index] ^ 1, *tokens[index + 1 :]]
    before, after = one_shot(b"seed", tokens, unit), one_shot(b"seed", other, unit)
    first = index // unit
    assert before[:first] == after[:first]
    assert not set(before[first:]) & set(after)


def test_a_coarser_group_uses_the_digest_of_its_last_base_unit() -> None:
    chain = KeyChain(b"seed", 4)
    chain.update(range(30))
    assert [chain.digest(8, ordinal) for ordinal in range(3)] == chain.digests[1:6:2]
    assert chain.covers(8, 2)
    assert not chain.covers(8, 3)
    assert chain.covers(4, 6)
    assert not chain.covers(12, 2)


def test_different_seeds_and_units_never_meet() -> None:
    tokens = list(range(48))
    chains = [one_shot(seed, tokens, unit) for seed in (b"a", b"b") for unit in (4, 8, 12)]
    digests = [digest for chain in chains for digest in chain]
    assert len(set(digests)) == len(digests)


def test_continuing_from_a_link() -> None:
    whole = one_shot(b"seed", range(32), 4)
    assert list(chain_digests(whole[3], range(16, 32), 4)) == whole[4:]


def test_every_field_changes_the_seed() -> None:
    seeds = {BASE.seed()}
    for item in fields(Namespace):
        value = getattr(BASE, item.name)
        changed = replace(BASE, **{item.name: value + (b"x" if isinstance(value, bytes) else "x")})
        seeds.add(changed.seed())
    assert len(seeds) == len(fields(Namespace)) + 1


@given(st.binary(max_size=40), st.data())
def test_shifting_bytes_between_fields_changes_the_seed(text: bytes, data: st.DataObject) -> None:
    cuts = [sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=4, max_size=4))) for _ in range(2)]
    first, second = (
        Namespace(
            text[: cut[0]],
            text[cut[0] : cut[1]],
            text[cut[1] : cut[2]],
            salt=text[cut[2] : cut[3]],
            adapter=text[cut[3] :],
        )
        for cut in cuts
    )
    assert (first.seed() == second.seed()) == (first == second)


def test_text_and_bytes_fields_do_not_run_together() -> None:
    assert replace(BASE, dtype="bf16cpu", numerics="").seed() != BASE.seed()
    assert replace(BASE, dtype="", numerics="bf16cpu").seed() != BASE.seed()


def test_equal_in_another_process() -> None:
    code = (
        "from ostinato.cache.keys import KeyChain, Namespace\n"
        "chain = KeyChain(Namespace(b'w', b'l', numerics='n', salt=b's').seed(), 4)\n"
        "chain.update([7, 2**31, 2**32 - 1, 0] * 4)\n"
        "print(chain.digests[-1].hex())"
    )
    seen = set()
    for hash_seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        seen.add(done.stdout.strip())
    chain = KeyChain(Namespace(b"w", b"l", numerics="n", salt=b"s").seed(), 4)
    chain.update([7, 2**31, 2**32 - 1, 0] * 4)
    assert seen == {chain.digests[-1].hex()}


def test_the_format_is_pinned() -> None:
    """Keys outlive the process: a change here orphans every stored block and needs a new format version."""
    chain = KeyChain(Namespace(b"weights", b"layout").seed(), 2)
    chain.update([1, 2, 3, 4])
    assert [digest.hex()[:16] for digest in chain.digests] == ["0eddef43e788f49e", "04092aa885cdd71f"]
