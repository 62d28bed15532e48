"""``--kv-events-config``: vLLM's JSON, read and checked.

Owns: names, defaults, where events may go.  vLLM binds ``*`` and connects to anything else; here an address is bound,
and one that others can reach has to be allowed: events carry the tokens of everybody's prompts.
"""

from __future__ import annotations

import ipaddress
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

from ostinato.errors import ConfigError

ENDPOINT: Final = "tcp://127.0.0.1:5557"


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``buffer_steps``: batches kept for replay; ``max_queue_size``: batches that may wait to be sent.

    ``hwm``: batches that wait for one slow subscriber; beyond, it misses some.  ``allow_public`` is ours.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = ENDPOINT
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    allow_public: bool = False

    @property
    def enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


def parse_events_config(text: str) -> KvEventsConfig:
    """Raises ConfigError that says what to change."""
    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f'kv_events_config: {error}; give JSON such as {{"enable_kv_cache_events": true, "endpoint": "{ENDPOINT}"}}'
        ) from None
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        if getattr(config, name) < 1:
            raise ConfigError(f"kv_events_config: {name} must be at least 1, not {getattr(config, name)}")
    for endpoint in (config.endpoint, config.replay_endpoint):
        if endpoint is not None:
            _check(endpoint, config.allow_public)
    return config


def _check(endpoint: str, allow_public: bool) -> None:
    scheme, _, rest = endpoint.partition("://")
    if scheme in ("ipc", "inproc") and rest:
        return
    try:
        parts = urlsplit(endpoint.replace("*", "0.0.0.0"))
        host, port = parts.hostname, parts.port if not endpoint.endswith(":*") else 0
    except ValueError:
        host, port = None, None
    if scheme != "tcp" or host is None or port is None:
        raise ConfigError(f"kv_events_config: {endpoint!r} is no address; give one such as {ENDPOINT}")
    if not allow_public and not _is_loopback(host):
        raise ConfigError(
            f"kv_events_config: {endpoint} lets other machines read the tokens of all prompts: use {ENDPOINT}, or add "
            '"allow_public": true'
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
