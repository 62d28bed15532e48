"""Where a request keeps checkpoints of its recurrent state.

Owns: the choice of positions.  Does not own: pages (``cache.table``), marks (``boundaries``).  No side effects.
Thread: the scheduler's only.

Always: the cuts at the prompt's end.  While there is room that nobody else needs: junctions, and a grid that gets
coarser with the position, so that a prompt that parts from this one anywhere resumes at most 1/16 before::

    0 .. 512 tokens: every 16     512 .. 1024: every 32     1024 .. 2048: every 64     ...   (cuts of 16 tokens)

The grid is one of absolute positions: prompts that share a prefix keep the same checkpoints, once.
"""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.cache.kinds import keeps_checkpoints
from ostinato.cache.layout import CacheLayout
from ostinato.hierarchy.residency import Residency
from ostinato.hierarchy.tiers import Core

_DENSE = 32
"""Cuts from the start of a prompt up to which the grid has every one."""
_LASTING = 64
"""Cuts from which on one position per doubling is a boundary: a long prompt's checkpoints do not all go at once."""


class Checkpoints:
    """Positions for one request's next chunk."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._groups = sum(keeps_checkpoints(spec.kind) for spec in core.layout.groups)

    def stops(self, request: Residency, stop: int) -> tuple[int, ...]:
        """Ascending positions up to ``stop``, the end of the chunk, at which state is kept."""
        start = request.computed
        if not self._groups or stop - start == 1 or not self._core.config.reuse or request.hints.no_store:
            return (stop,)
        ends = {cut for cut in prompt_cuts(request, self._core.layout.granularity) if start < cut < stop} | {stop}
        wanted = [cut for cut in self._optional(request, start, stop) if cut not in ends]
        if wanted and request.table is not None:
            needed = request.table.missing_pages(start, sorted(ends))
            # Half of what is to spare: others take pages in this step as well.
            room = self._core.spare(needed + 2 * self._groups * len(wanted)) - needed
            wanted = wanted[: max(0, room // (2 * self._groups))]
        return tuple(sorted(ends.union(wanted)))

    def _optional(self, request: Residency, start: int, stop: int) -> list[int]:
        """Junctions, then the grid, its coarsest positions first."""
        unit = self._core.layout.granularity
        grid = [cut * unit for cut in range(start // unit + 1, -(-stop // unit)) if cut % grid_step(cut) == 0]
        grid.sort(key=lambda cut: cut // unit & -(cut // unit), reverse=True)
        return [*sorted(cut for cut in request.junctions if start < cut < stop), *grid]


def grid_step(cut: int) -> int:
    """Distance in cuts between the grid's positions around ``cut``: a power of two, at most 1/16 of ``cut``."""
    return 1 << max(0, (2 * cut // _DENSE).bit_length() - 1)


def lasting_cuts(layout: CacheLayout, start: int, stop: int) -> list[int]:
    """Cuts after ``start`` and up to ``stop`` whose checkpoints outlive the rest of the grid: one per doubling."""
    if not any(keeps_checkpoints(spec.kind) for spec in layout.groups):
        return []
    cut, cuts = _LASTING * layout.granularity, []
    while cut <= stop:
        if cut > start:
            cuts.append(cut)
        cut *= 2
    return cuts


def prompt_cuts(request: Residency, granularity: int) -> Sequence[int]:
    """The cuts at which the same prompt resumes.

    Alone (its last token is always computed), continued, and with another end: a chat's next turn often replaces the
    last few tokens, those that open the answer.
    """
    tokens = request.prompt_tokens
    ends = (tokens - granularity // 2, tokens - 1, tokens)
    return sorted({max(0, end) // granularity * granularity for end in ends} - {0})
