"""A picture of a timeline: a row per rank, forwards blue, backwards orange, chunks in shades, waits
grey."""

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
_LEGEND = "blue: forward, orange: backward, lighter: later chunks, grey: waiting for a peer; number: micro-batch"


class Box(NamedTuple):
    """A rectangle of the picture: row, start and length in the unit of the axis, what it is."""

    row: int
    start: float
    length: float
    event: Event
    colour: str
    ink: str


class Chart(NamedTuple):
    title: str
    ranks: list[int]
    boxes: list[Box]
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
    boxes = []
    for row, rank in enumerate(timeline.ranks):
        waits = [
            (e, e.start, e.end) for e in timeline.events if e.rank == rank and e.kind == "wait"
        ]
        for event, start, end in [*waits, *timeline.pieces(rank)]:
            colours = _colours(event.kind, event.chunk, chunks)
            boxes.append(
                Box(row, (start - timeline.start) / size, (end - start) / size, event, *colours)
            )
    whole = f"bubble {100 * timeline.bubble:.1f} %"
    return Chart(
        f"{title}: {whole}" if title else whole, timeline.ranks, boxes, timeline.span / size, unit
    )


def _colours(kind: str, chunk: int, chunks: int) -> tuple[str, str]:
    """Of a bar and of the number in it: later chunks are lighter."""
    if kind == "wait":
        return _GREY, _GREY
    light = 0.42 + 0.36 * chunk / max(chunks - 1, 1)
    hue, full = (0.59, 0.55) if kind == "F" else (0.07, 0.85)
    rgb = colorsys.hls_to_rgb(hue, light, full)
    return "#" + "".join(
        f"{round(255 * part):02x}" for part in rgb
    ), "#fff" if light < 0.6 else "#000"


def _marks(span: float) -> list[float]:
    """Four to ten round numbers from 0 to ``span``."""
    rough = span / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(span / step * (1 + 1e-9)) + 1)]


def _label(box: Box, pixels: float) -> str:
    """The number of the micro-batch where there is room for it."""
    text = str(box.event.micro_batch)
    return text if box.event.kind != "wait" and pixels >= _DIGIT * len(text) + 4 else ""


def _svg(chart: Chart) -> str:
    height = TOP + ROW * len(chart.ranks) + BOTTOM
    unit = (WIDTH - LEFT - RIGHT) / chart.span
    foot = TOP + ROW * len(chart.ranks)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="26" font-size="15">{escape(chart.title)}</text>',
    ]
    for row, rank in enumerate(chart.ranks):
        y = TOP + ROW * row
        lines.append(
            f'<text x="{LEFT - 8}" y="{y + BAR / 2 + 4:g}" text-anchor="end">rank {rank}</text>'
        )
        lines.append(
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{BAR}" '
            'fill="#f5f5f5"/>'
        )
    for box in chart.boxes:
        x, y, width = LEFT + box.start * unit, TOP + ROW * box.row, box.length * unit
        lines.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}" fill="{box.colour}" '
            f'stroke="#fff" stroke-width="0.5"><title>{box.event.action} on rank {box.event.rank}: '
            f"{box.start:.4g} to {box.start + box.length:.4g} {chart.unit}</title></rect>"
        )
        text = _label(box, width)
        if text:
            lines.append(
                f'<text x="{x + width / 2:.2f}" y="{y + BAR / 2 + 4:g}" text-anchor="middle" '
                f'fill="{box.ink}" pointer-events="none">{text}</text>'
            )
    for mark in _marks(chart.span):
        x = LEFT + mark * unit
        lines.append(f'<path d="M{x:.2f} {foot}v5" stroke="#000"/>')
        lines.append(f'<text x="{x:.2f}" y="{foot + 18}" text-anchor="middle">{mark:g}</text>')
    low = foot + 36
    lines.append(f'<text x="{LEFT}" y="{low}" fill="#666">{_LEGEND}</text>')
    lines.append(f'<text x="{WIDTH - RIGHT}" y="{low}" text-anchor="end">time, {chart.unit}</text>')
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
    for row in range(len(chart.ranks)):
        mine = [box for box in chart.boxes if box.row == row]
        axes.broken_barh(
            [(box.start, box.length) for box in mine],
            (row - BAR / ROW / 2, BAR / ROW),
            facecolors=[box.colour for box in mine],
            edgecolors="#fff",
            linewidth=0.3,
        )
    for box in chart.boxes:
        text = _label(box, box.length / chart.span * (WIDTH - LEFT - RIGHT))
        axes.text(
            box.start + box.length / 2,
            box.row,
            text,
            color=box.ink,
            ha="center",
            va="center",
            fontsize=7,
        )
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
