"""A folder that another process writes: read what its index says, write nothing.

Owns: following the index.  Does not own: when to look (the connector asks).  The writer knows nothing of us: a record
may be replaced while we read it, and then its check fails, which is a miss.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ostinato.connectors.disk.catalog import Catalog
from ostinato.connectors.disk.codec import Codec, Item
from ostinato.connectors.disk.files import Folder
from ostinato.connectors.disk.format import FileName
from ostinato.connectors.disk.journal import Position, read_log, replay
from ostinato.connectors.disk.reading import RecordReader
from ostinato.connectors.disk.slab_io import SlabFiles


class Follower(RecordReader):
    """Raises OSError, FutureVersionError."""

    stopped = "another process writes this folder"

    def __init__(self, folder: Folder, direct: bool = False) -> None:
        super().__init__(SlabFiles(folder, write=False, direct=direct), time.time)
        self._folder = folder
        self._position = Position(0, 0)
        self._reload()

    def refresh(self) -> None:
        """Take in what the index says now."""
        names = [name for name in map(FileName.parse, self._folder.sizes()) if name is not None and not name.temporary]
        newest = max((name.number for name in names if name.role == "snapshot"), default=0)
        if newest != self._position.generation or not self._position.end:
            self._reload()
            return
        with self.lock:
            end = read_log(self._folder, newest, self._position.end, self.catalog)
            if end:
                self._position = Position(newest, end)
                self._close_files(self.catalog)

    def write(self, codec: Codec, items: Sequence[Item]) -> list[bool]:  # noqa: ARG002
        return [False] * len(items)

    def flush(self) -> int:
        return 0

    def _reload(self) -> None:
        catalog = Catalog()
        position = replay(self._folder, catalog)
        with self.lock:
            self._close_files(catalog)
            self.catalog, self._position = catalog, position

    def _close_files(self, catalog: Catalog) -> None:
        """A removed slab's room comes free when its last reader closes it."""
        self.files.keep_only(catalog.slabs, {slab.number for slab in self.catalog.slabs.values() if slab.busy})
