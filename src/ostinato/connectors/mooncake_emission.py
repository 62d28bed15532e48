"""Which blocks of a request go to the store, when the connector itself decides.

Owns: the choice, and per request how many units of each group were emitted.  Does not own: block ids (they are read
from the table when an order is made, ``context.emit``), keys, the life of orders.  Thread: the scheduler's only.

Stored is what lets a later request resume where this one's prompt or answer ended, or where it resumed itself:

* full attention: every unit, as it fills;
* windows and chunks: what those cuts require.  A page that falls out of the window at a cut which may be one of them
  goes at once, as it is the last time that the table names it; the rest of the window follows when the first decoding
  step shows that the prompt had ended, or with the release::

      step computes  [.... chunk ....][.... chunk ....][..last]  1  1  1 ... 1
      window units    ------------ x   ------------ x   xxxxxxx     x     xx      x: emitted

* recurrent state: checkpoints that are boundaries, and the last one of the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import Range, ceil_div, keeps_checkpoints, keeps_interior
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.connectors.context import KVConnectorSchedulerContext
from ostinato.ids import HOLE, JobId, RequestId, TierId

PIECE_PAGES: Final = 64
"""Pages of a group in one order; less where stores may not pin so many."""

LAST_CALL_UNITS: Final = 4
"""Most units that leave a window at once, and are stored for it."""


class Wanted(NamedTuple):
    """Units ``[low, high)`` of a group."""

    group: int
    low: int
    high: int


@dataclass(slots=True)
class _Progress:
    """One request.  ``emitted[g]``: units of group ``g`` before which everything was emitted or is not wanted."""

    emitted: list[int]
    computed: int = 0
    decoding: bool = False
    retry_at: int = 0
    """No room at the last try: not before this many tokens are computed."""
    states: list[Wanted] = field(default_factory=list)
    """Checkpoints that found no room yet."""


class Cuts:
    """What of a group the cuts around a token require."""

    def __init__(self, layout: CacheLayout) -> None:
        self._granularity = layout.granularity

    def leaving(self, spec: GroupSpec, computed: int) -> list[Wanted]:
        """Units that a resumption here would need, but the next step does not."""
        live = spec.kind.live(computed, spec.hash_unit)
        kept_from = live[-1][0] if live else ceil_div(computed, spec.hash_unit)
        tail = [(low, min(high, kept_from)) for _, low, high in self.tail(spec, computed) if low < kept_from]
        # A chunk that ends here goes as a whole; a prompt that ends just here is too rare to store all chunks for.
        return [Wanted(spec.group, low, high) for low, high in tail if high - low <= LAST_CALL_UNITS]

    def tail(self, spec: GroupSpec, end: int) -> list[Wanted]:
        """What the cuts at ``end`` require: the prompt alone computes its last token again, so there are two."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted(self._required(spec, end - 1) + self._required(spec, end)):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            elif low < high:
                merged.append((low, high))
        return [Wanted(spec.group, low, high) for low, high in merged]

    def _required(self, spec: GroupSpec, tokens: int) -> list[Range]:
        cut = tokens // self._granularity * self._granularity
        return list(spec.kind.required(cut, spec.hash_unit))

    def checkpoint(self, spec: GroupSpec, tokens: int) -> Wanted:
        last = tokens // spec.hash_unit
        return Wanted(spec.group, max(0, last - 1), last)


