"""The plug-in seam: what a connector is.

Owns: the two halves' interfaces and the description of a connector.  A connector answers *which of these keys do you
hold?* (scheduler half, :class:`Connector`) and *move these bytes* (worker half, :class:`Mover`).  It reports facts;
only the core draws conclusions.  Optional hooks see the scheduler's blocks through
:class:`~ostinato.connectors.context.KVConnectorSchedulerContext`; a connector without hooks costs nothing per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from ostinato.cache.keys import BlockKey
from ostinato.cache.layout import CacheLayout
from ostinato.connectors.context import KVConnectorSchedulerContext
from ostinato.connectors.record import RecordIdentity
from ostinato.errors import ConnectorError
from ostinato.ids import JobId, RequestId, Step, TierId
from ostinato.transfer.job import TransferOrder, TransferReport


class Ownership(Enum):
    """Who decides what a tier holds.

    OWNED: slots are ours, in the directory, evicted by retention; the connector only copies.  KEPT: the connector has
    its own index, budget and eviction, and is asked.  SHARED: asked, and it may be stale or lie.
    """

    OWNED = "owned"
    KEPT = "kept"
    SHARED = "shared"


class Hook(Enum):
    """Calls that a connector wants to receive on the scheduler's thread."""

    ADMIT = "admit"
    COMMIT = "commit"
    RELEASE = "release"
    STEP_END = "step_end"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """``eager``: an owned tier wants blocks as they fill, rather than when the device is about to evict them."""

    tier: TierId
    ownership: Ownership
    eager: bool = True
    hooks: frozenset[Hook] = frozenset()


@dataclass(frozen=True, slots=True)
class Site:
    """Where a connector works: the cache layout, the identity of its records, and how many worker ranks there are.

    ``model``: what people call the model; means nothing to the cache.
    """

    layout: CacheLayout
    identity: RecordIdentity
    world_size: int = 1
    model: str = ""


class DevicePages(Protocol):
    """The device pool as a mover sees it.

    ``pages``: uint8 tensor ``[num_pages, page_bytes]``.  ``copy(source, target, source_index, target_index)`` moves
    whole rows between two such tensors; it may be called from a mover's thread.
    """

    @property
    def pages(self) -> Any: ...

    def copy(self, source: Any, target: Any, source_index: Sequence[int], target_index: Sequence[int]) -> None: ...


class Mover(Protocol):
    """Worker half: moves bytes on threads of its own.  One report per order, also for one that failed.

    ``submit``, ``poll`` and ``cancel`` never block.  After its report a mover does not touch the order's slots.
    """

    def submit(self, order: TransferOrder) -> None: ...

    def poll(self) -> list[TransferReport]: ...

    def cancel(self, job_id: JobId) -> None: ...

    def close(self) -> None: ...


class Connector:
    """Scheduler half.  Subclass it, set ``capabilities``, override what applies.

    An OWNED connector implements :meth:`slots`; KEPT and SHARED ones :meth:`probe`, :meth:`offer`, :meth:`refuted`,
    and :meth:`remove` where the tier can delete.
    """

    capabilities: Capabilities

    @property
    def tier(self) -> TierId:
        return self.capabilities.tier

    def open(self, site: Site) -> None:
        """Called once, before anything else but :attr:`capabilities`.  Raises when the tier cannot be used at all."""

    def make_mover(self, device: DevicePages, notify: Callable[[], None]) -> Mover:  # noqa: ARG002
        """The worker half; ``notify()`` is to be called when a report is ready, from any thread."""
        raise _lacks(self, "make_mover")

    def slots(self, page_bytes: int) -> int:  # noqa: ARG002
        """OWNED: how many pages the tier holds."""
        raise _lacks(self, "slots")

    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        """Which of ``keys`` could be loaded now; None = not known yet, ask again."""
        return [False] * len(keys)

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Which of these freshly computed units to store."""
        return [True] * len(keys)

    def refuted(self, keys: Sequence[BlockKey]) -> None:
        """Loads of ``keys`` failed."""

    def remove(self, keys: Sequence[BlockKey]) -> bool | None:  # noqa: ARG002
        """Delete ``keys``.  True: none of them can be loaded any more; None: not yet, ask again; False: cannot delete.

        Asked again until it is not None; meanwhile nobody is told that the tier has them.
        """
        return False

    def bind(self, context: KVConnectorSchedulerContext) -> None:
        """Called once, when the scheduler starts."""

    def on_admit(self, request_id: RequestId, tokens: int) -> None:
        """A request of ``tokens`` tokens is to be admitted: questions until the next call are about it; often repeated.

        For a tier that is asked about prompts rather than keys (:attr:`Hook.ADMIT`).
        """

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        """A step computed the request's KV up to token ``computed`` (:attr:`Hook.COMMIT`)."""

    def on_release(self, request_id: RequestId) -> None:
        """The request finishes, aborts or is preempted; its blocks are still there (:attr:`Hook.RELEASE`)."""

    def on_step_end(self, step: Step) -> None:
        """Everything of ``step`` is settled (:attr:`Hook.STEP_END`)."""

    def close(self) -> None:
        """Stop; nothing is called afterwards."""


def _lacks(connector: Connector, method: str) -> ConnectorError:
    name = type(connector).__name__
    return ConnectorError(f"connector {name} has no {method}(): it was made for another version of this interface")
