"""A router's view of one engine's cache, made from its KV events, and the hits that follow from it.

Owns: which blocks each tier holds, by group.  Does not own: receiving events (``follower``).  The rules of windows,
chunks and states are the engine's own (``cache.kinds``, ``cache.match``).  Thread: one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ostinato.cache.keys import KeyChain
from ostinato.cache.kinds import Chunked, Full, Kind, State, Window
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.cache.match import longest_hit
from ostinato.errors import ConfigError
from ostinato.ids import GroupId
from ostinato.observe.kv_events import MEDIUM_DEVICE, AllBlocksCleared, BlockRemoved, BlockStored, KvEvent


class EventIndex:
    """What is cached, and how much of a prompt that spares."""

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self._layout = CacheLayout(tuple(groups), groups[0].page_bytes)
        self._held: dict[tuple[str, int], set[bytes]] = defaultdict(set)

    @classmethod
    def of(cls, described: Sequence[Mapping[str, Any]]) -> EventIndex:
        """For the groups that :func:`describe_groups` described, in another process."""
        return cls([_described(index, group) for index, group in enumerate(described)])

    def apply(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._tier(event).update(event.block_hashes)
                case BlockRemoved():
                    self._tier(event).difference_update(event.block_hashes)
                case AllBlocksCleared():
                    self._held.clear()

    def blocks(self) -> dict[tuple[str, int], frozenset[bytes]]:
        """By tier and group; the device is called ``device``."""
        return {place: frozenset(held) for place, held in self._held.items() if held}

    def predict(self, tokens: Sequence[int], space: bytes) -> int:
        """Tokens of a prompt that the engine would not compute; ``space`` seeds the caller's key space."""
        chain = KeyChain(space, self._layout.base_unit)
        chain.update(tokens)
        tiers = sorted({tier for tier, _ in self._held})

        def present(group: int, ordinal: int) -> bool:
            unit = self._layout.groups[group].hash_unit
            if not chain.covers(unit, ordinal):
                return False
            digest = chain.digest(unit, ordinal)
            return any(digest in self._held[tier, group] for tier in tiers)

        # The last token is always computed: its logits are what a request is for.
        return longest_hit(self._layout.groups, len(tokens) - 1, self._layout.granularity, present)

    def _tier(self, event: BlockStored | BlockRemoved) -> set[bytes]:
        tier = "device" if event.medium == MEDIUM_DEVICE else event.ownership or str(event.medium)
        return self._held[tier, event.group_idx or 0]


def describe_groups(layout: CacheLayout) -> list[dict[str, Any]]:
    """Groups as plain values, for :meth:`EventIndex.of`."""
    return [
        {**_rule(spec.kind), "hash_unit": spec.hash_unit, "hit_granularity": spec.hit_granularity}
        for spec in layout.groups
    ]


def _rule(kind: Kind) -> dict[str, Any]:
    match kind:
        case Full():
            return {"kind": "full"}
        case Window(window, sinks):
            return {"kind": "window", "window": window, "sinks": sinks}
        case Chunked(chunk):
            return {"kind": "chunked", "chunk": chunk}
        case State():
            return {"kind": "state"}


def _described(index: int, group: Mapping[str, Any]) -> GroupSpec:
    kind: Kind
    match group:
        case {"kind": "full"}:
            kind = Full()
        case {"kind": "window", "window": int(window), "sinks": int(sinks)}:
            kind = Window(window, sinks)
        case {"kind": "chunked", "chunk": int(chunk)}:
            kind = Chunked(chunk)
        case {"kind": "state"}:
            kind = State()
        case _:
            raise ConfigError(f"a group described as {dict(group)!r} is of a kind that this version does not know")
    # Bytes are the engine's matter: a page here is one unit of one byte.
    return GroupSpec(GroupId(index), kind, (), group["hash_unit"], 1, group["hit_granularity"], 1, 1)
