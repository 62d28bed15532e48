"""Which tokens a key stands for, as long as somebody holds it.

Owns: tokens, parent and key space of every base unit that is cached in an owned tier or in use.  Does not own: who
holds what (``cache.directory``).  Thread: the scheduler's only.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ostinato.cache.keys import BlockKey
from ostinato.cache.layout import CacheLayout
from ostinato.hierarchy.residency import Residency
from ostinato.ids import RequestId


class _Origin(NamedTuple):
    """A base unit: the one before it, its tokens, and the name of its key space unless that is everybody's."""

    parent: bytes | None
    tokens: array[int]
    space: str | None


class Provenance:
    """``everybody``: the seed of the key space that callers without a salt share."""

    def __init__(self, layout: CacheLayout, everybody: bytes) -> None:
        self._layout = layout
        self._everybody = everybody
        self._origins: dict[bytes, _Origin] = {}
        self._uses: Counter[bytes] = Counter()
        """By base unit: copies in owned tiers, and requests that run over it."""
        self._noted: dict[RequestId, tuple[Residency, int]] = {}
        self._gone: list[tuple[Residency, int]] = []

    def __len__(self) -> int:
        """Base units that are remembered."""
        return len(self._origins)

    def note(self, request: Residency) -> None:
        """Remember the tokens of what the request's chain has grown by, until the request is over."""
        known, count = self._noted.get(request.request_id, (request, 0))
        if known is not request:  # the id is in use again
            self._gone.append((known, count))
            count = 0
        digests, unit = request.chain.digests, request.chain.unit
        space = None if request.chain.seed == self._everybody else request.chain.seed.hex()
        for index in range(count, len(digests)):
            digest = digests[index]
            self._uses[digest] += 1
            if digest not in self._origins:
                tokens = array("I", request.tokens[index * unit : (index + 1) * unit])
                self._origins[digest] = _Origin(digests[index - 1] if index else None, tokens, space)
        self._noted[request.request_id] = request, len(digests)

    def use(self, key: BlockKey) -> None:
        """A tier has a copy: remember its tokens until :meth:`release`."""
        self._uses.update(self._span(key))

    def release(self, key: BlockKey) -> None:
        self._unuse(self._span(key))

    def forget(self, alive: Mapping[RequestId, Residency]) -> None:
        """Let go of the requests that are over."""
        over = [name for name, (request, _) in self._noted.items() if alive.get(name) is not request]
        self._gone.extend(self._noted.pop(name) for name in over)
        for request, count in self._gone:
            self._unuse(request.chain.digests[:count])
        self._gone.clear()

    def parent(self, key: BlockKey) -> bytes | None:
        """Digest of the unit before; None at a prompt's start."""
        return self._origins[self._span(key)[0]].parent

    def tokens(self, key: BlockKey) -> list[int]:
        return [token for digest in self._span(key) for token in self._origins[digest].tokens]

    def space(self, key: BlockKey) -> str | None:
        """The key space's seed in hex; None when it is everybody's."""
        return self._origins[key.digest].space

    def _span(self, key: BlockKey) -> list[bytes]:
        """The base units of a unit, first one first."""
        span = [key.digest]
        for _ in range(self._layout.groups[key.group].hash_unit // self._layout.base_unit - 1):
            parent = self._origins[span[-1]].parent
            assert parent is not None, "a unit is made of whole base units"
            span.append(parent)
        return span[::-1]

    def _unuse(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self._uses[digest] -= 1
            if not self._uses[digest]:
                del self._uses[digest], self._origins[digest]
