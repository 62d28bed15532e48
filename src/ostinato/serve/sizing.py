"""How big a server's tiers are when nobody says, and why.

Owns: the defaults of ``ostinato serve``.  Does not own: the tiers, or what a user asked for: that stands.

On a machine without an accelerator the device pool and a host tier are the same RAM, and a host tier would hold copies
of what the pool has.  So the whole budget goes to the pool, there is no host tier unless one is asked for, and the
second tier is a folder on disk where one is named.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ostinato.connectors.registry import parse_spec
from ostinato.errors import ConfigError

MOST_POOL: Final = 32 << 30
"""Beyond it, say so: a machine with so much memory rarely has one purpose."""
MOST_DISK: Final = 100 << 30
_POOL_SHARE: Final = 0.5
_DISK_SHARE: Final = 0.5
KV_FOLDER: Final = "kv"


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """``--cache-dir`` and ``--cache-size`` as a tier; ``why`` says how its budget came about."""

    tier: str
    why: str


def cache_folder_tier(folder: Path, size: str | None, kv: tuple[str, ...]) -> CacheFolder:
    """The disk tier in ``folder``, which is made when it is used.  Raises ConfigError."""
    if any(parse_spec(tier).name == "disk" for tier in kv):
        raise ConfigError("--cache-dir is a disk tier, and --kv names one already: give one of them")
    place = folder.expanduser().absolute() / KV_FOLDER
    if size is not None:
        return CacheFolder(f"disk:{place}:{size}", f"disk tier: {size} in {place}, as asked for")
    budget = min(MOST_DISK, int(_DISK_SHARE * (_free(place) + _used(place))))
    why = f"disk tier: {_gib(budget)} in {place}: half of what is free there, at most {_gib(MOST_DISK)} (--cache-size)"
    return CacheFolder(f"disk:{place}:{budget}", why)


def pool_bytes(free: int) -> int:
    """The device pool's size, when ``free`` bytes of memory are free and the weights are read."""
    return min(MOST_POOL, int(free * _POOL_SHARE))


def pool_reason(free: int) -> str:
    return (
        f"device pool: {_gib(pool_bytes(free))}: half of the {_gib(free)} that are free beside the weights, "
        f"at most {_gib(MOST_POOL)} (--kv-cache-memory)"
    )


def tier_reasons(tiers: tuple[str, ...]) -> tuple[str, ...]:
    """Why there is no host tier or no disk tier."""
    names = {parse_spec(tier).name for tier in tiers}
    reasons = []
    if "host" not in names:
        reasons.append("host tier: off: on a CPU it would be the pool's own memory, better spent on the pool")
    if not names - {"host"}:
        reasons.append("disk tier: off: what is cached ends with the server (--cache-dir DIR keeps it)")
    return tuple(reasons)


def _free(place: Path) -> int:
    there = next(parent for parent in (place, *place.parents) if parent.is_dir())
    return shutil.disk_usage(there).free


def _used(place: Path) -> int:
    """So that the budget does not shrink as the folder fills."""
    return sum(file.stat().st_size for file in place.glob("*") if file.is_file()) if place.is_dir() else 0


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
