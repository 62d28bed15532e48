"""What a user may write into ``kv_connector_extra_config``.

Owns: its fields and their errors.  Does not own: the syntax of a tier (``connectors.registry``).

``kv``: tiers, fastest first, as in ``--kv``; one ``host:SIZE`` at most.  Everything passes through host memory, so
without a ``host`` tier a small one is made.  ``model_digest``: names the weights, for models that are not files here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ostinato.connectors.registry import parse_spec
from ostinato.errors import ConfigError

DEFAULT_HOST: Final = "host:512MiB"
KNOWN: Final = frozenset({"kv", "model_digest", "load_deadline_s"})


@dataclass(frozen=True, slots=True)
class PluginConfig:
    """``host``: the tier in memory; ``below``: the others, fastest first."""

    host: str
    below: tuple[str, ...]
    model_digest: str = ""
    load_deadline_s: float = 30.0


def parse_config(extra: Mapping[str, Any]) -> PluginConfig:
    """Raises ConfigError with what to write instead."""
    unknown = sorted(set(extra) - KNOWN)
    if unknown:
        raise ConfigError(f"kv_connector_extra_config: unknown field {unknown[0]!r}; known: {', '.join(sorted(KNOWN))}")
    kv = extra.get("kv")
    if isinstance(kv, str):
        kv = [kv]
    if not isinstance(kv, Sequence) or not kv or not all(isinstance(text, str) for text in kv):
        raise ConfigError('kv_connector_extra_config: say which tiers, for example {"kv": ["host:8GiB"]}')
    names = [parse_spec(text).name for text in kv]
    if names.count("host") > 1:
        raise ConfigError("kv_connector_extra_config: one host tier is enough; give it all the memory")
    digest = extra.get("model_digest", "")
    if not isinstance(digest, str):
        raise ConfigError("kv_connector_extra_config: model_digest is a text that names the weights")
    patience = extra.get("load_deadline_s", 30.0)
    if isinstance(patience, bool) or not isinstance(patience, int | float) or patience <= 0:
        raise ConfigError("kv_connector_extra_config: load_deadline_s is a number of seconds")
    host = [text for text, name in zip(kv, names, strict=True) if name == "host"]
    below = tuple(text for text, name in zip(kv, names, strict=True) if name != "host")
    return PluginConfig(host[0] if host else DEFAULT_HOST, below, digest, float(patience))
