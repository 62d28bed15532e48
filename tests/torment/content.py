"""What must be where: every cached byte says which tokens it depends on.

Owns: the content of units, the answer to a prompt, the meaning of keys, and the comparison.  Does not own: memory.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from ostinato.cache.keys import BlockKey, KeyChain
from ostinato.cache.kinds import Chunked, Full, Kind, State, Window
from ostinato.cache.layout import CacheLayout, GroupSpec
from torment.kernel import Violation

MOST_KNOWN = 200_000


def seed_of(salt: str) -> bytes:
    return hashlib.sha256(b"torment" + salt.encode()).digest()


class Text:
    """One request's tokens, and the state that a model would be in after each of them."""

    def __init__(self, salt: str, tokens: list[int]) -> None:
        self.salt = salt
        self.tokens = tokens
        self._states: dict[int, bytes] = {}
        self._hash = hashlib.blake2b(salt.encode(), digest_size=16)
        self._hashed = 0

    def state(self, length: int) -> bytes:
        """After the first ``length`` tokens."""
        known = self._states.get(length)
        if known is not None:
            return known
        if length < self._hashed:
            running, first = hashlib.blake2b(self.salt.encode(), digest_size=16), 0
        else:
            running, first = self._hash, self._hashed
        running.update(array("I", self.tokens[first:length]).tobytes())
        if running is self._hash:
            self._hashed = length
        state = self._states[length] = running.copy().digest()
        return state

    def next_token(self) -> int:
        return self.state(len(self.tokens))[0] % 7


class Truth:
    """By layout: what each unit of each key holds.  ``problems``: what was noticed where nobody could be told."""

    def __init__(self, layout: CacheLayout, distinct_ranks: bool) -> None:
        self.layout = layout
        self.problems: list[str] = []
        self._distinct = distinct_ranks
        self._contents: dict[tuple[int, int, bytes], bytes] = {}
        self._meaning: dict[BlockKey, bytes] = {}

    def content(self, spec: GroupSpec, state: bytes, rank: int = 0) -> bytes:
        rank = rank if self._distinct else 0
        place = (spec.group, rank, state)
        known = self._contents.get(place)
        if known is None:
            if len(self._contents) > MOST_KNOWN:
                self._contents.clear()
            digest = hashlib.blake2b(state, person=bytes((spec.group, rank))).digest()
            known = self._contents[place] = (digest * -(-spec.unit_bytes // 64))[: spec.unit_bytes]
        return known

    def learn(self, text: Text, chain: KeyChain) -> None:
        """Note what the keys of a text stand for; two meanings of one key would be a collision."""
        first = len(chain.digests) * chain.unit
        chain.update(text.tokens)
        for spec in self.layout.groups:
            unit = spec.hash_unit
            for ordinal in range(first // unit, len(text.tokens) // unit):
                key = BlockKey(spec.group, chain.digest(unit, ordinal))
                state = text.state((ordinal + 1) * unit)
                if self._meaning.setdefault(key, state) != state:
                    raise Violation("two texts share a key")

    def check(self, key: BlockKey, content: bytes | bytearray | memoryview, what: str, rank: int = 0) -> None:
        """Compare what is moved under ``key``; noted rather than raised, since movers catch what is raised."""
        state = self._meaning.get(key)
        if state is None:
            self.problems.append(f"{what}: nobody computed this key")
        elif bytes(content) != self.content(self.layout.groups[key.group], state, rank):
            self.problems.append(f"{what}: the bytes are not those of their key")

    def complain(self) -> None:
        if self.problems:
            raise Violation(self.problems[0])


def units_read(kind: Kind, start: int, unit: int) -> Sequence[int]:
    """Units with tokens before ``start`` that the queries from there on attend to, by the attention mask."""
    stop = -(-start // unit)
    match kind:
        case Full():
            return range(stop)
        case Window(window, sinks):
            first = max(0, start - window + 1) // unit  # the first query sees itself and window - 1 tokens before it
            head = min(-(-min(sinks, start) // unit), first)
            return (*range(head), *range(first, stop)) if start > max(0, start - window + 1) else range(head)
        case Chunked(chunk):
            return range(start // chunk * chunk // unit, stop) if start % chunk else ()
        case State():
            raise AssertionError("recurrent state is read as a whole")
