"""A folder of records: the writer's side.  No torch, no scheduler; the connector and the tools use it.

Owns: one lock over catalog, journal and space; writing, reading, the order *bytes synced, then logged*, the thread that
syncs.  Does not own: threads of transfers (``mover``), what should be stored (``admission``).

::

    write    slots taken -> bytes written -> in the index (a hit from now on)             load and store threads
    sync     slabs fdatasync'ed -> logged -> log fdatasync'ed: survives a loss of power    the sync thread

Nothing here is called on the scheduler's thread but ``holds``, which takes no lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, TypeAlias

from ostinato.connectors.disk.catalog import Catalog
from ostinato.connectors.disk.codec import Codec, Item
from ostinato.connectors.disk.crew import Crew
from ostinato.connectors.disk.files import Folder
from ostinato.connectors.disk.format import REQUEST_NAME, FileName, slot_bytes
from ostinato.connectors.disk.index import Entry
from ostinato.connectors.disk.journal import Journal, Position, remove, replay
from ostinato.connectors.disk.reading import RecordReader
from ostinato.connectors.disk.slab_io import SlabFiles
from ostinato.connectors.disk.slabs import Run
from ostinato.connectors.disk.space import Space

log: Final = logging.getLogger(__name__)
SYNC_SECONDS: Final = 0.5
SYNC_BYTES: Final = 256 << 20
_Wanted: TypeAlias = tuple[int, bytes, Item]
"""Place in the order, name, what to store."""
_Chunk: TypeAlias = tuple[Run, int, list[_Wanted]]
"""A run, the first slot, what goes there and behind it in one call."""


class DiskStore(RecordReader):
    """The one writer of ``folder``, whose lock the caller has.  Raises OSError, FutureVersionError."""

    def __init__(
        self, folder: Folder, budget: int, direct: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(SlabFiles(folder, write=True, direct=direct), clock)
        self.folder = folder
        self.stopped = ""
        """Why nothing is stored any more; empty while all is well."""
        self.model = ""
        """What people call the model whose records are written."""
        self._writers = Crew("ostinato-disk-write")
        self._unsynced: list[Entry] = []
        self._unsynced_bytes = 0
        self._flushing = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._sync_thread: threading.Thread | None = None
        self.catalog.now = self._tick()
        position = replay(folder, self.catalog)
        if not position.sound:
            log.warning("the index of the disk tier is damaged: it starts empty")
        _clean(folder, self.catalog, position)
        self._journal = Journal(folder, position)
        self.space = Space(self.catalog, self._journal, self.files, budget)
        if not position.sound:
            self.space.snapshot()
        self.space.shrink(budget)
        self.catalog.forget_unused_owners()

    def start(self, poll: Callable[[], None] = lambda: None) -> None:
        """Sync in the background from now on; ``poll`` is called twice a second."""
        self._sync_thread = threading.Thread(target=self._run, args=(poll,), name="ostinato-disk-sync", daemon=True)
        self._sync_thread.start()

    # Writing.

    def write(self, codec: Codec, items: Sequence[Item]) -> list[bool]:
        """Store what is not held yet; False for what found no room.  Never raises for a failing disk."""
        done = [False] * len(items)
        if self.stopped:
            return done
        groups: dict[int, list[_Wanted]] = {}
        seen = set()
        for place, item in enumerate(items):
            name = codec.name(item.key)
            done[place] = self.holds(codec, name) or name in seen
            if not done[place]:
                seen.add(name)
                groups.setdefault(slot_bytes(len(item.payload), self.files.direct), []).append((place, name, item))
        try:
            for size, wanted in groups.items():
                for place in self._write_group(codec, size, wanted):
                    done[place] = True
        except OSError as error:
            self._stop(error)
        if self._unsynced_bytes >= SYNC_BYTES:
            self._wake.set()
        return done

    def _write_group(self, codec: Codec, size: int, wanted: Sequence[_Wanted]) -> list[int]:
        """Records of one slot size; the places of those that were written."""
        with self.lock:
            number = self.space.number_of(codec.owner, self.model)
            runs = self.space.allocate(size, len(wanted))
            for run in runs:
                run.slab.busy += 1
        chunks, rest = [], iter(wanted)
        for run in runs:
            some = list(islice(rest, run.count))
            step = self.files.chunk(run.slab)
            chunks += [(run, run.first + at, some[at : at + step]) for at in range(0, len(some), step)]
        results: Sequence[OSError | None] = [OSError("interrupted")] * len(chunks)
        try:
            results = self._writers.each(lambda chunk: self._write_chunk(codec, chunk), chunks)
        finally:
            good = []
            with self.lock:
                for chunk, error in zip(chunks, results, strict=True):
                    if error is None:
                        self._enter(number, chunk)
                        good += [place for place, _, _ in chunk[2]]
                    else:
                        for offset in range(len(chunk[2])):
                            chunk[0].slab.give(chunk[1] + offset)
                for run in runs:
                    run.slab.busy -= 1
        for error in filter(None, results):
            self._stop(error)
        return good

    def _write_chunk(self, codec: Codec, chunk: _Chunk) -> OSError | None:
        run, first, some = chunk
        try:
            self.files.write(run.slab, first, [codec.encode(item) for _, _, item in some])
        except OSError as error:
            return error
        return None

    def _enter(self, number: int, chunk: _Chunk) -> None:
        """Records that were written become hits."""
        run, first, some = chunk
        now = self._tick()
        for slot, (_, name, item) in enumerate(some, first):
            known = self.catalog.index.get(name)
            if known is not None and known.identity != number and not known.pins:
                self.space.drop([known])
                known = None
            if known is not None:
                run.slab.give(slot)
                continue
            length = len(item.payload)
            entry = Entry(name, number, run.slab, slot, now, length, item.ordinal, durable=False)
            self.catalog.index.add(entry)
            self._unsynced.append(entry)
            self._unsynced_bytes += length
            self.stats.stored += 1
            self.stats.bytes_written += run.slab.slot_bytes

    def drop(self, entries: Sequence[Entry]) -> None:
        """Forget records that nobody reads just now."""
        with self.lock:
            gone = [e for e in dict.fromkeys(entries) if self.catalog.index.get(e.name) is e and not e.pins]
            try:
                self.space.drop(gone)
            except OSError as error:
                self._stop(error)

    # Durability.

    def flush(self) -> int:
        """Make everything written so far durable; returns how many records were not before."""
        with self._flushing:
            with self.lock:
                batch, self._unsynced, self._unsynced_bytes = self._unsynced, [], 0
                slabs = {entry.slab for entry in batch if self.catalog.index.get(entry.name) is entry}
                for slab in slabs:
                    slab.busy += 1
            try:
                self.files.sync(slabs)
                with self.lock:
                    alive = [entry for entry in batch if self.catalog.index.get(entry.name) is entry]
                    for entry in alive:
                        entry.durable = True
                    if alive:
                        self.space.put(alive)
                if batch:
                    self._journal.sync()
                self.stats.durable += len(alive)
                return len(alive)
            except OSError as error:
                self._stop(error)
                self.drop([entry for entry in batch if not entry.durable])
                return 0
            finally:
                with self.lock:
                    for slab in slabs:
                        slab.busy -= 1

    def close(self) -> None:
        """Everything stored is durable afterwards, unless the disk failed."""
        self._closing = True
        self._wake.set()
        if self._sync_thread is not None:
            self._sync_thread.join()
        self.flush()
        with self.lock:
            if self._touched and not self.stopped:
                try:
                    self.space.snapshot()
                except OSError as error:
                    self._stop(error)
        self._journal.close()
        self._writers.close()
        super().close()

    def _run(self, poll: Callable[[], None]) -> None:
        while not self._closing:
            self._wake.wait(SYNC_SECONDS)
            self._wake.clear()
            try:
                if self._unsynced:
                    self.flush()
                poll()
            except Exception:
                log.exception("disk: the background thread goes on after a fault")

    def _stop(self, error: OSError) -> None:
        if not self.stopped:
            self.stopped = error.strerror or str(error)
            log.warning("the disk tier stores nothing any more (%s); what it has stays readable", self.stopped)


def _clean(folder: Folder, catalog: Catalog, position: Position) -> None:
    """Remove what a crash left over, and forget slabs that are not there in full."""
    sizes = folder.sizes()
    remove(folder, f"{REQUEST_NAME}.tmp")
    there = set()
    for text, size in sizes.items():
        name = FileName.parse(text)
        if name is None:
            continue
        if name.role == "slab":
            slab = catalog.slabs.get(name.number)
            keep = slab is not None and name.slot_bytes == slab.slot_bytes and size >= slab.file_bytes
            if keep:
                there.add(name.number)
        else:
            keep = name.number == position.generation and not name.temporary
        if not keep:
            remove(folder, text)
    for slab in [slab for number, slab in catalog.slabs.items() if number not in there]:
        catalog.drop_slab(slab)
