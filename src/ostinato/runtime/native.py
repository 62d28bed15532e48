"""The C++ library: compiled once per machine and torch version, then loaded from the user's cache folder.

Owns: finding a compiler, building ``ostinato/csrc/*.cpp``, the cache folder, loading the operators into
``torch.ops.ostinato``, choosing an instruction set.  Does not own: what the operators do, or what runs without them.

Invariants: a library in the cache is whole (it is built aside and renamed into place), and its folder is named by a
digest of everything that went into it, so a stale one is never loaded.  :func:`load` never raises: a machine without a
compiler gets a reason, and runs on torch alone.

Thread: call :func:`load` from one thread at start-up; its result is kept for the process.

    $XDG_CACHE_HOME/ostinato/native/<digest>/ostinato_native.so
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch

from ostinato.errors import ConfigError

SOURCES = Path(__file__).resolve().parent.parent / "csrc"
LIBRARY_NAME = "ostinato_native.so"
COMPILE_TIMEOUT_S = 300

# Contraction is off so that an expression rounds the same way in every instance of a template; the kernels ask for
# fused multiply-add by name.
COMPILE_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-w")


class Isa(IntEnum):
    """Instruction sets of the kernels, as numbered in ``csrc/kernels.h``; AUTO is the best one the machine has."""

    AUTO = -1
    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """A loaded library and the best instruction set that this machine has for it."""

    path: Path
    best_isa: Isa


@functools.cache
def load() -> tuple[NativeLibrary | None, str]:
    """Build if needed and load.

    Returns:
        The library and an empty string, or None and a one-line reason.
    """
    if os.environ.get("OSTINATO_NATIVE", "1") == "0":
        return None, "switched off by OSTINATO_NATIVE=0"
    compiler = find_compiler()
    if compiler is None:
        return None, "no C++ compiler found (looked for $CXX, g++, c++, clang++)"
    try:
        path = build(compiler, cache_folder())
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        best = Isa(torch.ops.ostinato.best_isa())
    except subprocess.CalledProcessError as error:
        return None, f"compilation failed: {_first_error(error.stderr)}"
    except subprocess.TimeoutExpired:
        return None, f"compilation took longer than {COMPILE_TIMEOUT_S} s"
    except (OSError, RuntimeError) as error:
        return None, f"the C++ library could not be built or loaded: {error}".splitlines()[0]
    return NativeLibrary(path, best), ""


def chosen_isa(best: Isa) -> Isa:
    """``best``, or what ``OSTINATO_ISA`` names.

    Raises:
        ConfigError: that instruction set does not exist, or this machine lacks it.
    """
    wanted = os.environ.get("OSTINATO_ISA", "")
    if not wanted:
        return best
    levels = {level.name.lower(): level for level in Isa if level is not Isa.AUTO}
    if wanted not in levels:
        raise ConfigError(f"OSTINATO_ISA={wanted}: choose one of {', '.join(levels)}")
    if levels[wanted] > best:
        raise ConfigError(f"OSTINATO_ISA={wanted}: this machine has {best.name.lower()} at most")
    return levels[wanted]


def find_compiler() -> str | None:
    """Path of ``$CXX`` when set, else of the first of g++, c++, clang++."""
    chosen = os.environ.get("CXX")
    candidates = (chosen,) if chosen else ("g++", "c++", "clang++")
    return next((path for name in candidates if (path := shutil.which(name))), None)


def cache_folder() -> Path:
    """Folder that holds one folder per digest."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "ostinato" / "native"


def digest(compiler: str) -> str:
    """Names a build: sources, compiler and its version, flags, machine, torch."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=30).stdout
    state = hashlib.sha256()
    for part in (version, repr(COMPILE_FLAGS).encode(), platform.machine().encode(), torch.__version__.encode()):
        state.update(len(part).to_bytes(8, "little") + part)
    for source in sorted(SOURCES.glob("*.*")):
        content = source.read_bytes()
        state.update(source.name.encode() + b"\0" + len(content).to_bytes(8, "little") + content)
    return state.hexdigest()[:24]


def build(compiler: str, folder: Path) -> Path:
    """Path of the library, compiled first unless the cache has it.

    Two processes that build at once each work in a folder of their own; the later rename wins, with equal content.

    Raises:
        subprocess.CalledProcessError: the compiler refused; its ``stderr`` is text.
        OSError: the cache folder cannot be written, or holds no sources to build from.
    """
    target = folder / digest(compiler) / LIBRARY_NAME
    if target.is_file():
        return target
    sources = sorted(SOURCES.glob("*.cpp"))
    if not sources:
        raise FileNotFoundError(f"no C++ sources in {SOURCES}")
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as work:
        library = _compile(compiler, sources, Path(work))
        os.replace(library, target)
    return target


def _compile(compiler: str, sources: list[Path], work: Path) -> Path:
    """Compile the sources side by side and link them, all inside ``work``."""
    torch_root = Path(torch.__file__).resolve().parent
    objects = [work / f"{source.stem}.o" for source in sources]

    def compile_one(source: Path, target: Path) -> None:
        include = str(torch_root / "include")
        _run([compiler, *COMPILE_FLAGS, "-isystem", include, "-c", str(source), "-o", str(target)])

    with ThreadPoolExecutor(max_workers=max(1, min(len(sources), os.cpu_count() or 1))) as pool:
        list(pool.map(compile_one, sources, objects))
    library = work / LIBRARY_NAME
    # torch is loaded already, so no run path is needed; on macOS its symbols are looked up at load time.
    on_macos = sys.platform == "darwin"
    libraries = ["-undefined", "dynamic_lookup"] if on_macos else [f"-L{torch_root / 'lib'}", "-ltorch_cpu"]
    _run([compiler, "-shared", "-o", str(library), *map(str, objects), *libraries])
    return library


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, check=True, text=True, timeout=COMPILE_TIMEOUT_S)


def _first_error(stderr: str | None) -> str:
    lines = (stderr or "").strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[-1])
