"""Loading records and checking them: what the writer of a folder and its other readers have in common.

Owns: one lock over the catalog, claims on entries while they are read, one call for many adjacent records.

::

    pinned -> bytes read -> trailer checked -> unpinned; a faulty record is a miss, and dropped

Nothing here is called on the scheduler's thread but :meth:`RecordReader.holds`, which takes no lock.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ostinato.connectors.disk.catalog import Catalog
from ostinato.connectors.disk.codec import Codec, Item
from ostinato.connectors.disk.crew import Crew
from ostinato.connectors.disk.format import fits
from ostinato.connectors.disk.index import Entry
from ostinato.connectors.disk.slab_io import SlabFiles
from ostinato.connectors.record import Fault

log: Final = logging.getLogger(__name__)
_Claim: TypeAlias = tuple[int, Entry, Item]
"""Place in the question, what the index has, where it goes."""


@dataclass(slots=True)
class StoreStats:
    """Totals since the folder was opened.  ``faults``: records that were not what was asked for, by kind."""

    stored: int = 0
    loaded: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    durable: int = 0
    faults: Counter[str] = field(default_factory=Counter)


class RecordReader:
    """Reads what ``catalog`` claims to be in ``files``."""

    def __init__(self, files: SlabFiles, clock: Callable[[], float]) -> None:
        self.stats = StoreStats()
        self.lock = threading.RLock()
        self.catalog = Catalog()
        self.files = files
        self._crew = Crew("ostinato-disk-read")
        self._clock = clock
        self._now = 0
        self._touched = False

    def holds(self, codec: Codec, name: bytes) -> bool:
        """Whether the index has the record; from any thread, without waiting."""
        entry = self.catalog.index.get(name)
        return entry is not None and self.catalog.owners.get(entry.identity) == codec.owner

    def read(self, codec: Codec, items: Sequence[Item]) -> list[bool]:
        """Load and check records into their payloads; False for a miss.  Never raises for a failing disk."""
        done = [False] * len(items)
        with self.lock:
            number = self.catalog.number_of(codec.owner)
            found = []
            for place, item in enumerate(items):
                entry = self._claim(codec.name(item.key), number, len(item.payload))
                if entry is not None:
                    found.append((place, entry, item))
        found.sort(key=lambda triple: (triple[1].slab.number, triple[1].slot))
        bad: list[Entry] = []
        faulty: Counter[str] = Counter()
        chunks = list(self._adjacent(found))
        for chunk, faults in zip(
            chunks, self._crew.each(lambda some: self._read_chunk(codec, some), chunks), strict=True
        ):
            for (place, entry, _), fault in zip(chunk, faults, strict=True):
                done[place] = fault is None
                if fault is not None:
                    bad.append(entry)
                    faulty[fault] += 1
        with self.lock:
            now = self._tick()
            for place, entry, _ in found:
                entry.pins -= 1
                entry.slab.busy -= 1
                if done[place] and self.catalog.index.get(entry.name) is entry:
                    self.catalog.index.touch(entry, now)
                    self._touched = True
            self.stats.loaded += sum(done)
            self.stats.bytes_read += sum(len(item.payload) for item, good in zip(items, done, strict=True) if good)
        if bad:
            self.stats.faults += faulty
            kinds = ", ".join(f"{count} {fault}" for fault, count in faulty.items())
            log.warning("disk: %d records are unusable and dropped (%s); computed again", len(bad), kinds)
            self.drop(bad)
        return done

    def _claim(self, name: bytes, number: int | None, length: int) -> Entry | None:
        entry = self.catalog.index.get(name)
        if entry is None or entry.identity != number or entry.length != length:
            return None
        if not fits(length, entry.slab.slot_bytes):
            return None
        entry.pins += 1
        entry.slab.busy += 1
        return entry

    def _adjacent(self, found: Sequence[_Claim]) -> Iterator[list[_Claim]]:
        """Runs of adjacent slots, as long as one call may be; the sorted ``found`` may name a slot twice."""
        chunk: list[_Claim] = []
        slab, due, room = None, -1, 0
        for claim in found:
            entry = claim[1]
            if entry.slab is not slab or entry.slot != due or not room:
                if chunk:
                    yield chunk
                slab, chunk, room = entry.slab, [], self.files.chunk(entry.slab)
            chunk.append(claim)
            due, room = entry.slot + 1, room - 1
        if chunk:
            yield chunk

    def _read_chunk(self, codec: Codec, chunk: Sequence[_Claim]) -> list[str | None]:
        first = chunk[0][1]
        try:
            tails = self.files.read(first.slab, first.slot, [item.payload for _, _, item in chunk])
        except OSError as error:
            return [error.strerror or "error"] * len(chunk)
        faults: list[str | None] = []
        for (_, _, item), tail in zip(chunk, tails, strict=True):
            fault = Fault.TRUNCATED if tail is None else codec.decode(item.key, item.payload, tail)
            faults.append(None if fault is None else fault.value)
        return faults

    def drop(self, entries: Sequence[Entry]) -> None:
        """Forget records that nobody reads just now."""
        with self.lock:
            for entry in dict.fromkeys(entries):
                if self.catalog.index.get(entry.name) is entry and not entry.pins:
                    self.catalog.index.remove(entry)

    def _tick(self) -> int:
        """Seconds since 1970, never backwards."""
        self._now = max(self._now, int(self._clock()))
        return self._now

    def close(self) -> None:
        """Nobody reads any more."""
        self._crew.close()
        self.files.close()
