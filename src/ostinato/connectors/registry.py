"""From a tier specification such as ``host:8GiB`` to a connector.

Owns: the syntax, the built-in names, discovery of third-party connectors (entry-point group ``ostinato.connectors``).
Nothing is imported before it is asked for.  A specification is ``name[:argument][?option=value&...]``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Final
from urllib.parse import parse_qsl

from ostinato.connectors.api import Capabilities, Connector
from ostinato.errors import ConfigError, ConnectorError, UnknownConnectorError

ENTRY_POINT_GROUP: Final = "ostinato.connectors"
BUILT_IN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "host": "ostinato.connectors.host:make_connector",
        "disk": "ostinato.connectors.disk.connector:make_connector",
        "faulty": "ostinato.connectors.faulty:make_connector",
        "redis": "ostinato.connectors.redis:make_connector",
        "rediss": "ostinato.connectors.redis:make_connector",
        "redis+unix": "ostinato.connectors.redis:make_connector",
        "valkey": "ostinato.connectors.redis:make_connector",
        "lmcache": "ostinato.connectors.lmcache:make_connector",
        "mooncake": "ostinato.connectors.mooncake:make_connector",
    }
)
_UNITS: Final[Mapping[str, int]] = MappingProxyType(
    {"": 1, "B": 1}
    | {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
    | {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
)


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A parsed specification; ``text`` is what the user wrote, without a password: it may be shown."""

    text: str
    name: str
    argument: str = field(default="", repr=False)
    options: Mapping[str, str] = field(default_factory=dict)


def parse_spec(text: str) -> TierSpec:
    head, _, query = text.partition("?")
    text = re.sub("//.*@", "//***@", text, flags=re.DOTALL)
    name, _, argument = head.partition(":")
    if not re.fullmatch(r"[a-z][a-z0-9_+-]*", name):
        raise ConfigError(f"tier {text!r}: expected name[:argument][?option=value], for example host:8GiB")
    try:
        pairs = parse_qsl(query, strict_parsing=True, keep_blank_values=True) if query else []
    except ValueError:
        raise ConfigError(f"tier {text!r}: options must look like ?name=value&name=value") from None
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ConfigError(f"tier {text!r}: an option is given twice")
    return TierSpec(text, name, argument, options)


def make_connector(text: str) -> Connector:
    """Build the connector that ``text`` names."""
    spec = parse_spec(text)
    if spec.name in BUILT_IN:
        module, _, attribute = BUILT_IN[spec.name].partition(":")
        factory = getattr(importlib.import_module(module), attribute)
    else:
        found = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == spec.name]
        if not found:
            raise UnknownConnectorError(
                f"tier {spec.text!r}: no connector {spec.name!r}; known: {', '.join(known_names())}"
            )
        try:
            factory = found[0].load()
        except Exception as error:
            raise ConnectorError(f"tier {spec.text!r}: connector {found[0].value} cannot be loaded: {error}") from error
    connector = factory(spec)
    if not isinstance(connector, Connector):
        raise ConnectorError(
            f"tier {spec.text!r}: the factory of {spec.name!r} made {connector!r}, which is no Connector"
        )
    if not isinstance(getattr(connector, "capabilities", None), Capabilities):
        raise ConnectorError(
            f"tier {spec.text!r}: connector {type(connector).__name__} does not set its capabilities: it was made for "
            "another version of this interface"
        )
    return connector


def known_names() -> list[str]:
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def parse_bytes(text: str) -> int:
    """``8GiB``, ``512MiB``, ``1.5GB``, ``4096`` to bytes."""
    match = re.fullmatch(r"\s*([0-9]+)(\.[0-9]+)?\s*([KMGT]i?B|B|)\s*", text)
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write for example 8GiB, 512MiB or 4096")
    unit = _UNITS[match[3]]
    return int(match[1]) * unit + int(float(match[2] or 0) * unit)
