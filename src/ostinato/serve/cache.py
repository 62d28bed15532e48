"""``ostinato cache``: look after the folder of a disk tier, also while an engine uses it.

Owns: flags, tables, JSON, questions before something is removed.  Does not own: what is done (``disk.tools``, which
touches nothing outside of the folder, and no folder that is not a cache).
"""

from __future__ import annotations

import json as jsonlib
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ostinato.errors import ConfigError

if TYPE_CHECKING:
    from ostinato.connectors.disk.tools import FolderReport, OwnerReport

app: Final = typer.Typer(help="Look after the folder of a disk tier.", no_args_is_help=True)

Folder = Annotated[str, typer.Argument(metavar="DIR", help="The folder of disk:DIR:SIZE.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")]
_LIVE: Final = "an engine uses this folder"


@app.command("ls")
def list_models(folder: Folder, json: AsJson = False) -> None:
    """Show whose records are in the folder, by model and identity."""
    from ostinato.connectors.disk.tools import inspect

    report = inspect(folder)
    if json:
        rows = [_owner_fields(owner) for owner in report.owners]
        return _print_json({"folder": folder, "live": report.busy, "sound": report.sound, "owners": rows})
    table = Table("identity", "model", "records", "size", "last used", "", title=escape(folder))
    for owner in sorted(report.owners, key=lambda one: -one.last_use):
        lock = "encrypted" if owner.encrypted else ""
        used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.last_use))
        model = escape(owner.model) or "unknown"
        table.add_row(owner.label, model, f"{owner.records:,}", _size(owner.payload_bytes), used, lock)
    return _print_table(table, report)


@app.command("du")
def usage(folder: Folder, json: AsJson = False) -> None:
    """Show what takes the space."""
    from ostinato.connectors.disk.tools import inspect

    report = inspect(folder)
    index = report.file_bytes - sum(row.file_bytes for row in report.usage)
    if json:
        rows = [{**asdict(row), "file_bytes": row.file_bytes} for row in report.usage]
        totals = {"file_bytes": report.file_bytes, "index_bytes": index, "slabs": rows}
        return _print_json({"folder": folder, "live": report.busy, "sound": report.sound, **totals})
    table = Table("slots of", "files", "slots", "in use", "size", "units in it", title=escape(folder))
    for row in report.usage:
        share = f"{row.used:,} ({row.used / row.slots:.0%})"
        size, payload = _size(row.file_bytes), _size(row.payload_bytes)
        table.add_row(f"{row.slot_bytes:,} B", f"{row.slabs:,}", f"{row.slots:,}", share, size, payload)
    table.add_row("index", "", "", "", _size(index), "", end_section=True)
    table.add_row("all", "", "", "", _size(report.file_bytes), _size(sum(row.payload_bytes for row in report.usage)))
    return _print_table(table, report)


@app.command()
def verify(
    folder: Folder,
    key_file: Annotated[
        str | None, typer.Option(help="The key of encrypted records; they are skipped without.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Only report bad records.")] = False,
    json: AsJson = False,
) -> None:
    """Read and check every record; bad ones are forgotten.  Fails when there are any."""
    from ostinato.connectors.disk import tools
    from ostinato.connectors.disk.codec import check_encryption, read_secret
    from ostinato.serve.tables import Bars

    secret = None
    if key_file is not None:
        check_encryption()
        secret = read_secret(key_file)
    sound = tools.inspect(folder).sound
    bars = Bars(Console(stderr=True))

    def progress(done: int, total: int) -> None:
        if done == 1:
            bars.start(total, "checking")
        bars.advance(1)

    try:
        report = tools.verify(folder, not keep, progress, secret)
    finally:
        bars.finish()
    if json:
        _print_json({"folder": folder, "sound": sound, "bad": report.bad, "quarantined": not keep, **asdict(report)})
    else:
        print(f"{report.checked:,} records checked, {report.bad:,} bad, {report.skipped:,} skipped (encrypted)")
        for fault, count in sorted(report.faults.items()):
            print(f"  {fault}: {count:,}{'' if keep else ', forgotten'}")
        if not sound:
            print("the index is damaged: what it said is lost; the next writer starts empty")
    if report.bad or not sound:
        raise typer.Exit(1)


@app.command()
def gc(
    folder: Folder,
    size: Annotated[str, typer.Option("--size", help="What the folder may have afterwards, such as 100GiB.")],
    json: AsJson = False,
) -> None:
    """Give up what was used longest ago until the folder is small enough.  A live engine's budget stays what it is."""
    from ostinato.connectors.disk import tools
    from ostinato.connectors.registry import parse_bytes

    freed = tools.gc(folder, parse_bytes(size))
    left = tools.inspect(folder).file_bytes
    if json:
        _print_json({"folder": folder, "freed_bytes": freed, "file_bytes": left})
    else:
        print(f"{_size(freed)} freed, {_size(left)} left")


@app.command("rm")
def remove(
    folder: Folder,
    model: Annotated[str | None, typer.Option("--model", help="Forget all records of this model.")] = None,
    identity: Annotated[str | None, typer.Option("--identity", help="Forget the records of one row of ls.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Forget all records.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: AsJson = False,
) -> None:
    """Forget records.  Their bytes stay until they are written over; files that hold no other record are deleted."""
    from ostinato.connectors.disk import tools

    if (model is not None) + (identity is not None) + everything != 1:
        raise ConfigError("say what to remove: one of --model, --identity and --all")
    owners = tools.inspect(folder).owners
    chosen = _choose(owners, model, identity)
    count = sum(owner.records for owner in chosen)
    what = f"{count:,} records of {len(chosen)} identities in {folder}"
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"{what} would be removed: add --yes")
        if not typer.confirm(f"Remove {what}?"):
            raise typer.Exit(1)
    labels = [""] if everything else [owner.label for owner in chosen]
    removed = sum(tools.remove(folder, label) for label in labels)
    if json:
        _print_json({"folder": folder, "removed": removed, "file_bytes": tools.inspect(folder).file_bytes})
    else:
        print(f"{removed:,} records removed")


def _choose(owners: tuple[OwnerReport, ...], model: str | None, identity: str | None) -> list[OwnerReport]:
    """The owners of a model's name, or whose label begins as given; all without either."""
    if model is None and identity is None:
        return list(owners)
    if model is not None:
        chosen = [owner for owner in owners if owner.model == model]
        known = sorted({owner.model for owner in owners if owner.model})
    else:
        chosen = [owner for owner in owners if identity and owner.label.startswith(identity)]
        known = [owner.label for owner in owners]
        if len(chosen) > 1:
            raise ConfigError(f"{identity!r} is the beginning of several identities: {', '.join(known)}")
    if not chosen:
        raise ConfigError(f"there are no records of {model or identity!r}; known: {', '.join(known) or 'none'}")
    return chosen


def _owner_fields(owner: OwnerReport) -> dict[str, Any]:
    fields = asdict(owner)
    return {**fields, "layout": owner.layout.hex(), "namespace": owner.namespace.hex()}


def _print_json(value: dict[str, Any]) -> None:
    print(jsonlib.dumps(value, indent=2))


def _print_table(table: Table, report: FolderReport) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    if report.busy:
        console.print(_LIVE, style="dim")
    if not report.sound:
        console.print("the index is damaged: what it said is lost; the next writer starts empty", style="bold red")


def _size(count: int) -> str:
    """``1.5 GiB``."""
    power = min(4, max(0, count.bit_length() - 1) // 10)
    return f"{count:,} B" if not power else f"{count / 1024**power:,.1f} {'KMGT'[power - 1]}iB"
