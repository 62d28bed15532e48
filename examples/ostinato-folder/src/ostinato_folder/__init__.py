"""One file per record in a folder, as a tier that several engines share.  Specification: ``folder:/some/where``.

Owns: names of files, and how one is written so that nobody reads half of it.  Everything else is the base's.
Threads: ``contains`` on the base's lookup thread, ``load`` and ``store`` on a thread each; all may block.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from ostinato.connectors.api import Capabilities, Ownership, Site
from ostinato.connectors.records import Record
from ostinato.connectors.registry import TierSpec
from ostinato.connectors.store import StoreConnector
from ostinato.errors import ConfigError
from ostinato.ids import TierId


class FolderConnector(StoreConnector):
    """SHARED: others may write and delete in the folder, so answers may be stale: a load that finds nothing misses."""

    def __init__(self, root: Path) -> None:
        super().__init__(Capabilities(TierId("folder"), Ownership.SHARED))
        self.root = root

    def open_directory(self, site: Site) -> Folder:
        return Folder(self.root)

    def open_records(self, site: Site) -> Folder:
        return Folder(self.root)


class Folder:
    """Implements ``Directory`` and ``Records``.  What the file system raises, the base counts as a miss."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root

    def contains(self, names: Sequence[str]) -> Sequence[bool]:
        return [self._path(name).exists() for name in names]

    def load(self, batch: Sequence[Record]) -> Sequence[bool]:
        return [self._load(record) for record in batch]

    def store(self, batch: Sequence[Record]) -> Sequence[bool]:
        for record in batch:
            self._store(record)
        return [True] * len(batch)

    def close(self) -> None: ...

    def _load(self, record: Record) -> bool:
        try:
            with self._path(record.name).open("rb", buffering=0) as file:
                whole = len(record.payload) + len(record.trailer)
                # Straight into the device page.  What it is will be told by the trailer, which the base checks.
                return os.fstat(file.fileno()).st_size == whole and os.readv(
                    file.fileno(), [record.payload, record.trailer]
                ) == whole  # fmt: skip
        except FileNotFoundError:
            return False

    def _store(self, record: Record) -> None:
        target = self._path(record.name)
        target.parent.mkdir(exist_ok=True)
        part = target.with_name(f".{secrets.token_hex(8)}")
        try:
            with part.open("wb", buffering=0) as file:
                os.writev(file.fileno(), [record.payload, record.trailer])
            part.replace(target)  # whole, or not at all
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def _path(self, name: str) -> Path:
        return self._root / name[-2:] / name


def make_connector(spec: TierSpec) -> FolderConnector:
    if not spec.argument or spec.options:
        raise ConfigError(f"tier {spec.text!r}: expected folder:/some/where, without options")
    return FolderConnector(Path(spec.argument))
