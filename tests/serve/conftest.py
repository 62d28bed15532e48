"""The tiny model of the server's tests, made once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ostinato.runtime.load import Runtime
from serve.served import Running, serving, tiny_runtime


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    return tiny_runtime()


@pytest.fixture(scope="module")
def running(runtime: Runtime) -> Iterator[Running]:
    """A server with the plain chat template, and nothing else out of the ordinary."""
    with serving(runtime, template="plain") as one:
        yield one
