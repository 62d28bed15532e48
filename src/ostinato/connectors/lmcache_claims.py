"""How LMCache sees prompts and layouts; what a server said it can restore, and what was given to it.

Owns: answers about prompts, the lookups that the server still holds for us, which units were stored.  Does not own:
asking (``lmcache_lookups``), bytes (``lmcache_mover``).  Any thread: the scheduler's, the lookup thread and both of the
mover's threads.

LMCache is asked about a prompt and answers with a length.  A length of ``n`` units says that every unit that any group
requires at ``n`` is there; that, and nothing else, is *held*::

    asked about 96 tokens: 80     full       [#][#][#][#][#][.]      # held   . not claimed
                                  window 32  [.][.][.][#][#][.]
                                  state      [.][.][.][.][#][.]
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import Chunked, Kind, State, Window, ceil_div, keeps_checkpoints
from ostinato.cache.layout import CacheLayout

DIGEST_TOKENS: Final = 16
"""Token ids of 16 bits that a digest of 32 bytes makes."""
MAX_CLAIMS: Final = 256
MAX_WRITTEN: Final = 1 << 18
MAX_CHAINS: Final = 512
REFUTED_S: Final = 5.0
"""Seconds for which nothing is claimed of a prompt whose units could not be loaded."""

Chain = tuple[bytes, ...]
"""Digests of a prompt's units, from its start."""


def stand_ins(chain: Sequence[bytes], unit: int) -> tuple[int, ...]:
    """Token ids by which LMCache knows the units of ``chain``: the digest of each, padded to ``unit`` tokens.

    Equal for two prompts exactly when weights, layout, numerics, salt and all tokens are; no token leaves the process.
    """
    words = struct.Struct(f"<{DIGEST_TOKENS}H")
    padding = (0,) * (unit - DIGEST_TOKENS)
    return tuple(word for digest in chain for word in (*words.unpack(digest), *padding))


def required_keys(layout: CacheLayout, chain: Chain) -> frozenset[BlockKey]:
    """All units that some group needs to resume at the end of ``chain``.  All groups have one hash unit."""
    return frozenset(
        BlockKey(spec.group, chain[ordinal])
        for spec in layout.groups
        for low, high in spec.kind.required(len(chain) * spec.hash_unit, spec.hash_unit)
        for ordinal in range(low, high)
    )


def trailing_tokens(kind: Kind, unit: int) -> int:
    """LMCache's window of a group: tokens before a cut, in whole units, that it must have to hit there; -1 = all.

    What it cannot express (sinks) is stored and required in full.
    """
    match kind:
        case State():
            return unit
        case Chunked(chunk):
            return ceil_div(chunk, unit) * unit
        case Window(window, 0):
            return max(1, ceil_div(window - 1, unit)) * unit
        case _:
            return -1


def peers(layout: CacheLayout) -> list[list[int]]:
    """Groups that LMCache keeps in one object per unit, in the order in which they are registered.

    LMCache 0.5.6 fails where such groups are not registered one after the other.
    """
    found: dict[tuple[bool, int], list[int]] = {}
    for spec in layout.groups:
        key = keeps_checkpoints(spec.kind), trailing_tokens(spec.kind, spec.hash_unit)
        found.setdefault(key, []).append(spec.group)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup that the server holds for us (its chunks are not evicted) until it is released or used for a load."""

    name: str
    chain: Chain
    """Up to the answer."""


@dataclass(slots=True)
class _Claim:
    chain: Chain
    held: frozenset[BlockKey]
    until: float
    lookup: Lookup | None


class Claims:
    """By the digest at the end of the prompt that was asked about.  ``clock`` in seconds; answers last ``ttl``."""

    def __init__(self, clock: Callable[[], float], ttl: float) -> None:
        self._clock = clock
        self._ttl = ttl
        self._lock = threading.Lock()
        self._known: dict[bytes, _Claim] = {}
        self._asked: set[bytes] = set()
        self._spare: list[Lookup] = []
        """To be released."""

    def held(self, tip: bytes) -> frozenset[BlockKey] | None:
        """What is held for the prompt that ends with ``tip``; None = unknown."""
        with self._lock:
            claim = self._known.get(tip)
            return claim.held if claim is not None and claim.until > self._clock() else None

    def ask(self, tip: bytes) -> bool:
        """Whether nobody asks about ``tip`` yet: then the caller does, and will :meth:`answer`."""
        with self._lock:
            if tip in self._asked:
                return False
            self._asked.add(tip)
            return True

    def answer(self, tip: bytes, chain: Chain, held: frozenset[BlockKey], lookup: Lookup | None) -> None:
        with self._lock:
            self._asked.discard(tip)
            self._drop(tip)
            while len(self._known) >= MAX_CLAIMS:
                self._drop(next(iter(self._known)))
            self._known[tip] = _Claim(chain, held, self._clock() + self._ttl, lookup)

    def take(self, keys: Sequence[BlockKey]) -> tuple[Chain, Lookup | None] | None:
        """The latest prompt for which all of ``keys`` were held, with its lookup, which is the caller's from now on."""
        with self._lock:
            for claim in reversed(self._known.values()):
                if claim.held.issuperset(keys):
                    lookup, claim.lookup = claim.lookup, None
                    return claim.chain, lookup
        return None

    def refute(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            until = self._clock() + REFUTED_S
            for claim in self._known.values():
                if not claim.held.isdisjoint(keys):
                    self._release(claim)
                    claim.held, claim.until = frozenset(), until

    def holds_lookups(self) -> bool:
        with self._lock:
            return bool(self._spare) or any(claim.lookup is not None for claim in self._known.values())

    def overdue(self, everything: bool = False) -> list[Lookup]:
        """Lookups that nobody loaded from while their answers were good; the caller releases them."""
        with self._lock:
            now = self._clock()
            for claim in self._known.values():
                if everything or claim.until <= now:
                    self._release(claim)
            overdue, self._spare = self._spare, []
            return overdue

    def give_back(self, lookup: Lookup) -> None:
        """One that may be held at the server, and is of no use here: :meth:`overdue` from now on."""
        with self._lock:
            self._spare = [*self._spare[1 - MAX_CLAIMS :], lookup]

    def _drop(self, tip: bytes) -> None:
        claim = self._known.pop(tip, None)
        if claim is not None:
            self._release(claim)

    def _release(self, claim: _Claim) -> None:
        if claim.lookup is not None:
            self._spare.append(claim.lookup)
            claim.lookup = None


class Written:
    """Units that the server took, as far as we know, and the prompts of those that are on their way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[BlockKey, None] = {}
        self._chains: deque[tuple[Chain, frozenset[BlockKey]]] = deque(maxlen=MAX_CHAINS)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._known

    def expect(self, chain: Chain, keys: Iterable[BlockKey]) -> None:
        """An order will store some of ``keys``, which are units of ``chain``."""
        with self._lock:
            self._chains.append((chain, frozenset(keys)))

    def chain_of(self, keys: Sequence[BlockKey]) -> Chain | None:
        with self._lock:
            return next((chain for chain, known in reversed(self._chains) if known.issuperset(keys)), None)

    def add(self, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            if len(self._known) > MAX_WRITTEN:
                self._known = {}
            self._known.update((key, None) for key in keys)

    def discard(self, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._known.pop(key, None)

    def clear(self) -> None:
        """The server may have been restarted."""
        with self._lock:
            self._known = {}
