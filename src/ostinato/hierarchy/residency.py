"""What the hierarchy knows of one request, and the answers it gives the scheduler.

Owns: values only.  ``Residency`` lives from ``open`` to ``finish``; its table only while the request is admitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ostinato.cache.hints import PLAIN, CacheHints
from ostinato.cache.keys import BlockKey, KeyChain
from ostinato.cache.pool import Lease
from ostinato.cache.table import BlockTable, StatePlan
from ostinato.ids import JobId, RequestId, TicketId, TierId
from ostinato.transfer.job import PageCopy


@dataclass(frozen=True, slots=True)
class HitReport:
    """What a request did not have to compute.

    ``by_tier`` sums to ``tokens``: each token counted once, by its slowest group.  ``pages_by_group``: device pages
    that the hit took or shared, per group.  ``declined``: tokens beyond it that a tier has and that are computed, since
    that is faster than loading them.
    """

    tokens: int = 0
    by_tier: tuple[tuple[TierId, int], ...] = ()
    pages_by_group: tuple[int, ...] = ()
    bytes_loaded: int = 0
    declined: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """Admitted: compute from token ``hit.tokens`` on."""

    hit: HitReport


@dataclass(slots=True)
class Parked:
    """Admitted, but to be left alone until the ticket comes back from ``settle``."""

    ticket: TicketId
    deadline: float
    jobs: set[JobId] = field(default_factory=set)
    failed: bool = False


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Not admitted, nothing changed: ``short_by`` pages are lacking."""

    short_by: int


Admission: TypeAlias = Ready | Parked | NoRoom


@dataclass(frozen=True, slots=True)
class Woken:
    """A parked request can go on: resume at its hit when ``ok``, else it holds nothing and must be admitted again."""

    request_id: RequestId
    ok: bool


@dataclass(slots=True)
class Following:
    """A request waits until ``leader`` has computed ``until`` tokens, which both share.

    ``seen``: how far the leader was at ``since``, when it last advanced.
    """

    leader: RequestId
    until: int
    seen: int
    since: float


@dataclass(slots=True)
class Residency:
    """One request.  ``tokens`` is the scheduler's own list, which grows as tokens are sampled.

    ``reuse``: whether it may begin with what others computed.  ``computed``: tokens whose KV is in the table.
    ``committed[g]``: units of group ``g`` that were published.
    ``boundaries_at``: cuts already marked.  ``junctions``: cuts that attention could resume at and state could not.
    ``denied``: tiers that failed this request.  ``state``: what the next plan tells of its recurrent state.
    ``impatient``: it followed a leader that did not advance, and follows nobody again.
    """

    request_id: RequestId
    tokens: Sequence[int]
    prompt_tokens: int
    chain: KeyChain
    reuse: bool = True
    table: BlockTable | None = None
    computed: int = 0
    committed: list[int] = field(default_factory=list)
    hit: HitReport = field(default_factory=HitReport)
    ticket: Parked | None = None
    probing_until: float | None = None
    answers: dict[TierId, dict[BlockKey, bool]] = field(default_factory=dict)
    """What asked tiers said for the admission that is under way."""
    denied: set[TierId] = field(default_factory=set)
    following: Following | None = None
    impatient: bool = False
    failures: int = 0
    needs: int = 0
    """Pages that were lacking at the last try: it is not tried again until so many are available..."""
    matched_at: int = 0
    """...or the directory has published more than it had at that try."""
    boundaries_at: set[int] = field(default_factory=set)
    junctions: set[int] = field(default_factory=set)
    hints: CacheHints = PLAIN
    erased: tuple[frozenset[bytes], ...] = ()
    """Ends of units that were deleted while the request was open: it does not publish them again."""
    state: StatePlan | None = None
    copies: tuple[PageCopy, ...] = ()
    copy_lease: Lease | None = None

    @property
    def is_private(self) -> bool:
        """Whether (a part of) what it computes cannot be found by others."""
        return self.hints.no_store or bool(self.erased)

    def is_erased(self, digest: bytes) -> bool:
        return any(digest in some for some in self.erased)
