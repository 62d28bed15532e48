"""Reading traces: each format to one form.

Owns: file formats, and telling them apart.  Does not own: what is made of a trace.  Files may be compressed by gzip.
Nothing in a file is trusted: what does not parse is an error with its line.

* **Mooncake** (FAST 25): a JSON object per line with ``timestamp`` (ms), ``input_length``, ``output_length`` and
  ``hash_ids`` of 512-token blocks, equal ids meaning equal prefixes.
* **kv-cache-tester**: a JSON object per line, or a file, per session; its ``requests`` have ``t`` (s), ``in``, ``out``
  and ``hash_ids`` of ``block_size`` tokens, which mean something within the session only.  Sessions start at random
  times within ``span`` seconds; tools and system prompt are shared by the sessions in which they have the same length.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, Final

from ostinato.errors import ConfigError
from ostinato.simulate.trace import RawRequest, Trace, build_trace

MOONCAKE_BLOCK: Final = 512
SESSION_SPAN_S: Final = 3600.0
SESSION_BLOCK: Final = 1024
"""Sessions are regrouped to blocks of at least so many tokens."""


def read_trace(path: Path, seed: int = 0, span: float = SESSION_SPAN_S) -> Trace:
    """``seed`` and ``span`` place sessions that have no time of their own."""
    records = _records(path)
    first = next(records, None)
    if first is None:
        raise ConfigError(f"{path}: there is no request in it")
    name = path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
    if "input_length" in first[1]:
        return build_trace(name, MOONCAKE_BLOCK, _mooncake(path, first, records))
    if "requests" in first[1]:
        return _sessions(path, name, [first, *records], random.Random(seed), span)
    raise ConfigError(f"{path}: neither Mooncake's format nor kv-cache-tester's; keys: {', '.join(sorted(first[1]))}")


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects with their line numbers."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"{path}: line {number}: not JSON: {error}") from None
                if not isinstance(record, dict):
                    raise ConfigError(f"{path}: line {number}: expected an object")
                yield number, record
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _mooncake(
    path: Path, first: tuple[int, dict[str, Any]], rest: Iterator[tuple[int, dict[str, Any]]]
) -> Iterator[RawRequest]:
    for number, record in (first, *rest):
        try:
            yield RawRequest(
                float(record["timestamp"]) / 1000,
                int(record["input_length"]),
                int(record["output_length"]),
                [int(block) for block in record["hash_ids"]],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: line {number}: {type(error).__name__}: {error}") from None


def _sessions(
    path: Path, name: str, records: list[tuple[int, dict[str, Any]]], rng: random.Random, span: float
) -> Trace:
    raw: list[RawRequest] = []
    size = 0
    for number, record in records:
        try:
            size = int(record["block_size"])
            factor = max(1, SESSION_BLOCK // size)
            raw.extend(_session(record, number, factor, rng.random() * span))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: line {number}: {type(error).__name__}: {error}") from None
    return build_trace(name, size * factor, raw)


def _session(record: dict[str, Any], number: int, factor: int, start: float) -> Iterator[RawRequest]:
    lengths = (int(record.get("tool_tokens", 0)), int(record.get("system_tokens", 0)))
    shared = sum(lengths) // int(record["block_size"])
    for request in record["requests"]:
        inner = request.get("requests", ()) if request.get("type") == "subagent" else (request,)
        for item in inner:
            ids = item.get("hash_ids")
            if not ids:
                continue
            blocks: list[Hashable] = [
                (lengths, stop) if stop <= shared else (number, int(ids[stop - factor]), int(ids[stop - 1]))
                for stop in range(factor, len(ids) + 1, factor)
            ]
            began = float(item["t"])
            # A sub-agent's times may count from its own start.
            offset = float(request["t"]) if item is not request and began < float(request["t"]) else 0.0
            yield RawRequest(start + offset + began, int(item["in"]), int(item["out"]), blocks)
