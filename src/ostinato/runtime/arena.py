"""The device's page pool: one allocation of bytes, and each layer's view of it.

Owns: the memory, the views, copies inside it, and the check that the machine has that much.  Does not own: which page
holds what (``cache.pool`` decides, in the other plane).

::

    raw uint8 [num_pages, page_bytes]                             64-byte aligned
    page  | unit 0                                   | unit 1 ... |   page_units units of unit_stride bytes
    unit  | layer a: K [heads, 16, dim] V [heads, 16, dim] | layer b: ... | padding |
    or    | layer a: latent and rotary part [16, rank + rope]  | layer b: ... | padding |
    or    | layer a: conv [channels, kernel - 1] | recurrent [...] float32 | layer b: ... | padding |   one state each

A *kernel block* is one unit: block ``page * page_units + unit``, ``unit_stride`` bytes apart.  A layer's keys are the
strided view ``[blocks, heads, 16, dim]`` that starts at the layer's offset inside a unit; a buffer of its state is the
view ``[blocks, *shape]``.  Every group lays out the same bytes in its own way; a page belongs to one group at a time.

Thread: the worker's; movers read and write whole ranges of ``raw`` for pages that the plan has given them.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from ostinato.cache.kinds import keeps_checkpoints
from ostinato.cache.layout import ALIGNMENT, CacheLayout, GroupSpec
from ostinato.ids import SlotId
from ostinato.memory import check_memory
from ostinato.runtime.attention import KVPages
from ostinato.runtime.geometry import LayerGeometry, ModelSpecs, StateGeometry, StateUse
from ostinato.scheduler.plan import PageCopy

_NAN: Final = 0x7FC0
"""NaN as bfloat16, and, twice, as float32: every number of a page becomes one, whatever its dtype."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """A layer's place: its group's index, and its keys and values in the arena.

    For a latent ``pages.k`` is the whole row (latent and rotary part), ``pages.v`` its first columns: the same bytes.
    """

    group: int
    pages: KVPages


@dataclass(frozen=True, slots=True)
class LayerStates:
    """A layer's recurrent state: its group's index, and each buffer as ``[blocks, *shape]`` in its own dtype.

    Dense but for the stride between blocks.
    """

    group: int
    buffers: Mapping[tuple[StateUse, int], torch.Tensor]


class Arena:
    """``num_pages`` pages of ``layout``.  Raises :class:`CapacityError` when the machine lacks the memory.

    ``layers`` has an entry for each layer that keeps keys and values of its own, ``states`` for each with a state.
    ``poison`` fills the pages with NaN, so that a test sees any read of a number that was never written.
    """

    def __init__(self, layout: CacheLayout, specs: ModelSpecs, num_pages: int, poison: bool = False) -> None:
        check_memory("the device pool", num_pages * layout.page_bytes)
        self.layout = layout
        self.num_pages = num_pages
        self._dtype = specs.dtype
        self.raw = _aligned(num_pages, layout.page_bytes)
        if poison:
            self.raw.view(torch.int16).fill_(_NAN)
        layers: dict[int, LayerPages] = {}
        states: dict[int, LayerStates] = {}
        for index, group in enumerate(layout.groups):
            if keeps_checkpoints(group.kind):
                views = self._states(group, specs.states)
                states |= {layer: LayerStates(index, buffers) for layer, buffers in views.items()}
            else:
                layers |= {layer: LayerPages(index, kv) for layer, kv in self._pages(group, specs.geometry).items()}
        self.layers: Mapping[int, LayerPages] = MappingProxyType(layers)
        self.states: Mapping[int, LayerStates] = MappingProxyType(states)

    def copy(self, order: PageCopy) -> None:
        """Copy part of one page over the same part of another."""
        end = order.offset + order.length
        assert 0 <= order.offset < end <= self.layout.page_bytes, order
        self.raw[order.target, order.offset : end] = self.raw[order.source, order.offset : end]

    def poison_page(self, page: SlotId) -> None:
        """Forget what a page holds, in a way that cannot go unnoticed."""
        self.raw[page].view(torch.int16).fill_(_NAN)

    def _pages(self, group: GroupSpec, geometry: Sequence[LayerGeometry | None]) -> dict[int, KVPages]:
        views, offset, unit = {}, 0, group.hash_unit
        for layer in group.layers:
            shape = geometry[layer]
            assert shape is not None and shape.source == layer, f"layer {layer} has no keys and values of its own"
            key_dim, value_dim = shape.attends
            key = self._view(group, offset, (shape.kv_heads, unit, key_dim), self._dtype)
            if shape.latent:
                value = key[..., :value_dim]
            else:
                behind = offset + _bytes(key)
                value = self._view(group, behind, (shape.kv_heads, unit, value_dim), self._dtype)
            views[layer] = KVPages(key, value)
            offset += sum(shape.parts) * unit * self._dtype.itemsize
        assert offset == group.unit_bytes, (offset, group)
        return views

    def _states(
        self, group: GroupSpec, geometry: Sequence[StateGeometry | None]
    ) -> dict[int, Mapping[tuple[StateUse, int], torch.Tensor]]:
        views: dict[int, Mapping[tuple[StateUse, int], torch.Tensor]] = {}
        offset = 0
        for layer in group.layers:
            state = geometry[layer]
            assert state is not None and group.page_units == 1, f"layer {layer} has no state"
            views[layer] = MappingProxyType(
                {
                    (buffer.use, buffer.index): self._view(group, offset + buffer.offset, buffer.shape, buffer.dtype)
                    for buffer in state.buffers
                }
            )
            offset += state.size
        assert offset == group.unit_bytes, (offset, group)
        return views

    def _view(self, group: GroupSpec, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """``[blocks, *shape]``: one block per hash unit, ``offset`` bytes into each."""
        typed, item = self.raw.view(dtype), dtype.itemsize
        inner = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        assert offset % item == group.unit_stride % item == 0, (offset, group)
        return torch.as_strided(
            typed,
            size=(self.num_pages * group.page_units, *shape),
            stride=(group.unit_stride // item, *inner),
            storage_offset=typed.storage_offset() + offset // item,
        )


def _bytes(view: torch.Tensor) -> int:
    """Of one block of a dense view."""
    return math.prod(view.shape[1:]) * view.dtype.itemsize


def _aligned(num_pages: int, page_bytes: int) -> torch.Tensor:
    """Zeroed ``uint8 [num_pages, page_bytes]`` whose first byte is aligned for the widest vector load.

    The system gives memory on its first use (to write all of 8 GiB at start takes six seconds), in huge pages where it
    has them.
    """
    size = num_pages * page_bytes
    memory = mmap.mmap(-1, size + ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    # It holds on to the mapping.
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -flat.data_ptr() % ALIGNMENT
    return flat[skip : skip + size].view(num_pages, page_bytes)
