"""The picture of a run: how times are spread, and what came when.

Owns: which curves there are, and their SVG.  A file that ends in ``.png`` or ``.pdf`` is drawn by matplotlib where it
is installed; SVG and HTML need nothing.
"""

from __future__ import annotations

import html
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

from ostinato.errors import ConfigError
from ostinato.serve.bench.drive import Asked

SUFFIXES: Final = (".svg", ".html", ".png", ".pdf")
_BY_MATPLOTLIB: Final = (".png", ".pdf")
_COLOURS: Final = ("#3465a4", "#cc5b14", "#4e9a06", "#75507b")
_WIDTH, _HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 34, 44
_MOST_POINTS: Final = 400
_BINS: Final = 60
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes; ``log``: the horizontal one is logarithmic."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    log: bool = False

    def bounds(self) -> tuple[float, float, float, float]:
        """Left, right, bottom, top; never empty."""
        xs = [x for curve in self.curves for x, _ in curve.points] or [1.0]
        ys = [y for curve in self.curves for _, y in curve.points] or [1.0]
        left = min(xs) if self.log else 0.0
        right = max(xs)
        if right <= left:
            left, right = (left / 2, left * 2) if self.log else (0.0, 1.0)
        return left, right, 0.0, max(*ys, 1e-9) * 1.05


def check_plot(path: Path) -> None:
    """Raise ConfigError for a kind of file that cannot be drawn here."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot: {path.name} must end in one of {', '.join(SUFFIXES)}")
    if path.suffix in _BY_MATPLOTLIB and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot: {path.suffix} needs matplotlib (pip install matplotlib); .svg needs nothing")


def write_plot(path: Path, asked: Sequence[Asked], seconds: float, caption: str) -> None:
    """Draw what :func:`check_plot` accepts."""
    panels = panels_of(asked, seconds)
    if path.suffix in _BY_MATPLOTLIB:
        _by_matplotlib(path, panels, caption)
        return
    picture = svg(panels, caption)
    if path.suffix == ".html":
        title = html.escape(caption)
        picture = f'<!doctype html><meta charset="utf-8"><title>{title}</title>\n{picture}'
    path.write_text(picture, "utf-8")


def panels_of(asked: Sequence[Asked], seconds: float) -> tuple[Panel, ...]:
    """Cumulative shares of the three times; first tokens by when they were asked for; tokens and answers over time."""
    good = [one for one in asked if one.answer.error is None]
    first = [one for one in good if one.answer.ttft_s is not None]
    ttft = [one.answer.ttft_s for one in first if one.answer.ttft_s is not None]
    spread = Panel(
        "Share of times up to",
        "milliseconds",
        "percent",
        (
            _cumulative("first token", ttft),
            _cumulative("between tokens", [gap for one in good for gap in one.answer.gaps_s]),
            _cumulative("whole answer", [one.answer.total_s for one in good]),
        ),
        log=True,
    )
    pieces = [
        one.began_s + one.answer.ttft_s + after
        for one in first
        if one.answer.ttft_s is not None
        for after in accumulate(one.answer.gaps_s, initial=0.0)
    ]
    width = max(seconds, 1e-9) / _BINS
    middles = [(i + 0.5) * width for i in range(_BINS)]
    counts = [0] * _BINS
    for moment in pieces:
        counts[min(_BINS - 1, int(moment / width))] += 1
    rate = Curve("pieces of text per second", tuple((x, n / width) for x, n in zip(middles, counts, strict=True)))
    running = tuple(
        (x, float(sum(one.began_s <= x < one.began_s + one.answer.total_s for one in good))) for x in middles
    )
    over_time = Panel("Over time", "seconds", "", (rate, Curve("requests at once", running)))
    return spread, over_time


def _cumulative(label: str, seconds: Sequence[float]) -> Curve:
    found = sorted(max(value * 1e3, 0.01) for value in seconds)
    step = max(1, len(found) // _MOST_POINTS)
    kept = [*range(0, len(found), step), *([len(found) - 1] if found else [])]
    return Curve(label, tuple((found[i], 100 * (i + 1) / len(found)) for i in kept))


def svg(panels: Sequence[Panel], caption: str) -> str:
    """The panels side by side, as a file that needs no other."""
    width = _WIDTH * len(panels)
    drawn = "\n".join(f'<g transform="translate({i * _WIDTH},0)">{_drawn(one)}</g>' for i, one in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT + 24}" width="{width}" '
        f'height="{_HEIGHT + 24}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{drawn}\n'
        f'<text x="{_LEFT}" y="{_HEIGHT + 12}" fill="#555">{html.escape(caption)}</text>\n</svg>\n'
    )


def _drawn(panel: Panel) -> str:
    left, right, bottom, top = panel.bounds()
    scale: Callable[[float], float] = math.log10 if panel.log else float
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(value: float) -> float:
        return _LEFT + wide * (scale(value) - scale(left)) / (scale(right) - scale(left))

    def y(value: float) -> float:
        return _TOP + high * (1 - (value - bottom) / (top - bottom))

    floor = _TOP + high
    parts = [f'<text x="{_LEFT}" y="16" font-weight="bold">{html.escape(panel.title)}</text>']
    for value in _ticks(left, right, panel.log):
        parts.append(f'<path d="M{x(value):.1f} {_TOP}V{floor}" stroke="#ddd"/>')
        parts.append(f'<text x="{x(value):.1f}" y="{floor + 16}" text-anchor="middle">{value:,.6g}</text>')
    for value in _ticks(bottom, top, False):
        parts.append(f'<path d="M{_LEFT} {y(value):.1f}H{_LEFT + wide}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,.6g}</text>')
    middle = _LEFT + wide / 2
    parts.append(f'<text x="{middle}" y="{floor + 34}" text-anchor="middle">{html.escape(panel.x_label)}</text>')
    parts.append(f'<text x="{_LEFT - 6}" y="{_TOP - 6}" text-anchor="end">{html.escape(panel.y_label)}</text>')
    for i, curve in enumerate(panel.curves):
        colour = _COLOURS[i % len(_COLOURS)]
        line = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in curve.points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        label = html.escape(curve.label)
        parts.append(f'<text x="{_LEFT + wide}" y="{16 + 14 * i}" text-anchor="end" fill="{colour}">{label}</text>')
    return "\n".join(parts)


def _ticks(low: float, high: float, log: bool) -> list[float]:
    """A few round numbers between both."""
    if log:
        found = [10.0**k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
        return [value for value in found if low <= value <= high]
    rough = (high - low) / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * k for k in (1, 2, 5, 10) if unit * k >= rough)
    return [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _by_matplotlib(path: Path, panels: Sequence[Panel], caption: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(panels), 3.6), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for curve in panel.curves:
            axes.plot(*zip(*curve.points, strict=True) if curve.points else ((), ()), label=curve.label)
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label, ylim=(0, None))
        axes.set_xscale("log" if panel.log else "linear")
        axes.legend()
    figure.text(0.01, -0.03, caption, fontsize="small")
    figure.savefig(path, bbox_inches="tight")
