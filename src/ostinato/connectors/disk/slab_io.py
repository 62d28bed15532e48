"""Bytes of runs of slots, to and from the slab files.

Owns: open slab files, the vectored calls, aligned buffers for calls past the page cache.  Does not own: which slot is
whose.  Any thread: a slab's file is closed only when no transfer uses it (``Slab.busy``).

Through the page cache, one call moves many records straight between device pages and the file.  Past it (``direct``),
they go through an aligned buffer of the thread: device pages are aligned to 64 bytes, the disk wants 4096.  Slabs whose
slots are not multiples of that (made by a process that goes through the page cache) go through it in any case.
"""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from ostinato.connectors.disk.files import Access, Buffer, File, Folder
from ostinato.connectors.disk.format import BLOCK, TAIL_BYTES, FileName
from ostinato.connectors.disk.slabs import Slab

CHUNK_BYTES: Final = 1 << 20
"""Read or written per call: what was just read is still in the processor's cache when it is checked."""
CHUNK_SLOTS: Final = 512


class SlabFiles:
    """``write``: may be written to; ``direct``: past the page cache where the file system can."""

    def __init__(self, folder: Folder, write: bool, direct: bool) -> None:
        self.direct = direct
        self._folder = folder
        self._new = self._removed = False
        self._access = Access.WRITE if write else Access.READ
        self._files: dict[int, File] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def create(self, slab: Slab) -> None:
        """Make a new slab's file, of its full size; :meth:`sync` makes it durable."""
        name = _name(slab)
        if self._removed:  # or both could be there after a loss of power
            self._folder.sync()
            self._removed = False
        file = self._folder.open(name, Access.CREATE)
        self._new = True
        try:
            file.allocate(slab.file_bytes)
        except OSError:
            file.close()
            self._folder.remove(name)
            raise
        file.close()

    def remove(self, slab: Slab) -> None:
        self.forget(slab)
        self._folder.remove(_name(slab))
        self._removed = True

    def forget(self, slab: Slab) -> None:
        with self._lock:
            file = self._files.pop(slab.number, None)
        if file is not None:
            file.close()

    def keep_only(self, numbers: Collection[int], busy: Collection[int]) -> None:
        """Close the files of all slabs but these, and those in use."""
        with self._lock:
            gone = [number for number in self._files if number not in numbers and number not in busy]
            files = [self._files.pop(number) for number in gone]
        for file in files:
            file.close()

    def sync(self, slabs: Iterable[Slab]) -> None:
        """Return when everything written to ``slabs`` survives a loss of power, and the files themselves do."""
        for slab in slabs:
            self._file(slab).sync()
        if self._new:
            self._new = False
            self._folder.sync()

    def chunk(self, slab: Slab) -> int:
        """Slots per call."""
        return max(1, min(CHUNK_SLOTS, CHUNK_BYTES // slab.slot_bytes))

    def write(self, slab: Slab, first: int, records: Sequence[tuple[Buffer, bytes]]) -> None:
        """Write bodies and tails to adjacent slots."""
        size, buffers = slab.slot_bytes, []
        for body, tail in records:
            buffers += [body, tail.rjust(size - len(body), b"\0")]
        if self._is_direct(slab):
            buffer = self._buffer(len(records) * size)
            place = 0
            for piece in buffers:
                buffer[place : place + len(piece)] = piece
                place += len(piece)
            buffers = [buffer]
        self._file(slab).write(buffers, first * size)

    def read(self, slab: Slab, first: int, bodies: Sequence[memoryview]) -> list[memoryview | None]:
        """Fill ``bodies`` from adjacent slots; the tail of each, None where the slot's filling is not as written."""
        size = slab.slot_bytes
        if self._is_direct(slab):
            buffer = self._buffer(len(bodies) * size)
            got = self._file(slab).read([buffer], first * size)
            rests = []
            for number, body in enumerate(bodies):
                begin, end = number * size, (number + 1) * size
                body[:] = buffer[begin : begin + len(body)]
                rests.append(bytearray(buffer[begin + len(body) : end]))
        else:
            rests = [bytearray(size - len(body)) for body in bodies]
            buffers = [piece for pair in zip(bodies, rests, strict=True) for piece in pair]
            got = self._file(slab).read(buffers, first * size)
        whole = got // size
        return [_tail(rest) if number < whole else None for number, rest in enumerate(rests)]

    def close(self) -> None:
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            file.close()

    def _file(self, slab: Slab) -> File:
        with self._lock:
            file = self._files.get(slab.number)
            if file is None:
                file = self._files[slab.number] = self._open(_name(slab), self._is_direct(slab))
            return file

    def _is_direct(self, slab: Slab) -> bool:
        return self.direct and slab.slot_bytes % BLOCK == 0

    def _open(self, name: str, direct: bool) -> File:
        if direct:
            try:
                return self._folder.open(name, self._access, direct=True)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self.direct = False
        return self._folder.open(name, self._access)

    def _buffer(self, size: int) -> memoryview:
        """Page-aligned memory of this thread, at least a chunk, cut to ``size``."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._local.buffer = memoryview(mmap.mmap(-1, max(size, CHUNK_BYTES)))
        return buffer[:size]


def _name(slab: Slab) -> str:
    return str(FileName("slab", slab.number, slab.slot_bytes))


def _tail(rest: bytearray) -> memoryview | None:
    filling = len(rest) - TAIL_BYTES
    return memoryview(rest)[filling:] if rest.startswith(bytes(filling)) else None
