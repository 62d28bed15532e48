"""What one request takes of a pool, and what it would take without padding.

Owns: those sums, over what a request holds when it has computed a number of tokens.  Does not own: the layout, or
what a pool really holds (``pool``).  Pure; any thread.
"""

from __future__ import annotations

from ostinato.cache.kinds import ceil_div, keeps_interior
from ostinato.cache.layout import CacheLayout, GroupSpec


def held_bytes(layout: CacheLayout, tokens: int) -> int:
    """Bytes of the pages of a request of ``tokens`` tokens, at least one page per group."""
    return layout.page_bytes * sum(max(1, _pages(spec, tokens)) for spec in layout.groups)


def needed_bytes(layout: CacheLayout, tokens: int) -> int:
    """Bytes of the live units of such a request, without padding and without the rest of its pages."""
    return sum(max(1, _units(spec, tokens)) * spec.unit_bytes for spec in layout.groups)


def waste(layout: CacheLayout, tokens: int) -> float:
    """Bytes held beyond those needed, as a share of those needed: 0.04 is 4 %."""
    return held_bytes(layout, tokens) / needed_bytes(layout, tokens) - 1


def bytes_per_token(layout: CacheLayout, tokens: int) -> float:
    """Bytes held per token by a request of ``tokens`` tokens, at least one."""
    return held_bytes(layout, tokens) / tokens


def checkpoint_bytes(layout: CacheLayout, tokens: int) -> int:
    """Bytes that keep one more cut of a prompt resumable, here at ``tokens``, beside its full attention.

    That is one state of every recurrent layer, and the windows behind the cut.
    """
    pages = 0
    for spec in layout.groups:
        if not keeps_interior(spec.kind):
            for low, high in spec.kind.required(tokens, spec.hash_unit):
                pages += ceil_div(high, spec.page_units) - low // spec.page_units
    return pages * layout.page_bytes


def longest_context(layout: CacheLayout, memory: int, in_flight: int, limit: int) -> int:
    """Most tokens, up to ``limit``, that one request may have when the pool has ``memory`` bytes.

    ``in_flight``: tokens computed in one step.
    """
    pages, low, high = memory // layout.page_bytes, 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if layout.peak_pages(middle, in_flight) <= pages:
            low = middle
        else:
            high = middle - 1
    return low


def requests_that_fit(layout: CacheLayout, memory: int, tokens: int) -> int:
    """Requests of ``tokens`` tokens, none sharing a prefix, whose pages fit into ``memory`` bytes between steps.

    Inside a unit a request holds more than at its end: a checkpoint beside the working state, a window's partial ends.
    """
    return memory // max(held_bytes(layout, tokens), held_bytes(layout, max(1, tokens - 1)))


def _units(spec: GroupSpec, tokens: int) -> int:
    return sum(high - low for low, high in spec.kind.live(tokens, spec.hash_unit))


def _pages(spec: GroupSpec, tokens: int) -> int:
    ranges = spec.kind.live(tokens, spec.hash_unit)
    return sum(ceil_div(high, spec.page_units) - low // spec.page_units for low, high in ranges if high > low)
