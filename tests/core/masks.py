"""What a request that resumes at token ``n`` needs, derived from the attention mask alone.

Nothing here calls a kind's own ``required`` or ``live``: this is the independent side of every comparison.
"""

from __future__ import annotations

from functools import cache

from ostinato.cache.kinds import Chunked, Full, Kind, State, Window


def attends(kind: Kind, position: int, token: int) -> bool:
    """Whether the query at ``position`` may attend to ``token``."""
    match kind:
        case Full():
            return token <= position
        case Window(window, sinks):
            return token <= position and (position - window < token or token < sinks)
        case Chunked(chunk):
            return token <= position and token // chunk == position // chunk
        case State():
            raise AssertionError("a recurrent state has no mask")


def reach(kind: Kind) -> int:
    """How many positions ahead a mask can differ from the one at the cut."""
    match kind:
        case Window(window, _):
            return window + 1
        case Chunked(chunk):
            return chunk + 1
        case _:
            return 1


@cache
def needed_units(kind: Kind, n: int, unit: int) -> frozenset[int]:
    """Ordinals of the units below ``n`` that some position at or after ``n`` may read."""
    if n == 0:
        return frozenset()
    if isinstance(kind, State):
        return frozenset({n // unit - 1}) if n >= unit else frozenset()
    ahead = range(n, n + reach(kind))
    return frozenset(token // unit for token in range(n) if any(attends(kind, position, token) for position in ahead))


@cache
def read_units(kind: Kind, start: int, stop: int, unit: int) -> frozenset[int]:
    """Units with tokens below ``start`` that computing positions ``start .. stop - 1`` reads."""
    if start == 0:
        return frozenset()
    if isinstance(kind, State):
        return frozenset({(start - 1) // unit})
    return frozenset(
        token // unit
        for token in range(start)
        if any(attends(kind, position, token) for position in range(start, stop))
    )
