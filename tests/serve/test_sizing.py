"""The tiers that a server has when nobody says."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from ostinato.errors import ConfigError
from ostinato.serve.sizing import cache_folder_tier, pool_bytes, pool_reason, tier_reasons

GIB = 1 << 30


def test_the_pool_has_half_of_what_is_free() -> None:
    assert pool_bytes(12 * GIB) == 6 * GIB
    assert pool_bytes(500 * GIB) == 32 * GIB
    assert "6.0 GiB: half of the 12.0 GiB" in pool_reason(12 * GIB)


def test_a_folder_has_half_of_what_is_free_and_does_not_shrink_as_it_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=40 * GIB))
    folder = tmp_path / "new" / "cache"
    assert cache_folder_tier(folder, None, ()).tier == f"disk:{folder}/kv:{20 * GIB}"
    assert not folder.exists()
    (folder / "kv").mkdir(parents=True)
    with (folder / "kv" / "slab").open("wb") as file:
        file.truncate(6 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=34 * GIB))
    assert cache_folder_tier(folder, None, ()).tier.endswith(f":{20 * GIB}")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4000 * GIB))
    assert cache_folder_tier(folder, None, ()).tier.endswith(f":{100 * GIB}")
    assert cache_folder_tier(folder, "3GiB", ()).tier == f"disk:{folder}/kv:3GiB"


def test_two_disk_tiers_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one of them"):
        cache_folder_tier(tmp_path, None, ("host:1GiB", "disk:/x:1GiB"))


@pytest.mark.parametrize(
    ("tiers", "off"),
    [((), ["host", "disk"]), (("host:1GiB",), ["disk"]), (("disk:/x:1GiB",), ["host"]), (("redis://x",), ["host"])],
)
def test_what_is_off_is_told(tiers: tuple[str, ...], off: list[str]) -> None:
    assert [reason.split()[0] for reason in tier_reasons(tiers)] == off
