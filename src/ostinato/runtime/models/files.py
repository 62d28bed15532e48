"""A model's files on disk, the user's cache folder, and the digest that identifies the weights.

Owns: :class:`ModelFiles`, the places under ``$XDG_CACHE_HOME/ostinato``, and content digests.  Does not own: finding a
model by name (``source``) or converting one (``gguf_import``).

Invariants: a folder made here is 0700; a file made here appears whole or not at all (written aside, then renamed);
a digest is computed in constant memory.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from ostinato.errors import ModelFileError

READ_SIZE: Final = 1 << 20
_DIGEST_SIZE: Final = 32


class Progress(Protocol):
    """Told how far a long piece of work is; one ``start``, many ``advance``, one ``finish``, then perhaps again."""

    def start(self, total: int, label: str) -> None: ...

    def advance(self, n: int) -> None: ...

    def finish(self) -> None: ...


class NoProgress:
    """The default: says nothing."""

    def start(self, total: int, label: str) -> None:
        pass

    def advance(self, n: int) -> None:
        pass

    def finish(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A Hugging Face folder whose weights are safetensors only.

    ``weights`` are the shards in name order; ``config`` is the folder's ``config.json``.
    """

    name: str
    folder: Path
    config: Path
    weights: tuple[Path, ...]

    @classmethod
    def of_folder(cls, name: str, folder: Path) -> ModelFiles:
        """The files in ``folder``.  Raises :class:`ModelFileError` when the config or the safetensors are missing."""
        config = folder / "config.json"
        if not config.is_file():
            raise ModelFileError(f"{folder} has no config.json, so it is not a Hugging Face model folder")
        weights = tuple(sorted(folder.glob("*.safetensors")))
        if not weights:
            raise ModelFileError(
                f"{folder} has no .safetensors weights; pickled checkpoints (.bin, .pt) are never loaded, "
                "convert the model to safetensors"
            )
        return cls(name, folder, config, weights)


def cache_folder(*parts: str) -> Path:
    """``$XDG_CACHE_HOME/ostinato/<parts>`` (``~/.cache`` when unset or relative), made 0700 level by level."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    base.mkdir(parents=True, exist_ok=True)
    folder = base
    for part in ("ostinato", *parts):
        folder = folder / part
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def read_blocks(path: Path) -> Iterator[memoryview]:
    """The file's bytes in blocks of at most 1 MiB; a block is only valid until the next one is asked for."""
    buffer = memoryview(bytearray(READ_SIZE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]


def weights_digest(files: ModelFiles, progress: Progress | None = None) -> bytes:
    """BLAKE2b-256 over the config and every shard: names, sizes and contents.  32 bytes.

    This is the identity under which KV cache contents are shared, so it is cryptographic.  A file's own digest is
    remembered in the user's cache folder under its (path, size, mtime, inode); a file whose four are unchanged is not
    read again.
    """
    outer = hashlib.blake2b(b"ostinato weights 1", digest_size=_DIGEST_SIZE)
    for path in (files.config, *files.weights):
        name = path.name.encode()
        outer.update(len(name).to_bytes(8, "little") + name)
        outer.update(_file_digest(path, progress or NoProgress()))
    return outer.digest()


def _file_digest(path: Path, progress: Progress) -> bytes:
    real = path.resolve()
    try:
        before = _stamp(real)
        memory = cache_folder("digests") / hashlib.blake2b(before, digest_size=_DIGEST_SIZE).hexdigest()
        if (known := _remembered(memory)) is not None:
            return known
        digest = _content_digest(real, progress)
        # A file that changed while it was read has a digest of neither version; do not remember that one.
        if _stamp(real) == before:
            write_whole(memory, digest)
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error
    return digest


def _content_digest(path: Path, progress: Progress) -> bytes:
    inner = hashlib.blake2b(digest_size=_DIGEST_SIZE)
    progress.start(path.stat().st_size, f"hashing {path.name}")
    for block in read_blocks(path):
        inner.update(block)
        progress.advance(len(block))
    progress.finish()
    return inner.digest()


def _stamp(path: Path) -> bytes:
    stat = path.stat()
    return f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}".encode("utf-8", "surrogateescape")


def _remembered(memory: Path) -> bytes | None:
    try:
        digest = memory.read_bytes()
    except FileNotFoundError:
        return None
    return digest if len(digest) == _DIGEST_SIZE else None


def write_whole(path: Path, data: bytes) -> None:
    """Write ``path`` so that a reader sees the old file or the new one, never a part."""
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=".aside-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
