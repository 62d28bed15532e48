"""The index on the disk: a snapshot and the log of what changed since.

Owns: the files ``snapshot-G`` and ``log-G``, their replay, the change to generation G + 1.  Does not own: what frames
mean (``catalog``), when something may be logged (``store``: only after its bytes were synced).

::

    G:  snapshot-G  log-G                                 snapshot-0 does not exist: the first log begins with nothing
    1.  snapshot-G+1.tmp written and synced
    2.  log-G+1 made (header only) and synced
    3.  snapshot-G+1.tmp renamed to snapshot-G+1, folder synced       <- from here on G + 1 holds
    4.  snapshot-G and log-G removed

A crash between any two leaves one generation that is complete.  A log ends at its first frame that is not sound: what
is behind it was never promised.  Thread: changes under the store's lock; :meth:`sync` from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from ostinato.connectors.disk.catalog import Catalog
from ostinato.connectors.disk.files import Access, File, Folder
from ostinato.connectors.disk.format import (
    FRAME_BYTES,
    HEADER_BYTES,
    LOG_MAGIC,
    PUT,
    SNAPSHOT_MAGIC,
    FileName,
    Kind,
    frame,
    frames,
    generation_of,
    header,
)

SPARE_BYTES = 96 << 10
"""For what does not grow with the slots: headers, slabs, identities, the lock, a frame too many, tools' requests."""


def reserve_bytes(slots: int) -> int:
    """Most bytes that snapshots and logs of so many slots take at any moment: two snapshots, one log."""
    return 2 * PUT.size * slots + log_limit(slots) + slots // 4 + SPARE_BYTES


def log_limit(slots: int) -> int:
    """A log of more bytes is replaced by a snapshot."""
    return max(32 << 10, PUT.size * slots // 2)


@dataclass(frozen=True, slots=True)
class Position:
    """How far the index was read: generation, and the end of the last sound frame of its log."""

    generation: int
    end: int
    sound: bool = True
    """False: a snapshot is there but damaged; what it said is lost."""


def replay(folder: Folder, catalog: Catalog) -> Position:
    """Read the newest complete generation into an empty ``catalog``.  Raises OSError, FutureVersionError."""
    names = [name for name in map(FileName.parse, folder.sizes()) if name is not None and not name.temporary]
    snapshots = sorted((name.number for name in names if name.role == "snapshot"), reverse=True)
    for generation in snapshots:
        if _read_snapshot(folder, generation, catalog):
            return Position(generation, read_log(folder, generation, HEADER_BYTES, catalog))
        for slab in list(catalog.slabs.values()):
            catalog.drop_slab(slab)
        catalog.owners.clear()
        catalog.models.clear()
    logs = [name.number for name in names if name.role == "log"]
    if snapshots:
        return Position(max([*snapshots, *logs]), 0, sound=False)
    if not logs:
        return Position(0, 0)
    return Position(min(logs), read_log(folder, min(logs), HEADER_BYTES, catalog), sound=min(logs) == 0)


def read_log(folder: Folder, generation: int, start: int, catalog: Catalog) -> int:
    """Apply the frames of a log from ``start`` on; returns the end of the last sound one, 0 without a header."""
    try:
        raw = _read(folder, str(FileName("log", generation)), start if start > HEADER_BYTES else 0)
    except FileNotFoundError:
        return 0
    base = start if start > HEADER_BYTES else 0
    if not base and generation_of(raw, LOG_MAGIC) != generation:
        return 0
    end = start
    for found in frames(memoryview(raw), generation, base, start):
        catalog.apply(found)
        end = found.end
    return end


def _read_snapshot(folder: Folder, generation: int, catalog: Catalog) -> bool:
    try:
        raw = _read(folder, str(FileName("snapshot", generation)), 0)
    except FileNotFoundError:
        return False
    if generation_of(raw, SNAPSHOT_MAGIC) != generation:
        return False
    last, end = Kind.PUT, 0
    for found in frames(memoryview(raw), generation, 0, HEADER_BYTES):
        catalog.apply(found)
        last, end = found.kind, found.end
    return last is Kind.END and end == len(raw)


def _read(folder: Folder, name: str, start: int) -> bytearray:
    file = folder.open(name, Access.READ)
    try:
        raw = bytearray(max(0, file.size() - start))
        got = file.read([raw], start) if raw else 0
        del raw[got:]
        return raw
    finally:
        file.close()


class Journal:
    """The writer's side.  Continues at ``position``; nothing of an older generation is left."""

    def __init__(self, folder: Folder, position: Position) -> None:
        self._folder = folder
        self._io = threading.Lock()
        self.generation = position.generation
        self._file: File = folder.open(str(FileName("log", position.generation)), Access.CREATE)
        self.size = position.end
        if position.end < HEADER_BYTES:
            self._file.truncate(0)
            self._file.write([header(LOG_MAGIC, position.generation)], 0)
            self.size = HEADER_BYTES
        self._file.truncate(self.size)
        self._file.sync()
        folder.sync()

    def append(self, kind: Kind, body: bytes) -> None:
        raw = frame(kind, body, self.generation, self.size)
        self._file.write([raw], self.size)
        self.size += len(raw)

    def room_for(self, body: int, slots: int) -> bool:
        return self.size + body + FRAME_BYTES <= log_limit(slots)

    def sync(self) -> None:
        with self._io:
            self._file.sync()

    def rotate(self, bodies: Iterable[tuple[Kind, bytes]]) -> None:
        """Go on with a snapshot of ``bodies`` and an empty log.  After an OSError the old ones hold."""
        generation, folder = self.generation + 1, self._folder
        snapshot, log = FileName("snapshot", generation), FileName("log", generation)
        temporary = str(FileName("snapshot", generation, temporary=True))
        raw = [header(SNAPSHOT_MAGIC, generation)]
        offset = HEADER_BYTES
        for kind, body in bodies:
            raw.append(frame(kind, body, generation, offset))
            offset += len(raw[-1])
        file = None
        try:
            _write(folder, temporary, raw)
            file = folder.open(str(log), Access.CREATE)
            file.truncate(0)
            file.write([header(LOG_MAGIC, generation)], 0)
            file.sync()
            folder.replace(temporary, str(snapshot))
            folder.sync()
        except OSError:
            if file is not None:
                file.close()
            for name in (temporary, str(snapshot), str(log)):
                remove(folder, name)
            raise
        with self._io:
            self._file.close()
            self._file, self.size = file, HEADER_BYTES
        for role in ("snapshot", "log"):
            remove(folder, str(FileName(role, self.generation)))
        self.generation = generation
        folder.sync()

    def close(self) -> None:
        with self._io:
            self._file.close()


def remove(folder: Folder, name: str) -> None:
    """Remove a file if it is there and can be removed."""
    try:
        folder.remove(name)
    except OSError:
        return


def _write(folder: Folder, name: str, pieces: list[bytes]) -> None:
    file = folder.open(name, Access.CREATE)
    try:
        file.truncate(0)
        file.write(pieces, 0)
        file.sync()
    finally:
        file.close()
