"""A folder in memory that forgets at a loss of power what was not synced: some of it, parts of it, in any order.

As adversarial as POSIX allows: an unsynced write may be there, be missing, or be there in some of its sectors, whatever
was written before or after it; a file made, renamed or removed may be so or not until the folder was synced.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

from ostinato.connectors.disk.files import Access, Buffer

SECTOR = 512


class PowerLoss(BaseException):
    """The machine is off: nothing in the process may catch it."""


class _Inode:
    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.durable = bytes(data)
        self.writes: list[tuple[int, bytes]] = []

    def sync(self) -> None:
        self.durable, self.writes = bytes(self.data), []

    def after_crash(self, rng: random.Random) -> _Inode:
        data = bytearray(self.durable)
        if rng.random() < 0.5:  # the new size got there
            _resize(data, len(self.data))
        for offset, content in self.writes:
            fate = rng.choice(("kept", "lost", "torn"))
            for start in range(0, len(content), SECTOR):
                if fate == "kept" or (fate == "torn" and rng.random() < 0.5):
                    part = content[start : start + SECTOR]
                    place = offset + start
                    data[place : place + len(part)] = part[: max(0, len(data) - place)]
        return _Inode(bytes(data))


def _resize(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))


class SimulatedFolder:
    """Implements ``Folder``.  ``on_operation(what)`` runs before each call and may raise; ``limit``: bytes in all."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.operations = 0
        self.peak = 0
        self.locked = False
        self.on_operation: Callable[[str], None] = lambda what: None
        self._names: dict[str, _Inode] = {}
        self._durable: dict[str, _Inode] = {}
        self._changes: list[tuple[str, _Inode | None]] = []

    def after_crash(self, rng: random.Random) -> SimulatedFolder:
        """The folder as another process finds it after the power came back."""
        names = dict(self._durable)
        in_order = rng.random() < 0.7
        count = rng.randint(0, len(self._changes))
        for number, (name, inode) in enumerate(self._changes):
            if number < count if in_order else rng.random() < 0.5:
                if inode is None:
                    names.pop(name, None)
                else:
                    names[name] = inode
        return self._copy(names, lambda inode: inode.after_crash(rng))

    def copy(self) -> SimulatedFolder:
        """The folder as it is, as after the end of a process."""
        return self._copy(self._names, lambda inode: _Inode(bytes(inode.data)))

    def _copy(self, names: dict[str, _Inode], make: Callable[[_Inode], _Inode]) -> SimulatedFolder:
        copy = SimulatedFolder(self.limit)
        made = {id(inode): make(inode) for inode in names.values()}
        copy._names = {name: made[id(inode)] for name, inode in names.items()}
        copy._durable = dict(copy._names)
        return copy

    # Folder.

    def sizes(self) -> dict[str, int]:
        self.step("list")
        return {name: len(inode.data) for name, inode in self._names.items()}

    def open(self, name: str, access: Access, direct: bool = False) -> SimulatedFile:
        self.step("open")
        if name not in self._names:
            if access is not Access.CREATE:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            self._set(name, _Inode())
        return SimulatedFile(self, self._names[name], access is not Access.READ)

    def replace(self, old: str, new: str) -> None:
        self.step("replace")
        self._set(new, self._names[old])
        self._set(old, None)

    def remove(self, name: str) -> None:
        self.step("remove")
        if name not in self._names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self._set(name, None)

    def sync(self) -> None:
        self.step("sync folder")
        self._durable, self._changes = dict(self._names), []

    def lock(self, name: str) -> bool:
        self.locked = True
        return True

    def close(self) -> None:
        self.locked = False

    # Tests.

    def bytes_of(self, name: str) -> bytearray:
        return self._names[name].data

    def step(self, what: str) -> None:
        self.operations += 1
        total = self.total()
        self.peak = max(self.peak, total)
        assert self.limit is None or total <= self.limit, f"{total} bytes of {self.limit} before {what}"
        self.on_operation(what)

    def total(self) -> int:
        return sum(len(inode.data) for inode in {id(inode): inode for inode in self._names.values()}.values())

    def _set(self, name: str, inode: _Inode | None) -> None:
        self._changes.append((name, inode))
        if inode is None:
            del self._names[name]
        else:
            self._names[name] = inode


class SimulatedFile:
    def __init__(self, folder: SimulatedFolder, inode: _Inode, writable: bool) -> None:
        self._folder = folder
        self._inode = inode
        self._writable = writable
        self._closed = False

    def read(self, buffers: Sequence[Any], offset: int) -> int:
        self._step("read")
        done = 0
        for buffer in buffers:
            part = self._inode.data[offset + done : offset + done + len(buffer)]
            buffer[: len(part)] = part
            done += len(part)
        return done

    def write(self, buffers: Sequence[Buffer], offset: int) -> None:
        self._step("write")
        assert self._writable
        content = b"".join(bytes(buffer) for buffer in buffers)
        data = self._inode.data
        if len(data) < offset + len(content):
            _resize(data, offset + len(content))
        data[offset : offset + len(content)] = content
        self._inode.writes.append((offset, content))
        self._folder.step("written")

    def allocate(self, size: int) -> None:
        self._step("allocate")
        _resize(self._inode.data, max(size, len(self._inode.data)))

    def truncate(self, size: int) -> None:
        self._step("truncate")
        _resize(self._inode.data, size)

    def sync(self) -> None:
        self._step("sync")
        self._inode.sync()

    def size(self) -> int:
        return len(self._inode.data)

    def close(self) -> None:
        self._closed = True

    def _step(self, what: str) -> None:
        assert not self._closed, f"{what} of a closed file"
        self._folder.step(what)
