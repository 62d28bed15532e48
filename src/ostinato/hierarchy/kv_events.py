"""KV events, made from what the directory is told.

Owns: the order of events, a listing of everything.  Does not own: what keys stand for (``provenance``), the wire
(``observe.kv_events`` has the form, ``events`` the sockets).  Thread: the scheduler's only.

Only owned tiers (device, host) speak: what a disk or a store evicts is known to nobody here, and an event stream that
cannot take back what it said is worse than none.

A change is noted when it happens and told when the step ends, since a block's tokens are known only to the request that
computes it, and that request's part of the step may not be over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import Chunked, Full, Kind, State, Window
from ostinato.hierarchy.provenance import Provenance
from ostinato.hierarchy.residency import Residency
from ostinato.hierarchy.tiers import Core
from ostinato.ids import DEVICE, RequestId, Step, TierId
from ostinato.observe.kv_events import (
    MEDIUM_DEVICE,
    MEDIUM_HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
)


class EventSink(Protocol):
    """Where events go.  Nothing here may block."""

    def publish(self, events: list[KvEvent]) -> bool:
        """What one step changed; False when it could not be taken and is lost."""

    @property
    def wants_everything(self) -> bool:
        """Whether somebody asked for a listing since the last :meth:`list_everything`."""

    def list_everything(self, events: list[KvEvent]) -> None:
        """Every block that is held, as of the last :meth:`publish`."""


class _Change(NamedTuple):
    stored: bool
    key: BlockKey
    tier: TierId


class KvEventSource:
    """Listens to ``core.directory``, observes ``requests`` (the hierarchy's own map), tells ``sink``.

    ``everybody``: the seed of the key space that callers without a salt share.
    """

    def __init__(self, core: Core, requests: Mapping[RequestId, Residency], sink: EventSink, everybody: bytes) -> None:
        self._core = core
        self._requests = requests
        self._sink = sink
        self.provenance = Provenance(core.layout, everybody)
        self._changes: list[_Change] = []
        self._lost = True
        """Whether the listener knows less than it should: so it is at the start, and after a loss."""

    # The directory's listener.

    def on_stored(self, key: BlockKey, tier: TierId) -> None:
        self._changes.append(_Change(True, key, tier))

    def on_removed(self, key: BlockKey, tier: TierId) -> None:
        self._changes.append(_Change(False, key, tier))

    # The hierarchy's observer.

    def on_admit(self, request_id: RequestId, tokens: int) -> None:  # noqa: ARG002
        request = self._requests[request_id]
        request.chain.update(request.tokens)
        self.provenance.note(request)

    def on_commit(self, request_id: RequestId, computed: int) -> None:  # noqa: ARG002
        self.provenance.note(self._requests[request_id])

    def on_release(self, request_id: RequestId) -> None: ...

    def on_step_end(self, step: Step) -> None:  # noqa: ARG002
        for change in self._changes:
            if change.stored:
                self.provenance.use(change.key)
        events = [AllBlocksCleared(), *self.everything()] if self._lost else list(self._told())
        if events:
            self._lost = not self._sink.publish(events)
        if self._sink.wants_everything:
            self._sink.list_everything(self.everything())
        for change in self._changes:
            if not change.stored:
                self.provenance.release(change.key)
        self._changes.clear()
        self.provenance.forget(self._requests)

    def everything(self) -> list[KvEvent]:
        """Every block that is held, parents before children; a walk over all of them."""
        held: dict[tuple[TierId, int], dict[bytes, bytes | None]] = defaultdict(dict)
        for entry in self._core.directory:
            for tier, place in entry.places.items():
                if place.ready:
                    held[tier, entry.key.group][entry.key.digest] = self.provenance.parent(entry.key)
        return [
            self._stored(tier, group, run) for (tier, group), blocks in sorted(held.items()) for run in _runs(blocks)
        ]

    def _told(self) -> Iterator[KvEvent]:
        """The step's changes, consecutive ones of a kind together."""
        run: list[bytes] = []
        last: _Change | None = None
        for change in self._changes:
            if last is not None and not self._continues(last, change):
                yield self._event(last, run)
                run = []
            run.append(change.key.digest)
            last = change
        if last is not None:
            yield self._event(last, run)

    def _continues(self, last: _Change, change: _Change) -> bool:
        same = (last.stored, last.tier, last.key.group) == (change.stored, change.tier, change.key.group)
        return same and (not change.stored or self.provenance.parent(change.key) == last.key.digest)

    def _event(self, change: _Change, run: list[bytes]) -> KvEvent:
        if change.stored:
            return self._stored(change.tier, change.key.group, run)
        medium, owner = _medium(change.tier)
        return BlockRemoved(run, medium, change.key.group, ownership=owner)

    def _stored(self, tier: TierId, group: int, run: list[bytes]) -> BlockStored:
        spec = self._core.layout.groups[group]
        keys = [BlockKey(spec.group, digest) for digest in run]
        space = self.provenance.space(keys[0])
        kind, window = _spec_kind(spec.kind)
        medium, owner = _medium(tier)
        return BlockStored(
            run,
            self.provenance.parent(keys[0]),
            [token for key in keys for token in self.provenance.tokens(key)],
            spec.hash_unit,
            lora_id=None,
            medium=medium,
            lora_name=None,
            extra_keys=[(space,)] * len(run) if space is not None else None,
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            ownership=owner,
        )


def _medium(tier: TierId) -> tuple[str, str | None]:
    """vLLM's medium, and the name of a lower tier."""
    return (MEDIUM_DEVICE, None) if tier == DEVICE else (MEDIUM_HOST, str(tier))


def _spec_kind(kind: Kind) -> tuple[str, int | None]:
    """vLLM's name of a kind, and its window in tokens."""
    match kind:
        case Full():
            return "full_attention", None
        case Window(window, _):
            return "sliding_window", window
        case Chunked(chunk):
            return "chunked_local_attention", chunk
        case State():
            return "mamba", None


def _runs(parents: Mapping[bytes, bytes | None]) -> Iterator[list[bytes]]:
    """Blocks that follow one another without a fork, each after its parent."""
    children: dict[bytes, list[bytes]] = defaultdict(list)
    heads: list[bytes] = []
    for block, parent in parents.items():
        (children[parent] if parent is not None and parent in parents else heads).append(block)
    while heads:
        run = [heads.pop()]
        while len(followers := children[run[-1]]) == 1:
            run.append(followers[0])
        heads.extend(children[run[-1]])
        yield run
