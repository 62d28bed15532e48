"""The demo's prompts.

``greeting``: one sentence, thousands of times, as in the vLLM pull request that introduced hybrid KV loading.  Its
continuation is the same with most of the KV missing, so a second set of numbered facts, no two alike, asks for a number
that stands in the reloaded part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GREETING: Final = "Hello, how are you? "
GREETING_TAIL: Final = "I am fine, thank you. And you, my old friend?"
OTHER_TAIL: Final = "It is late; good night!"
_WORDS: Final = (
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "flint",
    "grove",
    "heron",
    "iris",
    "jade",
    "kelp",
    "lotus",
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """``stored`` is computed first; ``evicting`` push it out of the device; ``asked`` shares a part of it."""

    name: str
    stored: str
    evicting: tuple[str, ...]
    asked: str


def greetings(repeats: int, asked_repeats: int) -> Scenario:
    stored = GREETING * repeats + GREETING_TAIL
    return Scenario("greeting", stored, ("1" + stored, "2" + stored), GREETING * asked_repeats + OTHER_TAIL)


def needle(stored_facts: int, asked_facts: int, fact: int) -> Scenario:
    """Facts ``1..stored_facts``; the question about ``fact`` follows after ``asked_facts`` of them."""
    facts = [_fact(number) for number in range(1, stored_facts + 1)]
    stored = "".join(facts) + "That was all."
    words, _ = _place_and_code(fact)
    question = f"Fact {fact}: the locker named {words} opens with the number"
    asked = "".join(facts[:asked_facts]) + question
    return Scenario("needle", stored, ("1" + stored, "2" + stored), asked)


def needle_answer(fact: int) -> str:
    """The number that the question of :func:`needle` asks for."""
    return str(_place_and_code(fact)[1])


def _fact(number: int) -> str:
    words, code = _place_and_code(number)
    return f"Fact {number}: the locker named {words} opens with the number {code}.\n"


def _place_and_code(number: int) -> tuple[str, int]:
    """Distinct for every fact, and the same in every run: a linear congruence instead of a random generator."""
    code = (number * 7919 + 104729) % 90000 + 10000
    size = len(_WORDS)
    return f"{_WORDS[number % size]} {_WORDS[number // size % size]} {number % 89}", code
