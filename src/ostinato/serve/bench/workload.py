"""What is asked: conversations of random words, the same for the same seed in any order of asking.

Owns: lengths, which conversations begin alike, what each turn says.  Does not own: when they are asked (``drive``).

Lengths are in words; most tokenizers make one token of each, and the server's ``usage`` says how many it made.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

from ostinato.errors import ConfigError

_ENGLISH: Final = (
    "able about above across after again air all along also always among animal answer area arm around ask away back "
    "ball bank base be bear beat become bed before begin behind best better between big bird black blood blue board "
    "boat body book both bottom box boy bread break bright bring brother brown build burn business buy call capital "
    "car care carry case cat catch cause center certain chair change check child choose circle city class clear climb "
    "close cloud coast cold color come common complete contain cook cool copy corn corner cost count country course "
    "cover cross cry current cut dance dark day dead deal deep degree design develop differ direct do doctor dog door "
    "double down draw dream dress drink drive drop dry during each early earth east easy eat edge effect egg eight "
    "either electric end energy engine enough enter equal even evening event ever example eye face fact fair fall "
    "family famous far farm fast father fear feel field fight figure fill final find fine finger finish fire first "
    "fish five floor flow flower fly follow food foot force forest form forward four free fresh friend front fruit "
    "full garden gather general gentle girl give glass go gold good govern grand grass great green ground group grow "
    "guess guide half hand happy hard have head hear heart heat heavy help high hill history hold hole home hope "
    "horse hot hour house huge human hundred hunt hurry ice idea inch island"
)
WORDS: Final = tuple(_ENGLISH.split())
MOST: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Span:
    """Lengths from ``low`` to ``high``, short ones more often: their logarithm is uniform."""

    low: int
    high: int

    @classmethod
    def parse(cls, flag: str, text: str) -> Span:
        """``64`` or ``16:512``.  Raises ConfigError."""
        low, _, high = text.partition(":")
        try:
            span = cls(int(low), int(high or low))
        except ValueError:
            raise ConfigError(f"{flag}: {text!r} is neither a number nor a span such as 16:512") from None
        if not 1 <= span.low <= span.high <= MOST:
            raise ConfigError(f"{flag}: {text!r} must go upwards, from at least 1 to at most {MOST:,}")
        return span

    def draw(self, source: random.Random) -> int:
        exact = math.exp(source.uniform(math.log(self.low), math.log(self.high + 1)))
        return min(self.high, int(exact))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``shared``: the share of conversations that begin with one of ``prefixes`` texts of ``shared_words`` words.

    After ``distinct`` conversations the first one is asked again.
    """

    prompt: Span
    answer: Span
    turns: Span
    shared: float = 0.0
    shared_words: int = 256
    prefixes: int = 1
    distinct: int | None = None
    seed: int = 0

    def conversation(self, number: int) -> Conversation:
        """The same for the same number, whatever was drawn before."""
        if self.distinct is not None:
            number %= self.distinct
        source = random.Random(f"{self.seed}/conversation/{number}")
        opening = ""
        if source.random() < self.shared:
            opening = self._prefix(source.randrange(self.prefixes)) + "\n\n"
        turns = [
            Turn(_words(source, self.prompt.draw(source)), self.answer.draw(source))
            for _ in range(self.turns.draw(source))
        ]
        turns[0] = Turn(opening + turns[0].text, turns[0].max_tokens)
        return Conversation(number, tuple(turns))

    def _prefix(self, number: int) -> str:
        return _words(random.Random(f"{self.seed}/prefix/{number}"), self.shared_words)


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, and how long the answer may be, in tokens."""

    text: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other; each prompt holds all that was said before."""

    number: int
    turns: tuple[Turn, ...]


def _words(source: random.Random, count: int) -> str:
    return " ".join(source.choices(WORDS, k=count))
