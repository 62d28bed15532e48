"""The part of the package ``mooncake`` that is used, in this process: it reads and writes memory at addresses."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ostinato.connectors.mooncake_client import Library, MooncakeClient, MooncakeOptions


class FakeStore:
    """``answers``: codes for the next calls of a method, in place of the real ones (an int: for each key)."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.groups: dict[str, str] = {}
        self.calls: list[tuple[str, Any]] = []
        self.answers: dict[str, deque[int | list[int]]] = {}
        self.setup_code = 0
        self.listening = True
        self.rehearsal: Exception | None = None
        self.registered: list[tuple[int, int]] = []
        self.closed = False
        self._pools: list[Any] = []

    def names(self, method: str) -> list[list[str]]:
        return [list(keys) for called, keys in self.calls if called == method]

    def library(self) -> Library:
        return Library(
            lambda: self, lambda: SimpleNamespace(group_ids=[]), self._rehearse, lambda address: self.listening
        )

    def setup(self, *arguments: Any) -> int:
        self.calls.append(("setup", arguments))
        return self.setup_code

    def setup_dummy(self, *arguments: Any) -> int:
        self.calls.append(("setup_dummy", arguments))
        return self.setup_code

    def register_buffer(self, address: int, size: int) -> int:
        self.registered.append((address, size))
        return 0

    def alloc_from_mem_pool(self, size: int) -> int:
        self._pools.append(ctypes.create_string_buffer(size))
        return ctypes.addressof(self._pools[-1])

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        return self._answer("exist", keys) or [int(key in self.objects) for key in keys]

    def batch_put_from(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], config: Any = None
    ) -> list[int]:
        for address, size in zip(addresses, sizes, strict=True):
            assert any(low <= address and address + size <= low + length for low, length in self.registered)
        codes = self._answer("put", keys) or [0] * len(keys)
        groups = config.group_ids if config is not None else [""] * len(keys)
        for key, address, size, group, code in zip(keys, addresses, sizes, groups, codes, strict=False):
            if code == 0:
                self.objects.setdefault(key, ctypes.string_at(address, size))
                self.groups.setdefault(key, group)
        return codes

    def batch_get_into(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        codes = self._answer("get", keys)
        if codes:
            return codes
        codes = []
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            value = self.objects.get(key)
            codes.append(-704 if value is None else -600 if len(value) > size else len(value))
            if value is not None and len(value) <= size:
                ctypes.memmove(address, value, len(value))
        return codes

    def get_size(self, key: str) -> int:
        return len(self.objects[key]) if key in self.objects else -704

    def remove(self, key: str, force: bool) -> int:
        assert force, "leased records stay otherwise"
        self.calls.append(("remove", [key]))
        return 0 if self.objects.pop(key, None) is not None else -704

    def close(self) -> int:
        self.closed = True
        return 0

    def _rehearse(self, options: MooncakeOptions) -> None:
        self.calls.append(("rehearse", options))
        if self.rehearsal is not None:
            raise self.rehearsal

    def _answer(self, method: str, keys: Sequence[str]) -> list[int]:
        self.calls.append((method, list(keys)))
        given = self.answers.get(method)
        if not given:
            return []
        code = given.popleft()
        return [code] * len(keys) if isinstance(code, int) else code


def client_of(fake: FakeStore, staging: int = 1 << 16, **options: Any) -> MooncakeClient:
    return MooncakeClient(MooncakeOptions("127.0.0.1:1", **options), staging, fake.library())
