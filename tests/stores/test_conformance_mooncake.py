"""The kit over a real Mooncake master with a storage owner, whose records outlive an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ostinato.conformance.bench import Subject
from ostinato.conformance.kit import subject_of
from ostinato.conformance.suite import ConnectorConformance
from stores.mooncake_server import Program, master, private_network, storage_owner

pytest.importorskip("mooncake", reason="pip install ostinato[mooncake]")
pytestmark = pytest.mark.stores


@pytest.fixture(scope="module", autouse=True)
def _network() -> Iterator[None]:
    with private_network():
        yield


def _url(store: Program) -> str:
    return f"mooncake://{store.address}?segment=0"


class TestMooncake(ConnectorConformance):
    @pytest.fixture
    def subject(self) -> Iterator[Subject]:
        with master() as store, storage_owner(store), subject_of([_url(store)]) as made:
            yield made


class TestHostAndMooncake(ConnectorConformance):
    @pytest.fixture
    def subject(self) -> Iterator[Subject]:
        with master() as store, storage_owner(store), subject_of(["host:1MiB", _url(store)]) as made:
            yield made
