"""Real stores keep their contract: the kit over a Redis server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ostinato.conformance.bench import Subject
from ostinato.conformance.kit import subject_of
from ostinato.conformance.suite import ConnectorConformance
from stores.redis_server import RedisServer

pytestmark = pytest.mark.stores


class TestRedis(ConnectorConformance):
    @pytest.fixture
    def subject(self, redis: RedisServer) -> Iterator[Subject]:
        def spoil() -> None:
            for number, key in enumerate(sorted(redis.names())):
                value = bytearray(redis.value(key))
                value[number * 37 % len(value)] ^= 1 << number % 8
                redis.ask("SET", key, bytes(value))

        def lose() -> None:
            for key in sorted(redis.names())[::4]:
                redis.ask("DEL", key)

        with subject_of([redis.url]) as made:
            yield Subject(made.name, made.make, spoil, lose)


class TestHostAndRedis(ConnectorConformance):
    @pytest.fixture
    def subject(self, redis: RedisServer) -> Iterator[Subject]:
        with subject_of(["host:1MiB", redis.url]) as made:
            yield made
