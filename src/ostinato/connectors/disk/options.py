"""From a specification such as ``disk:/var/cache/kv:200GiB?write_limit=50GiB/day`` to options.

Owns: syntax and error messages.  Nothing is opened or made here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from ostinato.connectors.disk.admission import Rate
from ostinato.connectors.disk.codec import check_encryption, read_secret
from ostinato.connectors.registry import TierSpec, parse_bytes
from ostinato.errors import ConfigError

MODES: Final = ("auto", "direct", "buffered")
KNOWN: Final = frozenset({"mode", "write_limit", "admit", "key_file"})


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """``budget`` bytes of ``path`` at most.  ``secret``: the encryption key, 32 bytes."""

    path: str
    budget: int
    mode: str = "auto"
    write_limit: str = ""
    second_sight: bool = False
    secret: bytes | None = None

    @property
    def direct(self) -> bool:
        """``auto`` is through the page cache: faster wherever measured, and what was read twice comes from memory."""
        return self.mode == "direct"

    def __repr__(self) -> str:
        return f"DiskOptions({self.path!r}, {self.budget})"


def parse_options(spec: TierSpec) -> DiskOptions:
    """Raises ConfigError with what to write instead."""
    path, colon, size = spec.argument.rpartition(":")
    if not colon or not path or not size:
        raise ConfigError(f"tier {spec.text!r}: say where and how much, for example disk:/var/cache/ostinato:200GiB")
    unknown = sorted(set(spec.options) - KNOWN)
    if unknown:
        raise ConfigError(f"tier {spec.text!r}: unknown option {unknown[0]!r}; known: {', '.join(sorted(KNOWN))}")
    mode, admit = spec.options.get("mode", "auto"), spec.options.get("admit", "all")
    if mode not in MODES:
        raise ConfigError(f"tier {spec.text!r}: mode is one of {', '.join(MODES)}, not {mode!r}")
    if admit not in ("all", "second"):
        raise ConfigError(f"tier {spec.text!r}: admit is all or second, not {admit!r}")
    limit = spec.options.get("write_limit", "")
    if "write_limit" in spec.options:
        Rate.parse(limit)
    secret = None
    if "key_file" in spec.options:
        check_encryption()
        secret = read_secret(os.path.expanduser(spec.options["key_file"]))
    path = os.path.abspath(os.path.expanduser(path))
    if os.path.islink(path):
        raise ConfigError(f"tier {spec.text!r}: {path} is a link; name the folder itself")
    if os.path.exists(path) and not os.path.isdir(path):
        raise ConfigError(f"tier {spec.text!r}: {path} is not a folder")
    return DiskOptions(path, parse_bytes(size), mode, limit, admit == "second", secret)
