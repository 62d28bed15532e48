"""Protocols through which the core calls out; connectors implement them, ``engine`` wires the two together.

Owns: the shapes of the calls.  All are called on the scheduler's thread and must not block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ostinato.cache.keys import BlockKey
from ostinato.ids import RequestId, Step, TierId


class Probe(Protocol):
    """A tier with an index of its own (kept: disk; shared: a store), which is asked and may be stale or lie."""

    @property
    def tier(self) -> TierId: ...

    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        """Which of ``keys`` could be loaded now?  None: not known yet, ask again.  Idempotent, no side effects."""

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Which of these freshly computed units does the tier want to store?"""

    def refuted(self, keys: Sequence[BlockKey]) -> None:
        """Loads of ``keys`` failed: earlier answers about them were wrong."""

    def remove(self, keys: Sequence[BlockKey]) -> bool | None:
        """Delete what is held of ``keys``, for good.

        True: nothing of them can be loaded any more.  None: not yet, ask again.  False: this tier cannot delete.
        """


class Observer(Protocol):
    """Somebody who wants to know what the hierarchy does, as it does it (connectors' hooks, KV events)."""

    def on_admit(self, request_id: RequestId, tokens: int) -> None:
        """The request, of ``tokens`` tokens, is about to be looked up in all tiers; again whenever that is repeated."""

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        """The request's KV is computed up to token ``computed``; what is full was published, nothing trimmed yet."""

    def on_release(self, request_id: RequestId) -> None:
        """The request is about to lose its table: it finishes, aborts or is preempted."""

    def on_step_end(self, step: Step) -> None:
        """Everything up to ``step`` is settled."""


class DirectoryListener(Protocol):
    """Somebody who wants to know which copies can be hit (KV events)."""

    def on_stored(self, key: BlockKey, tier: TierId) -> None:
        """``tier`` holds ``key`` from now on, ready to be used."""

    def on_removed(self, key: BlockKey, tier: TierId) -> None:
        """``tier`` does not hold ``key`` any more; it was ready there."""
