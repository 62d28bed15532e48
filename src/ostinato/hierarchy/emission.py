"""Stores that a connector itself asks for, in a hook, instead of being offered blocks.

Owns: turning positions of a request's rows into an order.  Does not own: the order's life (``transfer.book``), what the
connector does with it.  Thread: the scheduler's only.

An order carries the blocks of all groups *by position*, holes kept, as the table has them now; its moves name only what
is held, and each page is pinned once, however often it is named: in the row, and again as a checkpoint that was just
handed over.  A unit that another request published first is read from the page under that key: the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ostinato.cache.directory import Entry
from ostinato.cache.keys import BlockKey
from ostinato.cache.table import BlockTable
from ostinato.hierarchy.residency import Residency
from ostinato.hierarchy.stores import order_store, pin_room
from ostinato.hierarchy.tiers import Core
from ostinato.ids import DEVICE, HOLE, JobId, RequestId, Step, TierId


class Emitter:
    """``requests``: the hierarchy's own map.  ``step``: the last step whose forward pass is over."""

    def __init__(self, core: Core, requests: Mapping[RequestId, Residency], step: Callable[[], Step]) -> None:
        self._core = core
        self._requests = requests
        self._step = step

    def emit(self, tier: TierId, request_id: RequestId, positions: Sequence[range]) -> JobId | None:
        """Order a store to ``tier`` of the pages at ``positions`` of each group's row.

        None when there is nothing to store: no table, no full unit among them, or stores pin too much already.
        """
        request = self._requests.get(request_id)
        if request is None or request.table is None or request.is_private:
            return None
        table = request.table
        blocks = tuple(
            tuple(table.slot(group, position) for position in places) for group, places in enumerate(positions)
        )
        entries = dict.fromkeys(
            entry
            for group, places in enumerate(positions)
            for position in places
            for entry in self._full_units(request, table, group, position)
        )
        pages = {entry.places[DEVICE].slot for entry in entries} - self._core.book.stored_slots.keys()
        if not all(self._core.may_have(tier, entry.key) for entry in entries):
            return None
        if not entries or len(pages) > pin_room(self._core):
            return None
        return order_store(self._core, tier, [(entry, HOLE) for entry in entries], None, self._step(), blocks)

    def _full_units(self, request: Residency, table: BlockTable, group: int, position: int) -> list[Entry]:
        """What is published of one page."""
        spec = self._core.layout.groups[group]
        if table.slot(group, position) == HOLE:
            return []
        found = []
        for ordinal in range(position * spec.page_units, (position + 1) * spec.page_units):
            if request.chain.covers(spec.hash_unit, ordinal):
                entry = self._core.directory.get(BlockKey(spec.group, request.chain.digest(spec.hash_unit, ordinal)))
                place = entry.places.get(DEVICE) if entry is not None else None
                if entry is not None and place is not None and place.ready:
                    found.append(entry)
        return found
