"""The kit over a real LMCache server."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from ostinato.conformance.bench import Subject
from ostinato.conformance.kit import subject_of
from ostinato.conformance.suite import ConnectorConformance
from stores.lmcache_server import LMCacheServer

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("lmcache is not installed (docs/stores/lmcache.md says how)", allow_module_level=True)

pytestmark = pytest.mark.stores


@pytest.fixture(scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheServer]:
    server = LMCacheServer(tmp_path_factory.mktemp("lmcache"))
    yield server
    server.kill()


class TestLMCache(ConnectorConformance):
    @pytest.fixture
    def subject(self, _server: LMCacheServer) -> Iterator[Subject]:
        _server.clear()
        with subject_of([_server.url]) as made:
            yield made
