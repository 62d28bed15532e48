"""Settings from flags, environment and file: one precedence, and mistakes told by name and place."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from ostinato.errors import ConfigError
from ostinato.serve.cli import app as ostinato
from ostinato.serve.settings import Config

seen: dict[str, Any] = {}


def command() -> typer.Typer:
    app = typer.Typer()

    @app.command()
    def run(
        model: Annotated[str, typer.Argument()],
        config: Config = None,
        max_len: int = 7,
        rate: float = 1.5,
        kv: Annotated[list[str] | None, typer.Option("--kv")] = None,
        fast: Annotated[bool, typer.Option("--fast")] = False,
        memory: str = "auto",
    ) -> None:
        seen.update(model=model, max_len=max_len, rate=rate, kv=list(kv or []), fast=fast, memory=memory)

    @app.command()
    def other() -> None:
        pass

    return app


def told(*flags: str, **environment: str) -> dict[str, Any]:
    seen.clear()
    done = CliRunner().invoke(command(), ["run", *flags], env=environment)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert not done.exit_code, done.output
    return dict(seen)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "o.toml"


def test_flag_before_environment_before_file_before_default(file: Path) -> None:
    file.write_text('[run]\nmodel = "m"\nmax-len = 1\nrate = 2\n[other]\n')
    base = {"model": "m", "max_len": 1, "rate": 2.0, "kv": [], "fast": False, "memory": "auto"}
    assert told("--config", str(file)) == base
    assert told(OSTINATO_CONFIG=str(file)) == base
    assert told("--config", str(file), OSTINATO_RUN_MAX_LEN="2") == base | {"max_len": 2}
    assert told("--config", str(file), "--max-len", "3", OSTINATO_RUN_MAX_LEN="2") == base | {"max_len": 3}
    assert told("n", "--config", str(file)) == base | {"model": "n"}


def test_lists_switches_and_numbers_as_text(file: Path) -> None:
    file.write_text('[run]\nkv = ["host:1GiB", "disk:/x:1GiB"]\nfast = true\nmemory = 4096\n')
    found = told("m", "--config", str(file))
    assert (found["kv"], found["fast"], found["memory"]) == (["host:1GiB", "disk:/x:1GiB"], True, "4096")
    found = told("m", "--config", str(file), OSTINATO_RUN_KV="a b", OSTINATO_RUN_FAST="false")
    assert (found["kv"], found["fast"]) == (["a", "b"], False)
    assert told("m", "--kv", "z", OSTINATO_RUN_KV="a b")["kv"] == ["z"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nmax-lne = 1", r"o\.toml: \[run\] max-lne: .*did you mean max-len"),
        ("[run]\nzzz = 1", r"\[run\] zzz: .*known: fast, kv, max-len"),
        ('[run]\nmax-len = "x"', r"\[run\] max-len: .*valid integer"),
        ("[run]\nmax-len = true", r"\[run\] max-len: expected text or a number"),
        ("[run]\nmax-len = [1]", r"\[run\] max-len: expected text or a number"),
        ("[run]\nrate = 'x'", r"\[run\] rate: .*valid number"),
        ("[run]\nfast = 3", r"\[run\] fast: expected true or false"),
        ("[run]\nkv = [{}]", r"\[run\] kv: expected text or a number"),
        ("[rnu]\n", r"\[rnu\]: .*did you mean run"),
        ("max-len = 3", r"max-len: settings stand in tables"),
        ("[run\n", r"not TOML: .*line 1"),
    ],
)
def test_mistakes_have_a_name_and_a_place(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        told("m", "--config", str(file))


def test_a_mistake_in_the_environment_has_the_variables_name_and_not_its_value(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"OSTINATO_RUN_MAX_LEN: .*valid integer") as caught:
        told("m", OSTINATO_RUN_MAX_LEN="sesame")
    assert "sesame" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        told("m", "--config", str(file / "none"))


def test_the_shell_completes() -> None:
    done = CliRunner().invoke(
        ostinato,
        [],
        prog_name="ostinato",
        env={"_OSTINATO_COMPLETE": "complete_bash", "COMP_WORDS": "ostinato ser", "COMP_CWORD": "1"},
    )
    assert done.output.split() == ["serve"]
    done = CliRunner().invoke(
        ostinato,
        [],
        prog_name="ostinato",
        env={"_OSTINATO_COMPLETE": "complete_bash", "COMP_WORDS": "ostinato serve --cache", "COMP_CWORD": "2"},
    )
    assert done.output.split() == ["--cache-dir", "--cache-size"]


def test_help_is_grouped_and_has_examples() -> None:
    done = CliRunner().invoke(ostinato, ["serve", "--help"], env={"COLUMNS": "100", "TERM": "dumb"})
    for part in ("Server", "Limits", "Cache", "Model and engine", "Examples", "ostinato serve --config"):
        assert part in done.output
