"""Looking after a folder of records, whether an engine uses it or not: what is in it, is it sound, make it smaller.

Owns: the functions behind a command line.  When no process writes the folder they become its writer for as long as they
run; otherwise they read it beside the writer, and have the writer carry out what changes it (``requests``).
All raise ConnectorError with what to do.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ostinato.connectors.disk import requests
from ostinato.connectors.disk.catalog import Catalog, Owner
from ostinato.connectors.disk.codec import Codec, make_codec
from ostinato.connectors.disk.files import OsFolder
from ostinato.connectors.disk.format import LOCK_NAME, FileName, FutureVersionError, fits
from ostinato.connectors.disk.index import Entry
from ostinato.connectors.disk.journal import replay
from ostinato.connectors.disk.slab_io import SlabFiles
from ostinato.connectors.disk.store import DiskStore
from ostinato.connectors.record import Fault
from ostinato.errors import ConnectorError

DROP_AT_ONCE: Final = 256


@dataclass(frozen=True, slots=True)
class OwnerReport:
    """Records of one model (identity and encryption key).  ``label`` names it to :func:`remove`.

    ``model``: what people call it; several owners may have the same.  ``last_use``: seconds since 1970.
    """

    label: str
    model: str
    layout: bytes
    namespace: bytes
    encrypted: bool
    records: int
    payload_bytes: int
    last_use: int


@dataclass(frozen=True, slots=True)
class SlabReport:
    """All slabs of one slot size."""

    slot_bytes: int
    slabs: int
    slots: int
    used: int
    payload_bytes: int

    @property
    def file_bytes(self) -> int:
        return self.slots * self.slot_bytes


@dataclass(frozen=True, slots=True)
class FolderReport:
    """``file_bytes``: of all files; ``busy``: a process writes the folder now; ``sound``: the index is whole."""

    owners: tuple[OwnerReport, ...]
    usage: tuple[SlabReport, ...]
    file_bytes: int
    slabs: int
    busy: bool
    sound: bool


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """``skipped``: encrypted with a key that was not given.  ``faults``: bad records by kind."""

    checked: int
    skipped: int
    faults: dict[str, int]

    @property
    def bad(self) -> int:
        return sum(self.faults.values())


def inspect(path: str) -> FolderReport:
    """What is in the folder, by model and by slot size; reads the index only."""
    with _opened(path) as folder:
        catalog = Catalog()
        sound = replay(folder, catalog).sound
        busy = not folder.lock(LOCK_NAME)
        file_bytes = sum(folder.sizes().values())
    entries: dict[int, list[Entry]] = {number: [] for number in catalog.owners}
    payload: Counter[int] = Counter()
    for entry in catalog.index:
        payload[entry.slab.slot_bytes] += entry.length
        if entry.identity in entries:
            entries[entry.identity].append(entry)
    owners = tuple(_owner_report(catalog, number, some) for number, some in entries.items() if some)
    usage = tuple(
        SlabReport(size, len(some.slabs), slots, slots - some.free, payload[size])
        for size, some in sorted(catalog.classes.items())
        if (slots := sum(slab.slots for slab in some.slabs.values()))
    )
    return FolderReport(owners, usage, file_bytes, len(catalog.slabs), busy, sound)


def _owner_report(catalog: Catalog, number: int, entries: Sequence[Entry]) -> OwnerReport:
    owner = catalog.owners[number]
    return OwnerReport(
        owner.label,
        catalog.models.get(number, ""),
        owner.identity.layout,
        owner.identity.namespace,
        any(owner.key_mark),
        len(entries),
        sum(entry.length for entry in entries),
        max(entry.used for entry in entries),
    )


def verify(
    path: str,
    quarantine: bool = True,
    progress: Callable[[int, int], None] | None = None,
    secret: bytes | None = None,
) -> VerifyReport:
    """Read and check every record; with ``quarantine`` the bad ones are forgotten.  ``progress(done, total)``."""
    with _opened(path) as folder:
        catalog = Catalog()
        replay(folder, catalog)
        codecs = {number: _codec_of(owner, secret) for number, owner in catalog.owners.items()}
        entries = [entry for entry in catalog.index if codecs.get(entry.identity) is not None]
        skipped = len(catalog.index) - len(entries)
        files = SlabFiles(folder, write=False, direct=False)
        bad = _find_bad(files, codecs, entries, progress)
        if bad:  # a record that its writer replaced meanwhile is not bad: look at what the index says now
            again = Catalog()
            replay(folder, again)
            suspects = [entry for entry in map(again.index.get, bad) if entry is not None]
            bad = _find_bad(files, codecs, [entry for entry in suspects if entry.identity in codecs], None)
        files.close()
    if quarantine and bad:
        names = [name.hex() for name in bad]
        for start in range(0, len(names), DROP_AT_ONCE):
            _change(path, {"drop": names[start : start + DROP_AT_ONCE]})
    return VerifyReport(len(entries), skipped, dict(Counter(bad.values())))


def gc(path: str, budget: int) -> int:
    """Give up what was used longest ago until the folder has at most ``budget`` bytes; returns the bytes freed."""
    before = inspect(path).file_bytes
    _change(path, {"shrink": budget})
    return before - inspect(path).file_bytes


def remove(path: str, label: str = "") -> int:
    """Forget all records of one model (:attr:`OwnerReport.label`), or of all; returns how many.

    The bytes of single records stay in their slabs until they are written over; a slab that is empty is deleted.
    """
    owners = inspect(path).owners
    if label and label not in {owner.label for owner in owners}:
        raise ConnectorError(
            f"{path} has no records of {label!r}; known: {', '.join(o.label for o in owners) or 'none'}"
        )
    _change(path, {"remove": label})
    left = {owner.label: owner.records for owner in inspect(path).owners}
    return sum(owner.records - left.get(owner.label, 0) for owner in owners)


def _change(path: str, request: dict[str, object]) -> None:
    with _opened(path) as folder:
        if folder.lock(LOCK_NAME):
            store = DiskStore(folder, 1 << 62)
            try:
                requests.carry_out(store, request)
            finally:
                store.close()
        else:
            with _opened(path) as asking:
                requests.ask(asking, request)


def _find_bad(
    files: SlabFiles,
    codecs: Mapping[int, Codec | None],
    entries: Sequence[Entry],
    progress: Callable[[int, int], None] | None,
) -> dict[bytes, str]:
    """Names of bad records and what is wrong with each."""
    bad: dict[bytes, str] = {}
    ordered = sorted(entries, key=lambda entry: (entry.slab.number, entry.slot))
    for done, entry in enumerate(ordered, 1):
        codec = codecs[entry.identity]
        fault = _fault(files, codec, entry) if codec is not None else None
        if fault is not None:
            bad[entry.name] = fault
        if progress is not None:
            progress(done, len(ordered))
    return bad


def _fault(files: SlabFiles, codec: Codec, entry: Entry) -> str | None:
    if not fits(entry.length, entry.slab.slot_bytes):
        return Fault.FORMAT.value
    body = memoryview(bytearray(entry.length))
    try:
        tail = files.read(entry.slab, entry.slot, [body])[0]
    except OSError as error:
        return error.strerror or "error"
    fault = Fault.TRUNCATED if tail is None else codec.inspect(entry.name, body, tail)
    return None if fault is None else fault.value


def _codec_of(owner: Owner, secret: bytes | None) -> Codec | None:
    """None when the owner's records are encrypted with another key than ``secret``."""
    codec = make_codec(owner.identity, secret if any(owner.key_mark) else None)
    return codec if codec.owner == owner else None


@contextlib.contextmanager
def _opened(path: str) -> Iterator[OsFolder]:
    folder = None
    if os.path.islink(path):
        raise ConnectorError(f"{path} is a link; name the folder itself")
    try:
        folder = OsFolder(path, create=False)
        roles = {name.role for name in map(FileName.parse, folder.sizes()) if name is not None}
        if roles.isdisjoint(("log", "snapshot")):  # nothing may be made in, or removed from, any other folder
            raise ConnectorError(f"{path} is not a disk cache: it has no index")
        yield folder
    except FutureVersionError:
        raise ConnectorError(f"the cache in {path} was written by a newer version") from None
    except OSError as error:
        raise ConnectorError(f"the cache in {path} cannot be used: {error.strerror or error}") from None
    finally:
        if folder is not None:
            folder.close()
