"""What published models put into the cache, from the numbers in their configs.

Keys, values and convolution states in bfloat16, recurrent states in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ostinato.cache.kinds import Chunked, Full, Kind, State, Window
from ostinato.cache.layout import LayerSpec

BF16, FP32 = 2, 4
Parts = tuple[int, ...]


def kv(heads: int, dim: int) -> Parts:
    return heads * dim * BF16, heads * dim * BF16


def latent(rank: int, rope: int) -> Parts:
    return rank * BF16, rope * BF16


def state(channels: int, kernel: int, recurrent: int = 0) -> Parts:
    """A convolution over ``channels`` and a recurrent state of ``recurrent`` numbers, each padded to 64 bytes."""
    sizes = (channels * (kernel - 1) * BF16, recurrent * FP32)
    return tuple(-(-size // 64) * 64 for size in sizes if size)


def mamba2(heads: int, dim: int, width: int, groups: int) -> Parts:
    return state(heads * dim + 2 * groups * width, 4, heads * dim * width)


def layers_of(*counts: tuple[Kind, int, Parts]) -> list[LayerSpec]:
    kinds = [(kind, parts) for kind, count, parts in counts for _ in range(count)]
    return [LayerSpec(index, kind, parts) for index, (kind, parts) in enumerate(kinds)]


def both(count: int, attention: Parts, recurrent: Parts) -> list[LayerSpec]:
    """Layers with keys and values and a state each."""
    pairs = [(Full(), attention), (State(), recurrent)]
    return [LayerSpec(index, kind, parts) for index in range(count) for kind, parts in pairs]


def every(layers: int, period: int, local: Kind, parts: Parts) -> list[LayerSpec]:
    """Every ``period``-th layer has full attention, the others ``local``."""
    return [LayerSpec(index, local if (index + 1) % period else Full(), parts) for index in range(layers)]


def _zamba2() -> list[LayerSpec]:
    hybrid = (6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77)
    states = [LayerSpec(index, State(), mamba2(112, 64, 64, 2)) for index in range(81)]
    return [LayerSpec(index, Full(), kv(32, 224)) for index in hybrid] + states


_QWEN_STATE = state(2 * 16 * 128 + 32 * 128, 4, 32 * 128 * 128)

SHAPES: Mapping[str, Sequence[LayerSpec]] = MappingProxyType(
    {
        "gemma-3-270m": every(18, 6, Window(512), kv(1, 256)),
        "gemma-3-1b": every(26, 6, Window(512), kv(1, 256)),
        "gemma-3-4b": every(34, 6, Window(1024), kv(4, 256)),
        "gemma-3-12b": every(48, 6, Window(1024), kv(8, 256)),
        "gemma-3-27b": every(62, 6, Window(1024), kv(16, 128)),
        # The last 15 of 35 layers borrow their keys and values, and keep none.
        "gemma-3n-e4b": every(20, 5, Window(512), kv(2, 256)),
        "gemma-4": layers_of((Window(512), 25, kv(4, 256)), (Full(), 5, kv(4, 512))),
        # The last 18 of 42 layers borrow.
        "gemma-4-e4b": layers_of((Window(512), 20, kv(2, 256)), (Full(), 4, kv(2, 512))),
        "gemma-4-31b": layers_of((Window(1024), 50, kv(16, 256)), (Full(), 10, kv(4, 512))),
        "gpt-oss-20b": every(24, 2, Window(128), kv(8, 64)),
        "gpt-oss-120b": every(36, 2, Window(128), kv(8, 64)),
        "llama-4-scout": every(48, 4, Chunked(8192), kv(8, 128)),
        "deepseek-v3": layers_of((Full(), 61, latent(512, 64))),
        "qwen3-next-80b": layers_of((State(), 36, _QWEN_STATE), (Full(), 12, kv(2, 256))),
        "kimi-linear-48b": layers_of(
            (State(), 20, state(4096, 4) * 3 + state(0, 4, 32 * 128 * 128)), (Full(), 7, latent(512, 64))
        ),
        "falcon-h1-0.5b": both(36, kv(2, 64), mamba2(24, 64, 128, 1)),
        "falcon-h1-34b": both(72, kv(4, 128), mamba2(32, 128, 256, 2)),
        "jamba-1.5-mini": layers_of((State(), 28, state(8192, 4, 8192 * 16)), (Full(), 4, kv(8, 128))),
        "jamba-1.5-large": layers_of((State(), 63, state(16384, 4, 16384 * 16)), (Full(), 9, kv(8, 128))),
        "nemotron-h-8b": layers_of((State(), 24, mamba2(128, 64, 128, 8)), (Full(), 4, kv(8, 128))),
        "nemotron-h-47b": layers_of((State(), 44, mamba2(256, 64, 256, 8)), (Full(), 5, kv(8, 128))),
        "zamba2-7b": _zamba2(),
        "granite-4-h-small": layers_of((State(), 36, mamba2(128, 64, 128, 1)), (Full(), 4, kv(8, 128))),
        "mamba2-2.7b": layers_of((State(), 64, mamba2(80, 64, 128, 1))),
        "lfm2-1.2b": layers_of((State(), 10, state(2048, 3)), (Full(), 6, kv(8, 64))),
        "llama-3-70b": layers_of((Full(), 80, kv(8, 128))),
    }
)
