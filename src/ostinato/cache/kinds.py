"""Cache kinds: which units of a group must exist for a request to resume at token ``n``.

Owns: the rule of each kind, and every ``isinstance`` on a kind.  Does not own: keys, slots, tables.
Invariant (*the law*, property-tested): requirements only shrink as ``n`` grows.  If ordinal ``m`` is required at ``n``,
and ``m < n' / unit <= n / unit``, then ``m`` is required at ``n'``.  So a missing ordinal rules out every cut in
``(m * unit, n]`` and one short loop (``match.longest_hit``) is exact for any mix of kinds.

::

    tokens      0        16        32        48        64   n = 64, unit 16, window 20
    Full        [####### required ######################]
    Window      .................. [#### required ######]   first query at 64 attends from 64 - 20 + 1 = 45
    State       ............................. [#########]   the checkpoint taken at exactly 64

A *unit* is the group's hash unit in tokens; an *ordinal* counts units from the start of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]
"""Half-open range of ordinals."""


def ceil_div(value: int, unit: int) -> int:
    return -(-value // unit)


@dataclass(frozen=True, slots=True)
class Full:
    """Full attention; also latent (MLA) pages and indexer pages, which differ in size only."""

    def required(self, n: int, unit: int) -> tuple[Range, ...]:
        return ((0, n // unit),)

    def live(self, n: int, unit: int) -> tuple[Range, ...]:
        return ((0, ceil_div(n, unit)),)


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding window of ``window`` tokens (the query's own position included), after ``sinks`` leading tokens."""

    window: int
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window < 1 or self.sinks < 0:
            raise ValueError(f"a window needs window >= 1 and sinks >= 0, got {self.window} and {self.sinks}")

    def required(self, n: int, unit: int) -> tuple[Range, ...]:
        return _sinks_and_tail(self.sinks, max(0, n - self.window + 1) // unit, n // unit, unit)

    def live(self, n: int, unit: int) -> tuple[Range, ...]:
        return _sinks_and_tail(self.sinks, max(0, n - self.window + 1) // unit, ceil_div(n, unit), unit)


@dataclass(frozen=True, slots=True)
class Chunked:
    """Local attention inside absolute chunks of ``chunk`` tokens."""

    chunk: int

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"a chunk needs at least one token, got {self.chunk}")

    def required(self, n: int, unit: int) -> tuple[Range, ...]:
        return ((n // self.chunk * self.chunk // unit, n // unit),)

    def live(self, n: int, unit: int) -> tuple[Range, ...]:
        return ((n // self.chunk * self.chunk // unit, ceil_div(n, unit)),)


@dataclass(frozen=True, slots=True)
class State:
    """Recurrent state (Mamba, linear attention, short convolution): one checkpoint, taken at exactly ``n``.

    Unit ``m`` stands for the state after token ``(m + 1) * unit``; presence is sparse by nature.  Live are the working
    state (in the page of the unit that is being filled) and the last checkpoint before it, so that whenever the
    request ends, the state at its last whole unit exists.
    """

    def required(self, n: int, unit: int) -> tuple[Range, ...]:
        return ((n // unit - 1, n // unit),) if n >= unit else ()

    def live(self, n: int, unit: int) -> tuple[Range, ...]:
        return ((max(0, n // unit - 1), ceil_div(n, unit)),) if n else ()


Kind: TypeAlias = Full | Window | Chunked | State


def _sinks_and_tail(sinks: int, low: int, high: int, unit: int) -> tuple[Range, ...]:
    """The leading sink units and the tail ``[low, high)``, merged where they touch."""
    head = min(ceil_div(sinks, unit), high)
    if low <= head:
        return ((0 if head else low, high),)
    return ((0, head), (low, high)) if head else ((low, high),)


def contains(ranges: tuple[Range, ...], ordinal: int) -> bool:
    return any(low <= ordinal < high for low, high in ranges)


def keeps_interior(kind: Kind) -> bool:
    """Whether every unit of the kind serves all later cuts (so that none of them is ever *interior*)."""
    return isinstance(kind, Full)


def keeps_checkpoints(kind: Kind) -> bool:
    """Whether a unit of the kind holds everything before it, so that only some units ever exist."""
    return isinstance(kind, State)


def peak_units(kind: Kind, tokens: int, in_flight: int, unit: int) -> int:
    """Most units that a request of ``tokens`` holds at once when up to ``in_flight`` tokens are computed per step."""
    total = ceil_div(tokens, unit)
    match kind:
        case Full():
            return total
        case Window(window, sinks):
            return min(total, ceil_div(window - 1 + in_flight, unit) + 1 + ceil_div(sinks, unit))
        case Chunked(chunk):
            return min(total, ceil_div(chunk + in_flight, unit) + 1)
        case State():
            # The checkpoint it resumes from, the one at the prompt's end, and the working state.
            return min(total, 3)


def describe(kind: Kind) -> str:
    """Short text for tables and fingerprints, e.g. ``window 512``."""
    match kind:
        case Full():
            return "full"
        case Window(window, sinks):
            return f"window {window}" + (f" + {sinks} sinks" if sinks else "")
        case Chunked(chunk):
            return f"chunked {chunk}"
        case State():
            return "state"
