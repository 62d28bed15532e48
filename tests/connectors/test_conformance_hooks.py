"""The conformance kit over connectors with hooks, which emit stores of their own: their servers are in this process."""

from __future__ import annotations

import sys

import pytest

from connectors.fake_mooncake import FakeStore
from connectors.memory_lmcache import MemoryLMCache
from ostinato.conformance.bench import Subject
from ostinato.conformance.suite import ConnectorConformance
from ostinato.connectors.lmcache import LMCacheConnector
from ostinato.connectors.lmcache_lookups import Address
from ostinato.connectors.mooncake import MooncakeConnector
from ostinato.connectors.mooncake_client import MooncakeOptions

pytestmark = pytest.mark.slow


class TestMooncake(ConnectorConformance):
    @pytest.fixture
    def subject(self) -> Subject:
        fake = FakeStore()
        fake.calls = NoList()

        def lose() -> None:
            for name in sorted(fake.objects)[::4]:
                del fake.objects[name]

        def spoil() -> None:
            for number, name in enumerate(sorted(fake.objects)):
                value = bytearray(fake.objects[name])
                value[number * 31 % len(value)] ^= 4
                fake.objects[name] = bytes(value)

        options = MooncakeOptions("127.0.0.1:1")
        return Subject("mooncake", lambda: (MooncakeConnector(options, library=fake.library()),), spoil, lose)


class TestLMCache(ConnectorConformance):
    @pytest.fixture
    def subject(self, monkeypatch: pytest.MonkeyPatch) -> Subject:
        server = MemoryLMCache()
        server.asked, server.stored = NoList(), NoList()
        monkeypatch.setitem(sys.modules, "ostinato.connectors.lmcache_mover", server.module())

        def lose() -> None:
            for key in sorted(server.content)[::5]:
                del server.content[key]

        address = Address("tcp://127.0.0.1:5555")
        return Subject("lmcache", lambda: (LMCacheConnector(address),), lose=lose)


class NoList(list):  # type: ignore[type-arg]
    """A log that remembers nothing: what grows in the fake is not the connector's."""

    def append(self, item: object) -> None: ...

    def extend(self, items: object) -> None: ...
