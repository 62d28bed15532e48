"""Attention over KV pages, behind one small protocol.

Owns: the choice of a backend.  Does not own: the backends (``torch_ref``, ``cpu_native``) or the types (``base``).

Invariants: a backend that is handed out supports every layer shape that was asked for.  ``OSTINATO_ISA`` (portable,
avx2, avx512 or avx512_bf16) forces an instruction set, for tests and comparisons.

Thread: start-up.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ostinato.errors import ConfigError
from ostinato.runtime import native
from ostinato.runtime.attention.base import HOLE, AttentionBackend, AttentionParams, BatchMetadata, KVPages
from ostinato.runtime.attention.cpu_native import CpuNative
from ostinato.runtime.attention.torch_ref import TorchRef

__all__ = [
    "HOLE",
    "AttentionBackend",
    "AttentionParams",
    "BatchMetadata",
    "CpuNative",
    "KVPages",
    "TorchRef",
    "select_backend",
]


def select_backend(head_shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> tuple[AttentionBackend, str]:
    """The fastest backend that can run every layer, and one line about it for the start-up table.

    Args:
        head_shapes: (key head dim, value head dim) of the layers; repeats are fine.
        dtype: of queries and pages.

    Raises:
        ConfigError: ``OSTINATO_ISA`` names an instruction set that does not exist or that this machine lacks, or no
            backend takes the dtype.
    """
    shapes = sorted(set(head_shapes))
    reference = TorchRef()
    for head_dim, value_dim in shapes:
        if refusal := reference.supports(head_dim, value_dim, dtype):
            raise ConfigError(refusal)
    library, reason = native.load()
    if library is None:
        return reference, f"torch_ref, within tolerance: {reason}"
    isa = native.chosen_isa(library.best_isa)
    backend = CpuNative(isa)
    for head_dim, value_dim in shapes:
        if refusal := backend.supports(head_dim, value_dim, dtype):
            return reference, f"torch_ref, within tolerance: {refusal}"
    return backend, f"cpu_native ({isa.name.lower()}), bitwise"
