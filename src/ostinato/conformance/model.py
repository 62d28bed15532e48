"""A model that computes nothing, but whose every cached byte says which tokens it depends on.

Owns: what a unit must hold, which units a query reads, and the right answer to any prompt.  Pure.

A running digest over the tokens stands for the hidden state; the next token is read off it, and a unit's content is the
state at its end, stretched.  So whoever reads a unit can tell whether it is the right one, and a wrong byte anywhere is
found where it is read.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Final

from ostinato.cache.kinds import Chunked, Full, Kind, State, Window
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.ids import GroupId

UNIT: Final = 16
"""Tokens of every hash unit here."""
PAGE_BYTES: Final = 2048
_STATE_BYTES: Final = 32
_FIRST_TOKEN: Final = 1000


def make_layout(*shapes: tuple[Kind, int]) -> CacheLayout:
    """One group for each kind, with so many hash units per page; every unit has a few bytes of padding behind it."""
    groups = []
    for index, (kind, page_units) in enumerate(shapes):
        stride = PAGE_BYTES // page_units
        groups.append(GroupSpec(GroupId(index), kind, (index,), UNIT, page_units, UNIT, stride - 48, stride))
    return CacheLayout(tuple(groups), PAGE_BYTES)


HYBRID: Final = make_layout((Full(), 4), (Window(40), 2), (State(), 1))
"""Full attention with four units a page, a window with two, recurrent state."""
LOCAL: Final = make_layout((Window(24), 1), (Chunked(48), 4))
PLAIN: Final = make_layout((Full(), 1))
LAYOUTS: Final = (HYBRID, LOCAL, PLAIN)


def start_state(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode(), digest_size=_STATE_BYTES).digest()


def next_state(state: bytes, token: int) -> bytes:
    return hashlib.blake2b(state + token.to_bytes(4, "little"), digest_size=_STATE_BYTES).digest()


def next_token(state: bytes) -> int:
    return int.from_bytes(state[:2], "little") + _FIRST_TOKEN


def right_answer(prompt: Sequence[int], count: int, salt: str = "") -> tuple[int, ...]:
    """The tokens that follow ``prompt``, without any cache."""
    state = start_state(salt)
    for token in prompt:
        state = next_state(state, token)
    answer: list[int] = []
    for _ in range(count):
        answer.append(next_token(state))
        state = next_state(state, answer[-1])
    return tuple(answer)


def unit_content(spec: GroupSpec, state: bytes, rank: int = 0) -> bytes:
    """What a unit holds whose last token left the model in ``state``; each rank has its own share of it."""
    return hashlib.shake_128(state + bytes([spec.group, rank])).digest(spec.unit_bytes)


def units_read(kind: Kind, start: int) -> range:
    """Units before token ``start`` that the queries from there on attend to, from the attention mask alone."""
    match kind:
        case Full():
            first = 0
        case Window(window):
            first = max(0, start - window + 1)  # the first query sees itself and window - 1 tokens before it
        case Chunked(chunk):
            first = start // chunk * chunk
        case State():
            raise AssertionError("recurrent state is read as a whole")
    return range(first // UNIT, -(-start // UNIT)) if first < start else range(0)


def make_prompt(length: int, seed: object) -> list[int]:
    source = random.Random(str(seed))
    return [source.randrange(_FIRST_TOKEN) for _ in range(length)]
