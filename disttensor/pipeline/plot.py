"""A picture of a timeline: a row per rank, a colour for forwards, backwards and waits each."""

from __future__ import annotations

import colorsys
import importlib
import math
from os import PathLike
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from disttensor.pipeline.schedule import Schedule
from disttensor.pipeline.timeline import Event, Timeline, scale

WIDTH, LEFT, RIGHT, TOP, BOTTOM, ROW, BAR = 1000, 70, 20, 44, 44, 34, 28  # pixels
_DIGIT = 7  # pixels
_GREY = "#d9d9d9"
_LEGEND = (
    "blue: forward, orange: backward, lighter: later chunks, grey: waiting for a peer; "
    "number: micro-batch"
)


class Bar(NamedTuple):
    """A rectangle: its row, start and length in the unit of the axis, and the number in it."""

    row: int
    start: float
    length: float
    event: Event
    colour: str
    ink: str
    label: str


class Chart(NamedTuple):
    title: str
    ranks: list[int]
    bars: list[Bar]
    span: float
    unit: str


def plot(what: Timeline | Schedule, path: str | PathLike[str], title: str | None = None) -> Path:
    """Draws a recorded Timeline, or a Schedule in its ticks, to ``path``: .svg, or .png (needs
    matplotlib).

    >>> pipeline.plot(pipeline.one_f_one_b(4, 8), "1f1b.svg", title="1f1b").name
    '1f1b.svg'

    Raises ValueError for another suffix and for a timeline without events, ImportError for .png
    without matplotlib.
    """
    file = Path(path)
    if file.suffix not in (".svg", ".png"):
        raise ValueError(f"plot: {str(file)!r} ends in {file.suffix!r}: write .svg or .png")
    chart = _chart(Timeline.of(what) if isinstance(what, Schedule) else what, title)
    if file.suffix == ".svg":
        file.write_text(_svg(chart), encoding="utf-8")
    else:
        _png(chart, file)
    return file


def _chart(timeline: Timeline, title: str | None) -> Chart:
    if not timeline.span:
        raise ValueError(f"plot: {timeline!r} has nothing that takes time")
    size, unit = scale(timeline.span, timeline.unit)
    chunks = 1 + max(event.chunk for event in timeline.events)
    bars = []
    for row, rank in enumerate(timeline.ranks):
        for event, start, end in [*timeline.waits(rank), *timeline.pieces(rank)]:
            number = "" if event.kind == "wait" else str(event.micro_batch)
            pixels = (end - start) / timeline.span * (WIDTH - LEFT - RIGHT)
            label = number if pixels >= _DIGIT * len(number) + 4 else ""
            colour, ink = _colours(event.kind, event.chunk, chunks)
            at, length = (start - timeline.start) / size, (end - start) / size
            bars.append(Bar(row, at, length, event, colour, ink, label))
    bubble = f"bubble {100 * timeline.bubble:.1f} %"
    full_title = f"{title}: {bubble}" if title else bubble
    return Chart(full_title, timeline.ranks, bars, timeline.span / size, unit)


def _colours(kind: str, chunk: int, chunks: int) -> tuple[str, str]:
    """Of a bar and of the number in it: later chunks are lighter."""
    if kind == "wait":
        return _GREY, _GREY
    light = 0.42 + 0.36 * chunk / max(chunks - 1, 1)
    hue, full = (0.59, 0.55) if kind == "F" else (0.07, 0.85)
    rgb = (f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, light, full))
    return "#" + "".join(rgb), "#fff" if light < 0.6 else "#000"


def _marks(span: float) -> list[float]:
    """Four to ten round numbers from 0 to ``span``."""
    rough = span / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(span / step * (1 + 1e-9)) + 1)]


def _svg(chart: Chart) -> str:
    foot = TOP + ROW * len(chart.ranks)
    height = foot + BOTTOM
    unit = (WIDTH - LEFT - RIGHT) / chart.span

    def text(x: float, y: float, content: str, more: str = "") -> str:
        return f'<text x="{x:.6g}" y="{y:g}"{more}>{escape(content)}</text>'

    end, middle = ' text-anchor="end"', ' text-anchor="middle"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        text(LEFT, 26, chart.title, ' font-size="15"'),
    ]
    for row, rank in enumerate(chart.ranks):
        y = TOP + ROW * row
        lines += [
            text(LEFT - 8, y + BAR / 2 + 4, f"rank {rank}", end),
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{BAR}" '
            'fill="#f5f5f5"/>',
        ]
    for bar in chart.bars:
        x, y, width = LEFT + bar.start * unit, TOP + ROW * bar.row, bar.length * unit
        lines.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}" fill="{bar.colour}" '
            f'stroke="#fff" stroke-width="0.5"><title>{bar.event.action} on rank {bar.event.rank}: '
            f"{bar.start:.4g} to {bar.start + bar.length:.4g} {chart.unit}</title></rect>"
        )
        if bar.label:
            ink = f'{middle} fill="{bar.ink}" pointer-events="none"'
            lines.append(text(x + width / 2, y + BAR / 2 + 4, bar.label, ink))
    for mark in _marks(chart.span):
        x = LEFT + mark * unit
        lines.append(f'<path d="M{x:.2f} {foot}v5" stroke="#000"/>')
        lines.append(text(x, foot + 18, f"{mark:g}", middle))
    lines.append(text(LEFT, foot + 36, _LEGEND, ' fill="#666"'))
    lines.append(text(WIDTH - RIGHT, foot + 36, f"time, {chart.unit}", end))
    return "\n".join([*lines, "</svg>", ""])


def _png(chart: Chart, file: Path) -> None:
    try:  # here, not at the head: it is heavy, and only this picture needs it
        drawing = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            "plot: .png needs matplotlib: pip install 'disttensor[plot]'; .svg needs nothing"
        ) from error
    rows = ROW * len(chart.ranks)
    height = TOP + rows + BOTTOM
    figure = drawing.Figure(figsize=(WIDTH / 100, height / 100), dpi=150)
    axes = figure.add_axes(
        (LEFT / WIDTH, BOTTOM / height, 1 - (LEFT + RIGHT) / WIDTH, rows / height)
    )
    for bar in chart.bars:
        middle = bar.start + bar.length / 2
        axes.barh(
            bar.row, bar.length, BAR / ROW, bar.start, color=bar.colour, ec="#fff", linewidth=0.3
        )
        axes.text(middle, bar.row, bar.label, color=bar.ink, ha="center", va="center", fontsize=7)
    axes.set(
        xlim=(0, chart.span),
        ylim=(len(chart.ranks) - 0.5, -0.5),
        xlabel=f"time, {chart.unit} ({_LEGEND})",
        xticks=_marks(chart.span),
        yticks=range(len(chart.ranks)),
        yticklabels=[f"rank {rank}" for rank in chart.ranks],
        title=chart.title,
    )
    figure.savefig(file)
