"""``ostinato layout``: how a model's cache would lie in memory, and what fits, from its config alone.

Owns: the numbers of the report and how they are drawn.  Does not own: the layout (``cache.layout``) or its sums
(``cache.footprint``).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from ostinato.cache import footprint
from ostinato.cache.kinds import describe, keeps_checkpoints
from ostinato.cache.layout import CacheLayout, GroupSpec, build_layout
from ostinato.connectors.registry import parse_bytes
from ostinato.errors import ConfigError
from ostinato.runtime.load import DTYPES, HASH_UNIT, computes_in_bfloat16
from ostinato.runtime.models.blank import blank_model, find_config
from ostinato.runtime.specs import probe_specs
from ostinato.serve.tables import page_text

MEMORIES: Final = ("1GiB", "8GiB", "24GiB", "80GiB")
_LENGTHS: Final = (1, 2048, 32768)
_MANY: Final = 2048
_UNLIMITED: Final = 1 << 20
"""Longest context of a model whose config sets none."""


@dataclass(frozen=True, slots=True)
class GroupLine:
    """Like groups: ``count`` of them, each of ``layers`` layers.  ``fill``: the used share of a page."""

    count: int
    kind: str
    layers: int
    hash_unit: int
    page_tokens: int | None
    page_bytes: int
    fill: float


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """What a pool of ``memory`` bytes holds: one context of ``longest`` tokens, or ``requests`` of a usual length."""

    memory: int
    longest: int
    requests: int


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """Everything that is shown.  ``waste`` and ``bytes_per_token`` are by tokens of a request."""

    model: str
    dtype: str
    max_model_len: int
    page_bytes: int
    groups: tuple[GroupLine, ...]
    waste: Mapping[int, float]
    bytes_per_token: Mapping[int, float]
    checkpoint_bytes: int
    request_tokens: int
    fits: tuple[MemoryLine, ...]


def make_report(
    model: str, dtype: str = "auto", max_model_len: int | None = None, memories: Sequence[str] = (), step: int = 512
) -> LayoutReport:
    """Probe the model named ``model`` without its weights; ``step`` = most tokens of one step.

    Raises :class:`ConfigError`, :class:`ModelFileError`, or :class:`ModelRefusedError`.
    """
    sizes = [parse_bytes(text) for text in memories or MEMORIES]
    if dtype == "auto":
        dtype = "bfloat16" if computes_in_bfloat16() else "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {dtype!r}")
    if max_model_len is not None and max_model_len < 1:
        raise ConfigError(f"max_model_len must be a whole number of at least 1, not {max_model_len}")
    config = find_config(model)
    with _quiet():
        blank = blank_model(config, dtype)
        specs = probe_specs(blank)
    layout = build_layout(specs.layers, hash_unit=HASH_UNIT)
    text = blank.config.get_text_config(decoder=True)
    limit = int(max_model_len or getattr(text, "max_position_embeddings", None) or _UNLIMITED)
    return describe_layout(layout, (model, dtype, limit), sizes, step)


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is computed here, so what transformers says about fast kernels is of no use."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def describe_layout(
    layout: CacheLayout, title: tuple[str, str, int], memories: Sequence[int], step: int
) -> LayoutReport:
    """The report on ``layout``; ``title`` = model, dtype, longest context."""
    model, dtype, limit = title
    lengths = sorted({min(tokens, limit) for tokens in _LENGTHS})
    request = min(_MANY, limit)
    return LayoutReport(
        model=model,
        dtype=dtype,
        max_model_len=limit,
        page_bytes=layout.page_bytes,
        groups=_lines(layout.groups),
        waste={tokens: footprint.waste(layout, tokens) for tokens in lengths},
        bytes_per_token={tokens: footprint.bytes_per_token(layout, tokens) for tokens in lengths if tokens > 1},
        checkpoint_bytes=footprint.checkpoint_bytes(layout, lengths[-1]),
        request_tokens=request,
        fits=tuple(
            MemoryLine(
                memory,
                footprint.longest_context(layout, memory, step, limit),
                footprint.requests_that_fit(layout, memory, request),
            )
            for memory in memories
        ),
    )


def _lines(groups: Sequence[GroupSpec]) -> tuple[GroupLine, ...]:
    counts: dict[GroupLine, int] = {}
    for spec in groups:
        tokens = None if keeps_checkpoints(spec.kind) else spec.page_tokens
        fill = spec.unit_bytes / spec.unit_stride
        line = GroupLine(1, describe(spec.kind), len(spec.layers), spec.hash_unit, tokens, spec.page_bytes, fill)
        counts[line] = counts.get(line, 0) + 1
    return tuple(
        GroupLine(count, line.kind, line.layers, line.hash_unit, line.page_tokens, line.page_bytes, line.fill)
        for line, count in counts.items()
    )


def as_json(report: LayoutReport) -> str:
    return json.dumps(asdict(report), indent=2)


def print_report(report: LayoutReport, console: Console) -> None:
    """Three tables: groups, what a request costs, what fits."""
    count = sum(line.count for line in report.groups)
    console.print(
        f"[bold]{report.model}[/bold]  {report.dtype}  up to {report.max_model_len:,} tokens, "
        f"{count} group{'s' * (count > 1)}, pages of {_size(report.page_bytes)}",
        highlight=False,
    )
    groups = Table("groups", "kind", "layers", "hash unit", "page", "page size", "filled", title="KV cache groups")
    for line in report.groups:
        groups.add_row(
            str(line.count),
            line.kind,
            str(line.layers),
            f"{line.hash_unit} tokens",
            page_text(line.page_tokens),
            f"{line.page_bytes / 1024:,.0f} KiB",
            f"{line.fill:.1%}",
        )
    console.print(groups)
    request = Table("tokens", "padding", "bytes per token", title="one request")
    for tokens, share in report.waste.items():
        each = report.bytes_per_token.get(tokens)
        request.add_row(f"{tokens:,}", f"{share:.1%}", "" if each is None else f"{each:,.0f}")
    console.print(request)
    if report.checkpoint_bytes:
        console.print(
            f"one more cut at which a prompt can be resumed: {_size(report.checkpoint_bytes)} "
            "(states and windows, beside full attention)",
            highlight=False,
        )
    fits = Table("device pool", "one context", f"requests of {report.request_tokens:,} tokens", title="what fits")
    for room in report.fits:
        longest = f"{room.longest:,} tokens" + (" (the longest)" if room.longest == report.max_model_len else "")
        fits.add_row(_size(room.memory), longest if room.longest else "none", f"{room.requests:,}")
    console.print(fits)


def _size(count: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if count >= 1 << power:
            return f"{count / (1 << power):,.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{count / 1024:,.1f}".rstrip("0").rstrip(".") + " KiB"
