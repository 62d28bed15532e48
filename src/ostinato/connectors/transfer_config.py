"""vLLM's ``--kv-transfer-config`` JSON, with the field's connector names, as connectors of ours.

Owns: which names are understood and what their ``kv_connector_extra_config`` may say.  Does not own: the connectors;
each name becomes a tier specification (``registry``).

::

    {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": [
        {"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 8589934592}},
        {"kv_connector": "RedisConnector", "kv_connector_extra_config": {"url": "redis://127.0.0.1:6379"}}
    ]}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec

from ostinato.connectors.api import Connector
from ostinato.connectors.multi import MultiConnector
from ostinato.connectors.registry import known_names, make_connector
from ostinato.errors import ConfigError, UnknownConnectorError


class _TransferConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The fields that are understood.  Fields of vLLM that mean nothing here are accepted with their one good value."""

    kv_connector: str
    kv_role: str = "kv_both"
    kv_connector_extra_config: dict[str, Any] = {}
    kv_load_failure_policy: str = "recompute"
    engine_id: str | None = None


def connector_from_json(text: str) -> Connector:
    """The connector that ``text`` describes.  Raises ConfigError, which names the field that is wrong."""
    try:
        config = msgspec.json.decode(text, type=_TransferConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f"kv_transfer_config: {error}") from None
    return _build(config)


def _build(config: _TransferConfig) -> Connector:
    if config.kv_role != "kv_both":
        raise ConfigError(
            f"kv_transfer_config: kv_role {config.kv_role!r} splits prefill from decode, which is not supported: "
            "use kv_both"
        )
    if config.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "kv_transfer_config: a failed load is always computed again: kv_load_failure_policy is recompute"
        )
    name, extra = config.kv_connector, dict(config.kv_connector_extra_config)
    if name == "MultiConnector":
        return _build_multi(extra)
    if name not in _SPECIFICATIONS:
        names = ", ".join(sorted({*_SPECIFICATIONS, "MultiConnector"}))
        raise UnknownConnectorError(
            f"kv_transfer_config: no connector {name!r}; known: {names}, and by tier name: {', '.join(known_names())}"
        )
    specification = _SPECIFICATIONS[name](name, extra)
    if extra:
        raise ConfigError(f"kv_transfer_config: {name} does not know {', '.join(sorted(extra))}")
    return make_connector(specification)


def _build_multi(extra: dict[str, Any]) -> Connector:
    children, write = extra.pop("connectors", None), extra.pop("write", "all")
    if extra or not isinstance(children, list):
        raise ConfigError("kv_transfer_config: MultiConnector takes `connectors`, a list of such objects, and `write`")
    try:
        configs = msgspec.convert(children, list[_TransferConfig])
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_transfer_config: connectors: {error}") from None
    return MultiConnector([_build(config) for config in configs], write)


def _text(name: str, extra: dict[str, Any], *fields: str) -> str:
    """The first of ``fields`` that is given; all of them are taken out."""
    found = [str(extra.pop(field)) for field in fields if field in extra]
    if not found:
        raise ConfigError(f"kv_transfer_config: {name} needs {' or '.join(fields)} in kv_connector_extra_config")
    return found[0]


def _options(extra: dict[str, Any]) -> str:
    """What is left, as options of the tier: the tier itself says which it knows."""
    pairs = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in extra.items()}
    extra.clear()
    return f"?{urlencode(pairs)}" if pairs else ""


def _host(name: str, extra: dict[str, Any]) -> str:
    lazy = extra.pop("lazy_offload", False)
    return f"host:{_text(name, extra, 'cpu_bytes_to_use')}?store={'lazy' if lazy else 'eager'}"


def _disk(name: str, extra: dict[str, Any]) -> str:
    return f"disk:{quote(_text(name, extra, 'path'), safe='/: ')}:{_text(name, extra, 'size')}{_options(extra)}"


def _redis(name: str, extra: dict[str, Any]) -> str:
    return _text(name, extra, "url") + _options(extra)


def _mooncake(name: str, extra: dict[str, Any]) -> str:
    address = _text(name, extra, "master_server_addr", "master_server_address")
    return f"mooncake://{address}{_options(extra)}"


def _lmcache(name: str, extra: dict[str, Any]) -> str:
    if "lmcache.mp.host" in extra:
        address = f"{extra.pop('lmcache.mp.host')}:{extra.pop('lmcache.mp.port', 5555)}"
    else:
        address = _text(name, extra, "server")
    return f"lmcache://{address.removeprefix('tcp://')}{_options(extra)}"


_SPECIFICATIONS: Final[Mapping[str, Callable[[str, dict[str, Any]], str]]] = MappingProxyType(
    {
        "CPUOffloadConnector": _host,
        "SimpleCPUOffloadConnector": _host,
        "OffloadingConnector": _host,
        "DiskConnector": _disk,
        "RedisConnector": _redis,
        "MooncakeStoreConnector": _mooncake,
        "LMCacheConnector": _lmcache,
        "LMCacheConnectorV1": _lmcache,
        "LMCacheMPConnector": _lmcache,
    }
)
