"""A device pool of bytes without a model: pages that movers can serve and nothing computes on.

Owns: the memory.  Does not own: what is in it.  Any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class BarePages:
    """Implements ``connectors.api.DevicePages``: ``count`` pages of ``page_bytes`` bytes.

    ``memory``: the same bytes, page after page.
    """

    def __init__(self, count: int, page_bytes: int) -> None:
        self.pages = torch.zeros((count, page_bytes), dtype=torch.uint8)
        self.memory = memoryview(self.pages.numpy().data).cast("B")

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, source_index: Sequence[int], target_index: Sequence[int]
    ) -> None:
        for here, there in zip(source_index, target_index, strict=True):
            target[there].copy_(source[here])
