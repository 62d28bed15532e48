"""The one door to the operating system: everything that the disk tier does to a folder and its files.

Owns: flags and permissions (folder 0700, files 0600, links never followed), whole reads and writes, vectored calls.
Does not own: names and contents.  A test replaces it by a folder that loses, tears and reorders what was not synced.
Any thread; a file is closed when no other thread uses it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from enum import Enum
from typing import Final, Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_BUFFERS: Final = 1024
"""Buffers per call that every Linux takes (IOV_MAX)."""


class Access(Enum):
    READ = os.O_RDONLY
    WRITE = os.O_RDWR
    CREATE = os.O_RDWR | os.O_CREAT
    """Opens the file, and makes it first when it is not there."""


class File(Protocol):
    """An open file.  All methods raise OSError."""

    def read(self, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        """Fill ``buffers`` from ``offset`` on; fewer bytes only at the file's end."""

    def write(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write all of ``buffers``."""

    def allocate(self, size: int) -> None:
        """Give the file ``size`` bytes on the disk."""

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """Return when everything written so far survives a loss of power (fdatasync)."""

    def size(self) -> int: ...

    def close(self) -> None: ...


class Folder(Protocol):
    """A folder and the files directly in it, by bare name.  All methods raise OSError."""

    def sizes(self) -> dict[str, int]:
        """Regular files and their sizes."""

    def open(self, name: str, access: Access, direct: bool = False) -> File:
        """``direct``: past the page cache; addresses, lengths and offsets are then multiples of 4096."""

    def replace(self, old: str, new: str) -> None: ...

    def remove(self, name: str) -> None: ...

    def sync(self) -> None:
        """Return when files made, renamed and removed so far stay so after a loss of power."""

    def lock(self, name: str) -> bool:
        """Become the only writer; False when there is one, or may be none.  Ends with :meth:`close` or the process."""

    def close(self) -> None: ...


class OsFile:
    """Implements :class:`File` over a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor

    def read(self, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        done = 0
        for some in _portions(buffers):
            wanted = sum(len(buffer) for buffer in some)
            got = os.preadv(self._fd, some, offset + done)
            done += got
            while 0 < got < wanted:
                some, wanted = _after(some, got), wanted - got
                got = os.preadv(self._fd, some, offset + done)
                done += got
            if got < wanted:
                break
        return done

    def write(self, buffers: Sequence[Buffer], offset: int) -> None:
        for some in _portions(buffers):
            wanted = sum(len(buffer) for buffer in some)
            while wanted:
                put = os.pwritev(self._fd, some, offset)
                if not put:
                    raise OSError(errno.EIO, "nothing could be written")
                offset += put
                wanted -= put
                if wanted:
                    some = _after(some, put)

    def allocate(self, size: int) -> None:
        os.posix_fallocate(self._fd, 0, size)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class OsFolder:
    """Implements :class:`Folder`.  ``path`` is made when it is not there; a link in its last place is refused."""

    def __init__(self, path: str, create: bool = True) -> None:
        if create:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        self._lock = -1
        status = os.fstat(self._fd)
        if create and status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(self._fd, 0o700)

    def sizes(self) -> dict[str, int]:
        found = {}
        with os.scandir(self._fd) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    found[entry.name] = status.st_size
        return found

    def open(self, name: str, access: Access, direct: bool = False) -> OsFile:
        flags = access.value | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        return OsFile(os.open(name, flags, 0o600, dir_fd=self._fd))

    def replace(self, old: str, new: str) -> None:
        os.replace(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._fd)

    def sync(self) -> None:
        os.fsync(self._fd)

    def lock(self, name: str) -> bool:
        try:
            if self._lock < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._lock = os.open(name, flags, 0o600, dir_fd=self._fd)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                return False  # it can be read at most
            raise
        return True

    def close(self) -> None:
        for descriptor in (self._lock, self._fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._lock = self._fd = -1


def _portions(buffers: Sequence[Buffer]) -> list[Sequence[Buffer]]:
    if len(buffers) <= MAX_BUFFERS:
        return [buffers]
    return [buffers[start : start + MAX_BUFFERS] for start in range(0, len(buffers), MAX_BUFFERS)]


def _after(buffers: Sequence[Buffer], count: int) -> list[memoryview]:
    """What is left of ``buffers`` behind their first ``count`` bytes."""
    rest = []
    for buffer in buffers:
        view = memoryview(buffer)
        if count < len(view):
            rest.append(view[count:])
            count = 0
        else:
            count -= len(view)
    return rest
