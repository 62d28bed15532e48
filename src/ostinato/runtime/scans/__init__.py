"""Scans over recurrent state in pages, behind one small protocol.

Owns: the choice of a backend.  Does not own: the backends (``torch_scans``, ``cpu_scans``) or the types (``base``).

Invariants: a backend that is handed out runs all four scans.  ``OSTINATO_ISA`` (portable, avx2, avx512 or avx512_bf16)
forces an instruction set, for tests and comparisons.

Thread: start-up.
"""

from __future__ import annotations

from ostinato.runtime import native
from ostinato.runtime.scans.base import (
    Convolution,
    GatedDelta,
    ScanBackend,
    SelectiveScan,
    StateIndex,
    StateSpace,
)
from ostinato.runtime.scans.cpu_scans import CpuScans
from ostinato.runtime.scans.torch_scans import TorchScans

__all__ = [
    "Convolution",
    "CpuScans",
    "GatedDelta",
    "ScanBackend",
    "SelectiveScan",
    "StateIndex",
    "StateSpace",
    "TorchScans",
    "select_scans",
]


def select_scans() -> tuple[ScanBackend, str]:
    """The fastest backend, and one line about it for the start-up table.

    Raises:
        ConfigError: ``OSTINATO_ISA`` names an instruction set that does not exist or that this machine lacks.
    """
    library, reason = native.load()
    if library is None:
        return TorchScans(), f"torch_scans, slow: {reason}"
    isa = native.chosen_isa(library.best_isa)
    return CpuScans(isa), f"cpu_scans ({isa.name.lower()}), bitwise"
