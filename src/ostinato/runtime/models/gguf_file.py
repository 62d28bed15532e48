"""The GGUF container, read once: metadata values and where each tensor's bytes lie.

Owns: parsing version 2 and 3, little-endian.  Does not own: what keys or tensors mean, or dequantisation.

The whole header of a 262k-token vocabulary takes a fraction of a second, since strings are sliced from the mapping
instead of becoming array views.  Layout (specification: ggml, docs/gguf.md)::

    "GGUF" | u32 version | u64 tensors | u64 pairs | pairs ... | tensor infos ... | pad | data ...
    pair        = string key | u32 type | value            string = u64 length | UTF-8 bytes
    tensor info = string name | u32 n | u64 dims[n] (fastest first) | u32 type | u64 offset from the data's start
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from ostinato.errors import ModelFileError

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]

_FORMATS: Final = ("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d")
_STRING: Final = 8
_ARRAY: Final = 9
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMS: Final = 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: ``shape`` slowest dimension first, ``kind`` the ggml type's number, ``start`` a file offset."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


class _Cursor:
    """A position in the mapping; every read moves it on."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def numbers(self, code: str, count: int = 1) -> tuple[int | float | bool, ...]:
        # The size is checked before unpack, so that a damaged count cannot ask for memory it does not have.
        size = struct.calcsize("<" + code) * count
        if size > len(self._data) - self.position:
            raise ModelFileError("GGUF file ends inside its header")
        values = struct.unpack_from(f"<{count}{code}", self._data, self.position)
        self.position += size
        return values

    def integer(self, code: str) -> int:
        return int(self.numbers(code)[0])

    def string(self) -> str:
        length = self.integer("Q")
        if length > len(self._data) - self.position:
            raise ModelFileError("GGUF file ends inside a string")
        start, self.position = self.position, self.position + length
        return self._data[start : self.position].decode("utf-8")

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.integer("I"), self.integer("Q")
            if item == _STRING:
                return [self.string() for _ in range(count)]
            return list(self.numbers(_format(item), count))
        return self.numbers(_format(kind))[0]


def _format(kind: int) -> str:
    code = _FORMATS[kind] if kind < len(_FORMATS) else ""
    if not code:
        raise ModelFileError(f"GGUF value type {kind} is not supported here")
    return code


class GgufFile:
    """An open GGUF file: a context manager, since tensor bytes are views of its mapping."""

    def __init__(self, path: Path) -> None:
        """Parse ``path``'s header.  Raises :class:`ModelFileError` when it is not a sound GGUF file."""
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._parse()
        except (UnicodeDecodeError, struct.error, OverflowError, MemoryError) as error:
            raise ModelFileError(f"{path} is not a sound GGUF file: {error}") from error

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._data.close()

    def _parse(self) -> None:
        cursor = _Cursor(self._data)
        if self._data[:4] != b"GGUF":
            raise ModelFileError("not a GGUF file: it does not start with 'GGUF'")
        cursor.position = 4
        version = cursor.integer("I")
        if version not in _VERSIONS:
            raise ModelFileError(f"GGUF version {version} is not supported (2 and 3 are)")
        tensors, pairs = cursor.integer("Q"), cursor.integer("Q")
        self.metadata: dict[str, Value] = {}
        for _ in range(pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.integer("I"))
        raw = [self._tensor_info(cursor) for _ in range(tensors)]
        step = self.integer("general.alignment", _DEFAULT_ALIGNMENT)
        if step < 1:
            raise ModelFileError(f"GGUF alignment {step} is not positive")
        base = -(-cursor.position // step) * step
        self.tensors = tuple(TensorInfo(t.name, t.shape, t.kind, base + t.start) for t in raw)

    @staticmethod
    def _tensor_info(cursor: _Cursor) -> TensorInfo:
        name, count = cursor.string(), cursor.integer("I")
        if count > _MAX_DIMS:
            raise ModelFileError(f"GGUF tensor {name} has {count} dimensions")
        dims = tuple(int(n) for n in reversed(cursor.numbers("Q", count)))
        return TensorInfo(name, dims, cursor.integer("I"), cursor.integer("Q"))

    def data(self, start: int, size: int) -> memoryview:
        """``size`` bytes of the file at ``start``; release it before the file is closed."""
        if start + size > len(self._data):
            raise ModelFileError("GGUF file ends inside a tensor")
        return memoryview(self._data)[start : start + size]

    def integer(self, key: str, default: int | None = None) -> int:
        """The whole number under ``key``."""
        value = self.metadata.get(key, default)
        if not isinstance(value, int):
            raise ModelFileError(f"GGUF key {key} should hold a whole number, found {value!r:.80}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """The number under ``key``."""
        value = self.metadata.get(key, default)
        if not isinstance(value, (int, float)):
            raise ModelFileError(f"GGUF key {key} should hold a number, found {value!r:.80}")
        return float(value)

    def items(self, key: str) -> list[Scalar]:
        """The array under ``key``."""
        value = self.metadata.get(key)
        if not isinstance(value, list):
            raise ModelFileError(f"GGUF key {key} should hold an array, found {value!r:.80}")
        return value
