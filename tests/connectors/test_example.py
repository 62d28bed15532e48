"""The example connector of ``examples/``: found by its entry point, and right."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from ostinato.connectors.registry import known_names, make_connector
from ostinato.connectors.store import StoreConnector
from ostinato.errors import ConfigError
from ostinato.serve.cli import app

if sys.version_info >= (3, 11):
    import tomllib
elif TYPE_CHECKING:
    tomllib: Any

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ostinato-folder"


def _their_tests() -> Any:
    """The example's own test module."""
    spec = importlib.util.spec_from_file_location("folder_tests", EXAMPLE / "tests" / "test_conformance.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As pip would: the package on the path, with metadata."""
    if sys.version_info < (3, 11):
        pytest.skip("needs tomllib")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["ostinato.connectors"]
    folder = tmp_path_factory.mktemp("site")
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("[ostinato.connectors]\n" + "\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.syspath_prepend(str(EXAMPLE / "src"))
    yield
    sys.modules.pop("ostinato_folder", None)


class TestFolder(_their_tests().TestFolder):  # type: ignore[misc]
    """Its own tests, here."""


def test_it_is_found_by_name(tmp_path: Path) -> None:
    assert "folder" in known_names()
    connector = make_connector(f"folder:{tmp_path}/cache")
    assert isinstance(connector, StoreConnector)
    assert connector.tier == "folder"
    assert not (tmp_path / "cache").exists(), "making one is cheap"
    with pytest.raises(ConfigError, match="expected folder:/some/where"):
        make_connector("folder:/x?size=3")


def test_the_command_proves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ostinato.conformance import kit

    monkeypatch.setattr(kit, "CHECKS", kit.CHECKS[:3])
    done = CliRunner().invoke(app, ["conformance", f"folder:{tmp_path}"])
    assert done.exit_code == 0, done.output
    assert "3 passed" in done.stdout
