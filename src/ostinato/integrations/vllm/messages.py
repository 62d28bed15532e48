"""What the two halves tell each other, step by step.

Owns: the values.  They cross process boundaries, so they are plain.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.transfer.job import TransferOrder


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """Where the scheduler's process keeps host memory: a file that workers on the same machine can map."""

    path: str
    slots: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class StepOrders:
    """What a step's workers copy between vLLM's blocks and host memory.

    ``saves``: after the forward pass; ``loads``: with the request that waits for each.  In moves, ``device_slot`` is
    vLLM's block.
    """

    arena: ArenaPlace
    saves: tuple[TransferOrder, ...] = ()
    loads: tuple[tuple[str, TransferOrder], ...] = ()
