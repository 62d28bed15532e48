"""Giving keys to what a request computed, and marking the cuts at which others may resume.

Owns: which units a request publishes, which of them are boundaries, what a request's end counts as used.  Does not own:
where copies go (``stores``), eviction (``cache.retention``).  Thread: the scheduler's only.

Boundaries are the prompt's end (where the same prompt, alone or continued, resumes), the end of the answer, junctions
(cuts at which a hit was taken, which ``admission`` marks, or would have been, had there been a state), and one cut per
doubling in long contexts of models with recurrent state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from ostinato.cache.directory import Entry, Place
from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import keeps_checkpoints, keeps_interior
from ostinato.cache.layout import GroupSpec
from ostinato.cache.table import BlockTable
from ostinato.hierarchy.checkpoints import lasting_cuts, prompt_cuts
from ostinato.hierarchy.residency import Residency
from ostinato.hierarchy.tiers import Core
from ostinato.ids import DEVICE, HOLE, Ordinal, RequestId

RETURN_TICKS: Final = 256
"""What is expected to return counts as used so many uses later than it was: it is kept longer, and not for ever."""


class Handed(NamedTuple):
    """A checkpoint of recurrent state that became a boundary."""

    request_id: RequestId
    entry: Entry


class Boundaries:
    """Works on the directory's entries of one request at a time; notes checkpoints that become boundaries."""

    def __init__(self, core: Core, handed_over: list[Handed]) -> None:
        self._core = core
        self._handed_over = handed_over

    def publish(self, request: Residency, table: BlockTable) -> list[Entry]:
        """Give keys to the units that are full now; returns the new entries."""
        core, unit = self._core, request.chain.unit
        if not request.chain.covers(unit, request.computed // unit - 1):  # a slice of a long prompt costs
            request.chain.update(request.tokens[: request.computed])
        published = []
        for spec in core.layout.groups:
            for ordinal in range(request.committed[spec.group], request.computed // spec.hash_unit):
                slot = table.slot(spec.group, ordinal // spec.page_units)
                if slot == HOLE:  # of recurrent state only some units exist
                    continue
                key = BlockKey(spec.group, request.chain.digest(spec.hash_unit, ordinal))
                if request.erased and request.is_erased(key.digest):
                    continue
                place = Place(slot, core.device.pool.generation[slot], None)
                entry = core.directory.write(key, Ordinal(ordinal), DEVICE, place, keeps_interior(spec.kind))
                if entry is not None:
                    published.append(entry)
                else:
                    core.lifetimes.use(request, key)
            request.committed[spec.group] = request.computed // spec.hash_unit
        core.lifetimes.begin(request, [entry.key for entry in published])
        return published

    def mark_reached(self, request: Residency, before: int) -> list[Entry]:
        """Keep the cuts that were reached since token ``before`` and at which others may resume."""
        layout, computed = self._core.layout, request.computed
        cuts = [cut for cut in request.junctions if before < cut <= computed]
        cuts += lasting_cuts(layout, before, computed)
        if computed >= request.prompt_tokens:
            cuts += prompt_cuts(request, layout.granularity)
        return [entry for cut in cuts for entry in self._mark(request, cut)]

    def close(self, request: Residency) -> list[Entry]:
        """The request lets go: keep where it is now, and note the use.  Returns what was not marked before."""
        marked = self._mark(request, request.computed)
        tick = self._core.directory.next_tick()
        if request.hints.expect_return:
            tick += RETURN_TICKS
        for spec in self._core.layout.groups:
            # Interior units were used when they were computed; only what a cut needs counts as used now.
            cuts = (request.computed,) if keeps_interior(spec.kind) else tuple(request.boundaries_at)
            for cut in cuts:
                for entry in self._required(request, spec, cut):
                    entry.use(tick)
        return marked

    def _mark(self, request: Residency, tokens: int) -> list[Entry]:
        """Mark what the last cut at or before ``tokens`` requires; returns what was not marked before."""
        granularity = self._core.layout.granularity
        cut = tokens // granularity * granularity
        if cut in request.boundaries_at or not cut:
            return []
        request.boundaries_at.add(cut)
        marked = []
        for spec in self._core.layout.groups:
            if keeps_interior(spec.kind):
                continue
            for entry in self._required(request, spec, cut):
                if not entry.boundary:
                    entry.boundary = True
                    marked.append(entry)
                    if keeps_checkpoints(spec.kind):
                        self._handed_over.append(Handed(request.request_id, entry))
        return marked

    def _required(self, request: Residency, spec: GroupSpec, cut: int) -> Iterator[Entry]:
        """The entries that the group needs to resume at ``cut``, as far as they exist."""
        for low, high in spec.kind.required(cut, spec.hash_unit):
            for ordinal in range(low, high):
                key = BlockKey(spec.group, request.chain.digest(spec.hash_unit, ordinal))
                entry = self._core.directory.get(key)
                if entry is not None:
                    yield entry
