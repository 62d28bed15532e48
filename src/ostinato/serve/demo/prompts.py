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
_SYLLABLES: Final = "bacedifoguhajekilomunaperisotuvawexiyozu"


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


def needle(stored_facts: int, asked_facts: int, fact: int, evicting: tuple[str, ...]) -> Scenario:
    """Facts ``1..stored_facts``; the question about ``fact`` follows after ``asked_facts`` of them."""
    facts = [f"{_question(number)} {needle_answer(number)}.\n" for number in range(1, stored_facts + 1)]
    stored = "".join(facts) + "That was all."
    asked = "".join(facts[:asked_facts]) + _question(fact)
    return Scenario("needle", stored, evicting, asked)


def needle_answer(fact: int) -> str:
    """The number that the question about ``fact`` asks for: no two alike, and the same in every run."""
    return str((fact * 7919 + 104729) % 9000 + 1000)


def _question(fact: int) -> str:
    size = len(_SYLLABLES) // 2
    picks = (fact % size, fact // size % size, fact * 7 % size)
    name = "".join(_SYLLABLES[2 * pick : 2 * pick + 2] for pick in picks)
    return f"{fact}. The phone number of {name.capitalize()} is"
