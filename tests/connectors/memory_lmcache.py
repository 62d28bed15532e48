"""An LMCache server in this process: what it finds for a prompt, what it holds for whom, and records instead of memory.

It stands for the module that speaks to a real one, so that everything else of the connector runs without it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ostinato.cache.keys import BlockKey
from ostinato.connectors.lmcache_claims import Chain, Lookup, required_keys
from ostinato.connectors.lmcache_lookups import Desk, look_up
from ostinato.connectors.records import Record


class MemoryLMCache:
    """``held``: units that each open lookup keeps.  ``broken``: every call raises.  ``forgets``: loads find nothing."""

    def __init__(self) -> None:
        self.content: dict[BlockKey, tuple[bytes, bytes]] = {}
        self.held: dict[str, int] = {}
        self.asked: list[int] = []
        self.stored: list[BlockKey] = []
        self.broken = self.forgets = False
        self.lock = threading.Lock()

    def module(self) -> Any:
        """In place of ``ostinato.connectors.lmcache_mover``."""
        server = self

        class Client:
            def __init__(self, address: Any, site: Any, buffer: int = 0) -> None:
                server.check()
                self.layout = site.layout

            def look_up(self, name: str, chain: Chain) -> int:
                server.check()
                with server.lock:
                    server.asked.append(len(chain))
                    for units in range(len(chain), 0, -1):
                        if all(key in server.content for key in required_keys(self.layout, chain[:units])):
                            server.held[name] = units
                            return units
                return 0

            def end(self, lookup: Lookup) -> None:
                server.check()
                server.held.pop(lookup.name, None)

            def close(self) -> None: ...

        class Records:
            def __init__(self, client: Client, desk: Desk) -> None:
                self.client, self.desk = client, desk

            def load(self, batch: Sequence[Record]) -> Sequence[bool]:
                server.check()
                taken = self.desk.claims.take([record.key for record in batch])
                if taken is None:
                    return [False] * len(batch)
                lookup = taken[1] or look_up(self.desk, self.client, taken[0])
                found = [server.content.get(record.key) if not server.forgets else None for record in batch]
                for record, value in zip(batch, found, strict=True):
                    if value is not None:
                        record.payload[:], record.trailer[:] = value
                if lookup is not None:
                    self.client.end(lookup)
                return [value is not None for value in found]

            def store(self, batch: Sequence[Record]) -> Sequence[bool]:
                server.check()
                new = [record for record in batch if record.key not in self.desk.written]
                keys = [record.key for record in new]
                assert not keys or self.desk.written.chain_of(keys) is not None, "units of no known prompt"
                with server.lock:
                    server.stored += keys
                    for record in new:
                        server.content.setdefault(record.key, (bytes(record.payload), bytes(record.trailer)))
                return [True] * len(batch)

            def close(self) -> None: ...

        module = ModuleType("ostinato.connectors.lmcache_mover")
        module.__dict__.update(check_server=lambda *_: None, LMCacheClient=Client, LMCacheRecords=Records)
        return module

    def check(self) -> None:
        if self.broken:
            raise ConnectionError("the server is gone")
