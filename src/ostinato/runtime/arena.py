"""The device's page pool: one allocation of bytes, and each layer's view of it.

Owns: the memory, the views, copies inside it, and the check that the machine has that much.  Does not own: which page
holds what (``cache.pool`` decides, in the other plane).

::

    raw uint8 [num_pages, page_bytes]                             64-byte aligned
    page  | unit 0                                   | unit 1 ... |   page_units units of unit_stride bytes
    unit  | layer a: K [heads, 16, dim] V [heads, 16, dim] | layer b: ... | padding |

A *kernel block* is one unit: block ``page * page_units + unit``, ``unit_stride`` bytes apart.  A layer's keys are the
strided view ``[blocks, heads, 16, dim]`` that starts at the layer's offset inside a unit.  Every group lays out the
same bytes in its own way; a page belongs to one group at a time.

Thread: the worker's; movers read and write whole ranges of ``raw`` for pages that the plan has given them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from ostinato.cache.layout import ALIGNMENT, CacheLayout, GroupSpec
from ostinato.ids import SlotId
from ostinato.memory import check_memory
from ostinato.runtime.attention import KVPages
from ostinato.runtime.specs import LayerGeometry, ModelSpecs
from ostinato.scheduler.plan import PageCopy

_NAN: Final = float("nan")


@dataclass(frozen=True, slots=True)
class LayerPages:
    """A layer's place: its group's index, and its keys and values in the arena."""

    group: int
    pages: KVPages


class Arena:
    """``num_pages`` pages of ``layout``.  Raises :class:`CapacityError` when the machine lacks the memory.

    ``poison`` fills the pages with NaN, so that a test sees any read of a number that was never written.
    """

    def __init__(self, layout: CacheLayout, specs: ModelSpecs, num_pages: int, poison: bool = False) -> None:
        check_memory("the device pool", num_pages * layout.page_bytes)
        self.layout = layout
        self.num_pages = num_pages
        self._dtype = specs.dtype
        # Written once here, so that a machine that promised too much says so at start and not in mid-service.
        self.raw = _aligned(num_pages, layout.page_bytes)
        self._typed = self.raw.view(specs.dtype)
        if poison:
            self._typed.fill_(_NAN)
        self.layers: Mapping[int, LayerPages] = MappingProxyType(
            {
                layer: LayerPages(index, view)
                for index, group in enumerate(layout.groups)
                for layer, view in self._views(group, specs)
            }
        )

    def copy(self, order: PageCopy) -> None:
        """Copy part of one page over the same part of another."""
        end = order.offset + order.length
        assert 0 <= order.offset < end <= self.layout.page_bytes, order
        self.raw[order.target, order.offset : end] = self.raw[order.source, order.offset : end]

    def poison_page(self, page: SlotId) -> None:
        """Forget what a page holds, in a way that cannot go unnoticed."""
        self._typed[page].fill_(_NAN)

    def _views(self, group: GroupSpec, specs: ModelSpecs) -> list[tuple[int, KVPages]]:
        views, offset = [], 0
        for layer in group.layers:
            shape = specs.geometry[layer]
            key = self._view(group, offset, shape, shape.key_dim)
            offset += shape.kv_heads * group.hash_unit * shape.key_dim * self._dtype.itemsize
            value = self._view(group, offset, shape, shape.value_dim)
            offset += shape.kv_heads * group.hash_unit * shape.value_dim * self._dtype.itemsize
            views.append((layer, KVPages(key, value)))
        assert offset == group.unit_bytes, (offset, group)
        return views

    def _view(self, group: GroupSpec, offset: int, shape: LayerGeometry, dim: int) -> torch.Tensor:
        """``[blocks, heads, unit, dim]``: one block per hash unit, ``offset`` bytes into each."""
        item, unit = self._dtype.itemsize, group.hash_unit
        return torch.as_strided(
            self._typed,
            size=(self.num_pages * group.page_units, shape.kv_heads, unit, dim),
            stride=(group.unit_stride // item, unit * dim, dim, 1),
            storage_offset=self._typed.storage_offset() + offset // item,
        )


def _aligned(num_pages: int, page_bytes: int) -> torch.Tensor:
    """Zeroed ``uint8 [num_pages, page_bytes]`` whose first byte is aligned for the widest vector load."""
    size = num_pages * page_bytes
    memory = torch.zeros(size + ALIGNMENT, dtype=torch.uint8)
    skip = -memory.data_ptr() % ALIGNMENT
    return memory[skip : skip + size].view(num_pages, page_bytes)
