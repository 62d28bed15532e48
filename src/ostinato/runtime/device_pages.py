"""The device pool as movers see it: bytes of pages, and a fast way to copy whole ones.

Owns: the choice of the copy.  Does not own: the memory (``arena``), which pages (orders say).  Any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.runtime import native
from ostinato.runtime.arena import Arena


class ArenaPages:
    """Implements ``connectors.api.DevicePages`` over an arena."""

    def __init__(self, arena: Arena) -> None:
        self.pages = arena.raw
        self._native = native.load()[0] is not None

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, source_index: Sequence[int], target_index: Sequence[int]
    ) -> None:
        """``target[target_index[i]] = source[source_index[i]]`` for all ``i``; rows are whole pages."""
        if self._native:
            index = torch.tensor([source_index, target_index], dtype=torch.int64)
            torch.ops.ostinato.copy_pages(source, target, index[0], index[1])
            return
        for here, there in zip(source_index, target_index, strict=True):
            target[there].copy_(source[here])
