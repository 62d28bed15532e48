"""What a model's layers keep, and what computing its tokens costs.

Owns: byte and FLOP counts of models.  Does not own: the cache layout (``cache.layout``), speeds (``machine``).

FLOPs of the tokens ``[a, b)``: ``2 * active * (b - a)`` for the weights, plus ``4 * heads * head_dim`` per layer for
each pair of a query and a key that it attends to (two products of two FLOPs each).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ostinato.cache.kinds import Full, State, Window
from ostinato.cache.layout import CacheLayout, LayerSpec, build_layout
from ostinato.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """``kv_bytes``: K and V of one token in one attention layer; ``state_bytes``: one state of one recurrent layer.

    ``active``: weights that one token passes through; ``weights``: all of them; ``query_width``: query heads times
    their size.
    """

    name: str
    active: float
    weights: float
    full_layers: int
    window_layers: int
    window: int
    state_layers: int
    kv_bytes: int
    state_bytes: int
    query_width: int

    def layers(self) -> list[LayerSpec]:
        half, full, window = self.kv_bytes // 2, self.full_layers, self.window_layers
        return [
            *(LayerSpec(index, Full(), (half, half)) for index in range(full)),
            *(LayerSpec(full + index, Window(self.window), (half, half)) for index in range(window)),
            *(
                LayerSpec(full + window + index, State(), (-(-self.state_bytes // 64) * 64,))
                for index in range(self.state_layers)
            ),
        ]

    def layout(self, unit: int) -> CacheLayout:
        """Groups and pages with hash units of ``unit`` tokens."""
        return build_layout(self.layers(), unit)

    def flops(self, start: int, stop: int) -> float:
        """To compute the tokens ``[start, stop)`` behind ``start`` others."""
        pairs = self.full_layers * (stop * stop - start * start) / 2
        if self.window_layers:
            pairs += self.window_layers * (_windowed(stop, self.window) - _windowed(start, self.window))
        return 2 * self.active * (stop - start) + 4 * self.query_width * pairs


def _windowed(tokens: int, window: int) -> float:
    """Pairs of a query and a key of the first ``tokens`` queries."""
    if tokens <= window:
        return tokens * tokens / 2
    return window * window / 2 + (tokens - window) * window


def _delta_net(value_heads: int, key_heads: int = 16, size: int = 128) -> int:
    """A gated delta net's fp32 state, and the last three inputs of its convolution in bf16."""
    return value_heads * size * size * 4 + (2 * key_heads + value_heads) * size * 3 * 2


def _mamba2(heads: int, size: int, state: int, groups: int, item: int) -> int:
    """A Mamba 2 state of ``item`` bytes per number, and the last three inputs of its convolution in bf16."""
    return heads * size * state * item + (heads * size + 2 * groups * state) * 3 * 2


SHAPES: Final[Mapping[str, ModelShape]] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            ModelShape("llama3-70b", 70e9, 70e9, 80, 0, 0, 0, 4096, 0, 8192),
            ModelShape("gemma3-27b", 26e9, 27e9, 10, 52, 1024, 0, 8192, 0, 4096),
            ModelShape("gpt-oss-120b", 5.1e9, 117e9, 18, 18, 128, 0, 2048, 0, 4096),
            ModelShape("qwen3-next-80b", 3.0e9, 80e9, 12, 0, 0, 36, 2048, _delta_net(32), 4096),
            ModelShape("qwen3.5-397b", 17e9, 397e9, 15, 0, 0, 45, 2048, _delta_net(64), 8192),
            ModelShape("jamba1.5-large", 94e9, 398e9, 9, 0, 0, 63, 4096, 16384 * (16 * 4 + 3 * 2), 8192),
            ModelShape("nemotron3-nano", 3.2e9, 30e9, 6, 0, 0, 23, 1024, _mamba2(64, 64, 128, 8, 4), 4096),
            ModelShape("nemotron-h-56b", 56e9, 56e9, 10, 0, 0, 54, 4096, _mamba2(256, 64, 256, 8, 2), 8192),
        )
    }
)
"""Models by name; bf16 keys and values."""


def find_shape(name: str) -> ModelShape:
    if name not in SHAPES:
        raise ConfigError(f"no shape of a model is called {name!r}; known: {', '.join(SHAPES)}")
    return SHAPES[name]
