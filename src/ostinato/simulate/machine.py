"""How fast a simulated machine is.

Owns: numbers and the time of a step.  Does not own: what is computed or moved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ostinato.simulate.shapes import ModelShape

BYTES_PER_WEIGHT: Final = 2


@dataclass(frozen=True, slots=True)
class Link:
    """A tier's connection to the device: ``bandwidth`` bytes per second each way, ``latency`` seconds per order."""

    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """``flops``: those that prefill really gets, per second; ``memory_bandwidth``: of the device's own memory.

    ``overhead_s``: of each step.  ``links``: host, then disk, then a store.
    """

    name: str
    flops: float
    memory_bandwidth: float
    overhead_s: float
    links: dict[str, Link]

    def step_seconds(self, shape: ModelShape, flops: float, sequences: int) -> float:
        """Time of a step that computes ``flops`` for ``sequences`` sequences."""
        if not sequences:
            return 0.0
        # Weights are read once per step, of a mixture at most as many as its tokens pass through.
        weights = min(shape.weights, shape.active * sequences) * BYTES_PER_WEIGHT
        return max(flops / self.flops, weights / self.memory_bandwidth) + self.overhead_s


def instant() -> Machine:
    """Infinitely fast: each request is over when the next one comes; what remains is what the cache holds."""
    return Machine("instant", math.inf, math.inf, 0.0, {})


def h100(count: int = 1, utilisation: float = 0.4) -> Machine:
    """``count`` H100 whose prefill reaches ``utilisation`` of 989 TFLOP/s in bf16; PCIe 5 and NVMe."""
    return Machine(
        f"{count}xh100",
        989e12 * count * utilisation,
        3.35e12 * count,
        2e-3,
        {"host": Link(50e9, 2e-4), "disk": Link(12e9, 1e-3), "store": Link(10e9, 2e-3)},
    )
