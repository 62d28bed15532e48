"""Servers and tiny models for tests of real stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from e2e.support import Oracle, tiny_gemma3
from families.configs import build
from ostinato.runtime.load import Runtime, build_runtime
from stores.redis_server import RedisServer, redis_server


@dataclass(frozen=True)
class Subject:
    """A tiny model and its cold results."""

    name: str
    runtime: Runtime
    cold: Oracle


@pytest.fixture(scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def windowed(_one_thread: None) -> Subject:
    """Full attention and windows."""
    runtime = tiny_gemma3(torch.float32)
    return Subject("windowed", runtime, Oracle(runtime))


@pytest.fixture(scope="session")
def recurrent(_one_thread: None) -> Subject:
    """Full attention and recurrent state."""
    runtime = build_runtime(build("qwen3_next"), name="qwen3_next", weights=bytes([9]) * 32, max_model_len=512)
    return Subject("recurrent", runtime, Oracle(runtime))


@pytest.fixture(params=["windowed", "recurrent"])
def subject(request: pytest.FixtureRequest) -> Subject:
    chosen: Subject = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server
