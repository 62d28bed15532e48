"""Host memory that the scheduler's process and its workers share.

Owns: the memory: one anonymous file, mapped by each.  Does not own: what lies where.  It vanishes with the last process
that maps it; the system gives it memory as it is first written.
"""

from __future__ import annotations

import mmap
import os

from ostinato.errors import ConnectorError
from ostinato.integrations.vllm.messages import ArenaPlace


class Arena:
    """``memory``: pages of ``page_bytes`` bytes, one after the other."""

    def __init__(self, slots: int, page_bytes: int) -> None:
        size = slots * page_bytes
        self._file = os.memfd_create("ostinato-arena", os.MFD_CLOEXEC)
        os.ftruncate(self._file, size)
        self.memory = mmap.mmap(self._file, size)
        self.place = ArenaPlace(f"/proc/{os.getpid()}/fd/{self._file}", slots, page_bytes)

    def close(self) -> None:
        """New workers cannot map it any more; who has, keeps it."""
        os.close(self._file)


def map_arena(place: ArenaPlace) -> mmap.mmap:
    """The same memory in a worker's process."""
    try:
        with open(place.path, "r+b") as file:
            return mmap.mmap(file.fileno(), place.slots * place.page_bytes)
    except OSError as error:
        raise ConnectorError(
            f"a worker cannot map the scheduler's host memory ({error}): OstinatoConnector needs all workers of an "
            "engine on one machine, under one user"
        ) from error
