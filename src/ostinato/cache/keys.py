"""Namespaced, chained block keys.

Owns: what a key is made of.  Does not own: who holds a key.  Pure values; any thread.

``digest[i] = SHA-256(digest[i - 1] || tokens of base unit i, 4 bytes little-endian each)``, seeded by the namespace.
A group's unit of several base units takes the digest of its last one: the chain makes that unique.  Equal in every
process and on every machine; Python's ``hash`` is never used.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ostinato.ids import GroupId

FORMAT_VERSION = 1


class BlockKey(NamedTuple):
    """Identity of one hash unit of one group: the group and the chain's 32-byte digest at the unit's end."""

    group: GroupId
    digest: bytes


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must be equal for two equal token sequences to have equal KV.

    ``weights`` and ``layout`` are digests of content, never names.  ``numerics`` names backend, instruction set and
    library versions: two processes that differ in it may differ in the last bits.
    """

    weights: bytes
    layout: bytes
    config: bytes = b""
    dtype: str = ""
    numerics: str = ""
    salt: bytes = b""
    adapter: bytes = b""

    def seed(self) -> bytes:
        """First link of the chain.  Fields are length-prefixed, so that no two namespaces run together."""
        digest = hashlib.sha256(b"ostinato-key-%d" % FORMAT_VERSION)
        fields = (
            self.weights,
            self.layout,
            self.config,
            self.dtype.encode(),
            self.numerics.encode(),
            self.salt,
            self.adapter,
        )
        for value in fields:
            digest.update(len(value).to_bytes(8, "little"))
            digest.update(value)
        return digest.digest()


@dataclass(slots=True)
class KeyChain:
    """Digests of a growing token sequence, one per base unit of ``unit`` tokens; each unit is hashed once."""

    seed: bytes
    unit: int
    digests: list[bytes] = field(default_factory=list)

    def update(self, tokens: Sequence[int]) -> None:
        """Hash the units of ``tokens`` (the whole sequence so far) that are complete and not hashed yet."""
        start = len(self.digests) * self.unit
        stop = len(tokens) // self.unit * self.unit
        if stop <= start:
            return
        previous = self.digests[-1] if self.digests else self.seed
        self.digests.extend(chain_digests(previous, tokens[start:stop], self.unit))

    def digest(self, unit: int, ordinal: int) -> bytes:
        """Digest of ordinal ``ordinal`` of a group whose hash unit is ``unit`` tokens (a multiple of the base unit)."""
        return self.digests[(ordinal + 1) * (unit // self.unit) - 1]

    def covers(self, unit: int, ordinal: int) -> bool:
        return (ordinal + 1) * (unit // self.unit) <= len(self.digests)


def chain_digests(previous: bytes, tokens: Sequence[int], unit: int) -> Iterator[bytes]:
    """Digests of whole units of ``tokens`` that follow the link ``previous``."""
    words = array("I", tokens)
    assert words.itemsize == 4
    if sys.byteorder == "big":
        words.byteswap()
    data = memoryview(words).cast("B")
    for start in range(0, len(data) - 4 * unit + 1, 4 * unit):
        previous = hashlib.sha256(previous + data[start : start + 4 * unit]).digest()
        yield previous