class Emission:
    """``ready()``: whether the store takes anything now.  ``emitted(job, request)`` is told of each order."""

    def __init__(
        self,
        tier: TierId,
        layout: CacheLayout,
        context: KVConnectorSchedulerContext,
        ready: Callable[[], bool],
        emitted: Callable[[JobId, RequestId], None],
    ) -> None:
        self._tier = tier
        self._layout = layout
        self._cuts = Cuts(layout)
        self._context = context
        self._ready = ready
        self._told = emitted
        self._progress: dict[RequestId, _Progress] = {}
        self._fresh: Counter[int] = Counter()
        """Units per group that the step of the request in question published."""
        self._full = [spec for spec in layout.groups if keeps_interior(spec.kind)]
        self._states = [spec for spec in layout.groups if keeps_checkpoints(spec.kind)]
        self._windows = [spec for spec in layout.groups if spec not in self._full and spec not in self._states]

    def news(self, keys: Sequence[BlockKey]) -> None:
        """Freshly computed units of the request whose commit comes next."""
        self._fresh.update(key.group for key in keys)

    def commit(self, request_id: RequestId, computed: int) -> None:
        fresh, self._fresh = self._fresh, Counter()
        progress = self._progress.get(request_id)
        wanted: list[Wanted] = []
        if progress is None:
            progress = self._progress[request_id] = self._begin(computed, fresh)
            wanted += self._junction(progress)
        before, progress.computed = progress.computed, computed
        began_decoding = bool(before) and computed - before == 1 and not progress.decoding
        progress.decoding = bool(before) and computed - before == 1
        wanted += self._filled(progress)
        for spec in self._windows:
            wanted += self._cuts.leaving(spec, computed)
            if began_decoding:
                wanted += self._cuts.tail(spec, before)
        self._note_states(request_id, progress)
        self._emit(request_id, progress, wanted)

    def release(self, request_id: RequestId) -> None:
        """The request's last cut; what found no room now is not stored."""
        progress = self._progress.pop(request_id, None)
        if progress is None:
            return
        wanted = self._filled(progress)
        for spec in self._windows:
            wanted += self._cuts.tail(spec, progress.computed)
        progress.states += [self._cuts.checkpoint(spec, progress.computed) for spec in self._states]
        progress.retry_at = 0
        self._emit(request_id, progress, wanted)

    # What is wanted.

    def _begin(self, computed: int, fresh: Counter[int]) -> _Progress:
        """Units before the fresh ones were there already: emitted by whoever computed them, or loaded."""
        emitted = [0] * len(self._layout.groups)
        for spec in self._full:
            emitted[spec.group] = max(0, computed // spec.hash_unit - fresh[spec.group])
        return _Progress(emitted)

    def _junction(self, progress: _Progress) -> list[Wanted]:
        """The cut at which the request itself resumed."""
        cuts = [progress.emitted[spec.group] * spec.hash_unit for spec in self._full]
        granularity = self._layout.granularity
        cut = min(cuts, default=0) // granularity * granularity
        if not cut:
            return []
        progress.states += [self._cuts.checkpoint(spec, cut) for spec in self._states]
        ranges = [(spec, low, high) for spec in self._windows for low, high in spec.kind.required(cut, spec.hash_unit)]
        return [Wanted(spec.group, low, high) for spec, low, high in ranges]

    def _filled(self, progress: _Progress) -> list[Wanted]:
        ends = [(spec.group, progress.computed // spec.hash_unit) for spec in self._full]
        return [Wanted(group, progress.emitted[group], end) for group, end in ends]

    def _note_states(self, request_id: RequestId, progress: _Progress) -> None:
        if not self._states:
            return
        for state in self._context.boundary_states():
            if state.request_id == request_id:
                progress.states.append(self._cuts.checkpoint(self._layout.groups[state.group], state.tokens))

    # Orders.

    def _emit(self, request_id: RequestId, progress: _Progress, wanted: Sequence[Wanted]) -> None:
        ranges = self._held(request_id, progress, wanted)
        if not (ranges or progress.states) or progress.computed < progress.retry_at:
            return
        if self._ready() and self._emit_ranges(request_id, progress, ranges):
            progress.states = self._emit_states(request_id, progress.states)
            if not progress.states:
                return
        progress.retry_at = progress.computed + self._layout.base_unit

    def _held(self, request_id: RequestId, progress: _Progress, wanted: Sequence[Wanted]) -> list[Wanted]:
        """The wanted units without those that were emitted, and without leading ones that the table has let go."""
        found = []
        for group, low, high in wanted:
            spec, low = self._layout.groups[group], max(low, progress.emitted[group])
            pages = self._context.blocks(request_id, group)
            if low >= high or pages is None:
                continue
            count = len(pages)
            while low < high and (low // spec.page_units >= count or pages[low // spec.page_units] == HOLE):
                low = (low // spec.page_units + 1) * spec.page_units
            if low < high:
                found.append(Wanted(group, low, high))
        return found

    def _emit_ranges(self, request_id: RequestId, progress: _Progress, ranges: Sequence[Wanted]) -> bool:
        """Orders for at most one range per group at a time; False when there was no room for all."""
        left, size = list(ranges), PIECE_PAGES
        while left:
            chosen: dict[int, Wanted] = {}
            for item in left:
                chosen.setdefault(item.group, item)
            positions, ends = self._positions(list(chosen.values()), size)
            job = self._context.emit(self._tier, request_id, positions)
            if job is None:
                if size == 1:
                    return False
                size //= 4
                continue
            self._told(job, request_id)
            for group, end in ends.items():
                progress.emitted[group] = max(progress.emitted[group], end)
            left = [item for item in left if item.high > progress.emitted[item.group]]
            left = [item._replace(low=max(item.low, progress.emitted[item.group])) for item in left]
        return True

    def _emit_states(self, request_id: RequestId, states: Sequence[Wanted]) -> list[Wanted]:
        """Those that are held and found no room."""
        left = []
        for item in dict.fromkeys(states):
            pages = self._context.blocks(request_id, item.group)
            if pages is None or item.low >= min(item.high, len(pages)) or pages[item.low] == HOLE:
                continue
            positions = [range(0)] * len(self._layout.groups)
            positions[item.group] = range(item.low, item.high)
            job = self._context.emit(self._tier, request_id, positions)
            if job is None:
                left.append(item)
            else:
                self._told(job, request_id)
        return left

    def _positions(self, chosen: Sequence[Wanted], size: int) -> tuple[list[range], dict[int, int]]:
        """Pages of each group, at most ``size``, and the unit at which they end."""
        positions, ends = [range(0)] * len(self._layout.groups), {}
        for group, low, high in chosen:
            units = self._layout.groups[group].page_units
            first = low // units
            last = min(ceil_div(high, units), first + size)
            positions[group] = range(first, last)
            ends[group] = min(high, last * units)
        return positions, ends
