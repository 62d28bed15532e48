"""The cache object that a transformers model is given in every forward pass over pages.

Owns: :class:`PagedCache`, its answers to everything that a model may ask of a cache, and :class:`Turn`, which tells a
convolution and the scan behind it whose state they work on.  Does not own: pages (found through the active context),
what is done with keys, values and states (``attention_hook``, ``mixers``).

The object holds nothing.  A model asks it for earlier states and is told that there are none, so it takes the path for
whole sequences; there our functions stand, which know where the states are::

    cache.get_conv_state(layer) -> None          cache.update_conv_state(x, layer) -> x, and a Turn begins
    causal_conv1d_fn(x, ...)                     the turn's layer: reads and writes its conv state in pages
    ..._scan(x, ...)                             the same layer's recurrent state
    cache.update_recurrent_state(...)            nothing is left to do

Thread: the worker's; several workers may share one model, each with a cache of its own.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers.cache_utils import Cache

from ostinato.runtime.context import ACTIVE
from ostinato.runtime.probe_cache import LAYER_KEY


@dataclass(slots=True)
class Turn:
    """One mixer's use of one layer's state, from ``update_conv_state`` on.

    ``scanned`` counts the heads whose recurrent state was used so far: some mixers scan their heads one after another.
    """

    layer: int
    state: int
    convolved: bool = False
    scanned: int = 0


UPDATED: Final[ContextVar[int | None]] = ContextVar("ostinato_updated", default=None)
"""The layer whose keys and values this thread last put into the cache; None once its attention has run."""
TURN: Final[ContextVar[Turn | None]] = ContextVar("ostinato_turn", default=None)
"""The state that the next convolution or scan of this thread belongs to."""


class PagedCache(Cache):
    """The cache object of every forward pass.  Holds nothing: pages are found through the active context.

    ``row_offsets``: the model adds the cache's length to the numbers of the rows to get their positions (Llama 4 does,
    to scale queries), so a length must be given for each row.
    """

    def __init__(self, layers: int, row_offsets: bool = False) -> None:
        self.layers = []
        self._count = layers
        self._row_offsets = row_offsets

    def __len__(self) -> int:
        return self._count

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Identity.  transformers passes on what is put into ``kwargs["kwargs"]`` to the attention function (5.24)."""
        UPDATED.set(layer_idx)
        if (bag := kwargs.get("kwargs")) is not None:
            bag[LAYER_KEY] = layer_idx
        return key_states, value_states

    # --------------------------------------------------------------------------------------------- recurrent state

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return False

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    def get_recurrent_state(self, *_: Any, **__: Any) -> None:
        return None

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Identity, and the beginning of the layer's :class:`Turn`."""
        TURN.set(Turn(layer_idx, state_idx))
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Nothing to do: the scan has written the states that it was told to write.  Ends the turn."""
        TURN.set(None)
        return recurrent_states

    # ----------------------------------------------------------------------------------------------------- lengths

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """No length is common to a packed batch; positions are always given, so hardly any model asks.

        With ``row_offsets`` a layer that asks for its own gets what has to be added to the rows' numbers.
        """
        return RowOffsets() if self._row_offsets and layer_idx is not None else 0

    def get_query_offset(self, layer_idx: int | None = None) -> Any:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        return query_length, 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self._count

    is_linear = is_dummy = is_sliding

    @property
    def is_compileable(self) -> bool:
        return False

    is_initialized = is_compileable


class RowOffsets:
    """What turns numbers of rows into positions when it is added to them; good for nothing else.

    ::

        rows 0 .. 7     | seq 0 at 16: 3 rows | seq 1 at 40: 4 rows  | padding |
        offsets           16  16  16            37  37  37  37         0
        arange + offsets  16  17  18            40  41  42  43         7
    """

    def __radd__(self, rows: torch.Tensor) -> torch.Tensor:
        step = ACTIVE.get()
        index = step.groups[0]
        counts = torch.tensor(index.query_lens)
        starts = torch.tensor(index.context_lens) - (counts.cumsum(0) - counts)
        offsets = rows.new_zeros(rows.shape)
        offsets[: step.tokens] = starts.repeat_interleave(counts)
        return rows + offsets
