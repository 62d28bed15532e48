"""KV events of a running server: a router's index tells what requests will find."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from ostinato.errors import ConfigError
from ostinato.events.follower import EventFollower
from ostinato.events.index import EventIndex
from ostinato.runtime.load import Runtime
from serve.served import MODEL, Running, serving

CONFIG = json.dumps(
    {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
)


def ask(running: Running, key: str, tokens: list[int]) -> int:
    """Tokens reused, by the server's own account."""
    answer = running.client(key).completions.create(model=MODEL, prompt=tokens, max_tokens=20, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def described(running: Running, key: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(
        f"{running.url}/v1/cache/events", headers={"Authorization": f"Bearer {key}"}
    ).json()
    return found


def test_a_router_predicts_what_is_reused(runtime: Runtime) -> None:
    with serving(runtime, {"kv_events_config": CONFIG}, keys=("one", "two")) as running:
        first = described(running, "one")
        spaces = {key: bytes.fromhex(described(running, key)["space"]) for key in ("one", "two")}
        assert spaces["one"] != spaces["two"]
        tokens = list(range(10, 180))
        assert ask(running, "one", tokens) == 0
        router = EventFollower(EventIndex.of(first["groups"]), first["endpoint"], first["replay_endpoint"])
        try:
            router.follow()  # late: by snapshot, from an engine that has nothing to do
            for key, prompt in [("one", tokens), ("two", tokens), ("one", tokens[:90]), ("one", [*tokens, 7, 8] * 2)]:
                predicted = router.index.predict(prompt, spaces[key])
                assert ask(running, key, prompt) == predicted
                router.follow(5)
            assert router.index.predict(tokens, spaces["one"]) == 160
            assert router.index.predict(tokens, spaces["two"]) == 160
        finally:
            router.close()


def test_without_events_the_route_says_how_to_have_them(running: Running) -> None:
    answer = httpx.get(f"{running.url}/v1/cache/events")
    assert answer.status_code == 404
    assert "--kv-events-config" in answer.json()["error"]["message"]


def test_a_mistake_is_told_before_anything_is_loaded(runtime: Runtime) -> None:
    with (
        pytest.raises(ConfigError, match="allow_public"),
        serving(runtime, {"kv_events_config": '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'}),
    ):
        pass
