"""Moves of cached bytes between the device and one tier: what is ordered, and what comes back.

Owns: the values that cross between the two planes, and a job's states.  Does not own: threads, bytes (``connectors``),
bookkeeping (``book``).  Orders and reports are plain frozen values.

::

    QUEUED --dispatched--> STARTED --all ranks report--> DONE | FAILED
       |                      +------deadline----------> IN_DOUBT --late report--> (closed)
       +--pressure, abort--> REVOKED
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from ostinato.cache.keys import BlockKey
from ostinato.cache.pool import Lease
from ostinato.ids import JobId, Ordinal, SlotId, Step, TierId


class JobKind(Enum):
    LOAD = "load"
    STORE = "store"


class JobState(Enum):
    QUEUED = "queued"
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"
    IN_DOUBT = "in_doubt"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class Move:
    """One hash unit: bytes ``[offset, offset + length)`` of the page in ``device_slot``.

    ``tier_slot`` is the page in an owned tier's arena, at the same offset; HOLE where the tier finds bytes by key.
    """

    key: BlockKey
    ordinal: Ordinal
    device_slot: SlotId
    tier_slot: SlotId
    offset: int
    length: int


Blocks: TypeAlias = tuple[tuple[SlotId, ...], ...]
"""Device pages of all groups by position, HOLEs included."""


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """What a mover is asked to do.  It must not read or write the device before step ``after_step`` has finished.

    ``blocks``: the rows as they were when a connector emitted the order itself; empty for the core's own orders.
    """

    job_id: JobId
    kind: JobKind
    tier: TierId
    moves: tuple[Move, ...]
    after_step: Step
    blocks: Blocks = ()

    @property
    def total_bytes(self) -> int:
        return sum(move.length for move in self.moves)


@dataclass(frozen=True, slots=True)
class TransferReport:
    """A mover's last word on a job for one worker rank: it will not touch the job's bytes any more.

    ``failed`` are indices into the order's moves; empty = everything arrived.
    """

    job_id: JobId
    rank: int = 0
    failed: tuple[int, ...] = ()
    moved_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy bytes ``[offset, offset + length)`` of device page ``source`` to the same place of page ``target``.

    Runs in the worker, in order with the step: no mover, no report.
    """

    source: SlotId
    target: SlotId
    offset: int
    length: int


@dataclass(slots=True, eq=False)
class TransferJob:
    """The book's record of one order: its leases, deadline and the reports so far.

    ``patience``: seconds that movers have once the order was handed to them; the deadline begins there, since an order
    of a last step is handed on with the next one, however much later that is.
    """

    order: TransferOrder
    device_lease: Lease
    tier_lease: Lease | None
    patience: float
    deadline: float = math.inf
    state: JobState = JobState.QUEUED
    reported: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)

    @property
    def job_id(self) -> JobId:
        return self.order.job_id
