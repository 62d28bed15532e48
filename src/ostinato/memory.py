"""How much main memory this process may still take.

Owns: the number (the system's, or the control group's if that is less) and the error when it is not enough.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

from ostinato.errors import CapacityError

_MEMORY_LIMITS: Final = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def check_memory(what: str, wanted: int) -> None:
    """Raise :class:`CapacityError`, with both numbers, when fewer than ``wanted`` bytes are free for ``what``."""
    free = available_memory()
    if wanted > free:
        raise CapacityError(
            f"{what} asks for {wanted / 2**30:.2f} GiB, but this machine has {free / 2**30:.2f} GiB of free memory; "
            "lower its budget"
        )


def available_memory() -> int:
    """Bytes that can be allocated now: what the system has, or what the control group still allows if that is less."""
    free = int(psutil.virtual_memory().available)
    for limit, used in _MEMORY_LIMITS:
        try:
            room = int(limit.read_text()) - int(used.read_text())
        except (OSError, ValueError):  # no such control group, or "max": no limit
            continue
        free = min(free, max(0, room))
    return free
