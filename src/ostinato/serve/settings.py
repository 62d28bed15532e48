"""What a command is told by its file and its environment: a flag's value where the flag is not given.

Owns: ``--config``, the TOML file, environment variables, their names and mistakes.  Does not own: what a value means.

One precedence for every option: the flag, then the environment, then the file, then the default.  ``--max-model-len``
of ``ostinato serve`` is::

    [serve]                             OSTINATO_SERVE_MAX_MODEL_LEN=4096
    max-model-len = 4096

An option that may be repeated is a list in the file, and separated by blanks in the environment.  What is wrong is told
with the file, the table and the key, or the variable's name; values are not shown, since some are secrets.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ostinato.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX: Final = "OSTINATO"
_NOT_SETTINGS: Final = frozenset({"config", "help"})


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """Runs before all other options are looked at, and gives them their defaults."""
    if context.resilient_parsing:  # a shell asks for completions
        return path
    options = {_key(option): option for option in context.command.params if option.name not in _NOT_SETTINGS}
    table = str(context.info_name)
    given = dict(_from_file(path, table, options, context)) if path is not None else {}
    given |= _from_environment(table, options)
    values = dict(context.default_map or {})
    for where, key, value in ((where, key, value) for key, (where, value) in given.items()):
        values[str(options[key].name)] = _converted(options[key], value, where, context)
    context.default_map = values
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar=f"{PREFIX}_CONFIG",
        is_eager=True,
        callback=_read,
        dir_okay=False,
        help="A TOML file with a table for each command; flags and environment variables go before it.",
    ),
]
"""The option that makes a command read its settings."""


def _key(option: Any) -> str:
    """What the file calls it: the flag without dashes, or the argument's name."""
    flags = [flag for flag in option.opts if flag.startswith("--")]
    return str(flags[0].removeprefix("--") if flags else option.name)


def _from_file(
    path: Path, table: str, options: Mapping[str, Any], context: typer.Context
) -> Iterator[tuple[str, tuple[str, Any]]]:
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    commands = list(getattr(context.find_root().command, "commands", {table: None}))
    for name, entries in content.items():
        if not isinstance(entries, dict):
            raise ConfigError(f"{path}: {name}: settings stand in tables, such as [{table}]")
        if name not in commands:
            raise ConfigError(f"{path}: [{name}]: there is no such command{_meant(name, commands)}")
    for key, value in content.get(table, {}).items():
        if key not in options:
            raise ConfigError(f"{path}: [{table}] {key}: there is no such option{_meant(key, list(options))}")
        yield key, (f"{path}: [{table}] {key}", value)


def _from_environment(table: str, options: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = {}
    for key, option in options.items():
        name = f"{PREFIX}_{table}_{key}".upper().replace("-", "_")
        if text := os.environ.get(name):
            found[key] = name, text.split() if _repeats(option) else text
    return found


def _converted(option: Any, value: Any, where: str, context: typer.Context) -> Any:
    items = value if _repeats(option) and isinstance(value, list) else [value]
    switch = bool(getattr(option, "is_flag", False))
    for item in items:
        if not isinstance(item, str | int | float) or (isinstance(item, bool) != switch and not isinstance(item, str)):
            expected = "true or false" if switch else "text or a number"
            raise ConfigError(f"{where}: expected {expected}")
    texts = [str(item) for item in items]
    try:
        return option.process_value(context, texts if _repeats(option) else texts[0])
    except typer.BadParameter as error:
        why = error.message
        for text in texts:
            why = why.replace(repr(text), "this")
        raise ConfigError(f"{where}: {why}") from None


def _repeats(option: Any) -> bool:
    return bool(getattr(option, "multiple", False)) or option.nargs == -1


def _meant(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(known))}"
