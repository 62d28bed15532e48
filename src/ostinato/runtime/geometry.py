"""What a model's layers keep between tokens: the shapes, as plain values.

Owns: the types.  Does not own: finding them (``specs``), memory (``arena``).  Values; any thread.

A layer keeps keys and values, or a latent, per token (:class:`LayerGeometry`), or recurrent state per sequence
(:class:`StateGeometry`), or both, or it borrows an earlier layer's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch

from ostinato.cache.kinds import Kind
from ostinato.cache.layout import LayerSpec


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """How one layer's keys and values lie: ``kv_heads`` rows of ``key_dim`` and ``value_dim`` numbers per token.

    ``window`` and ``chunk`` are 0 for full attention.  ``source`` is the layer whose pages are read: the layer itself,
    or an earlier one whose keys and values it borrows (then it writes nothing and has no :class:`LayerSpec`).

    ``latent``: the layer caches a latent (MLA): one head, ``key_dim`` = rank of the latent, ``value_dim`` = width of
    the rotary part that all heads share.  In its pages a token is one row, the latent and then the rotary part: such
    rows serve as keys of all heads, and their first ``key_dim`` numbers as values (:attr:`attends`).
    """

    layer: int
    kind: Kind
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    source: int
    chunk: int = 0
    latent: bool = False

    @property
    def attends(self) -> tuple[int, int]:
        """(key, value) head dims of the attention over this layer's pages."""
        return (self.key_dim + self.value_dim, self.key_dim) if self.latent else (self.key_dim, self.value_dim)

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers per token in each buffer of its pages."""
        if self.latent:
            return (self.key_dim + self.value_dim,)
        return (self.kv_heads * self.key_dim, self.kv_heads * self.value_dim)


class StateUse(Enum):
    """Which of transformers' two kinds of state a buffer is."""

    CONV = "conv"
    """The last inputs of a causal convolution, ``[channels, kernel - 1]``, in the model's dtype."""
    RECURRENT = "recurrent"
    """What a scan carries from token to token, in float32."""


@dataclass(frozen=True, slots=True)
class StateBuffer:
    """One buffer of a layer's state: number ``index`` of its use, ``offset`` bytes into the layer's state."""

    use: StateUse
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateGeometry:
    """The recurrent state of one layer; ``size`` bytes, each buffer 64-byte aligned inside it."""

    layer: int
    buffers: tuple[StateBuffer, ...]
    size: int


@dataclass(frozen=True, slots=True)
class ModelSpecs:
    """The cache side of a model.

    ``layers`` feed ``build_layout``: one entry for each layer's keys and values, one for each layer's state.
    ``geometry[i]`` and ``states[i]`` are layer ``i``'s, None where it has none.

    ``cache_argument``: the name under which the forward pass takes a cache; ``takes_positions``: whether it takes
    ``position_ids``.  ``row_offsets``: some layer asks the cache for its length, to add it to the numbers of rows.
    """

    layers: tuple[LayerSpec, ...]
    geometry: tuple[LayerGeometry | None, ...]
    states: tuple[StateGeometry | None, ...]
    cache_argument: str
    dtype: torch.dtype
    takes_positions: bool = True
    row_offsets: bool = False
