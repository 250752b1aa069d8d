"""A picture of a timeline: a row per rank, a colour each for forwards, backwards and waits."""

from __future__ import annotations

import colorsys
import math
from os import PathLike
from pathlib import Path
from xml.sax.saxutils import escape

from disttensor.checks import check_type
from disttensor.pipeline.schedule import Schedule
from disttensor.pipeline.timeline import Timeline, scale

WIDTH, LEFT, RIGHT, TOP, BOTTOM, ROW, BAR = 1000, 70, 20, 44, 44, 34, 28  # pixels
_DIGIT = 7  # pixels
_GREY = "#d9d9d9"
_HUES = {"F": (0.59, 0.55), "B": (0.07, 0.85), "I": (0.07, 0.85), "W": (0.36, 0.4)}
_LEGEND = (
    "blue: forward, orange: backward{}, lighter: later chunks, grey: waiting for a peer; "
    "number: micro-batch"
)
_SPLIT = " (of inputs; green: of weights)"
_END, _MIDDLE = ' text-anchor="end"', ' text-anchor="middle"'


def plot(what: Timeline | Schedule, path: str | PathLike[str], title: str | None = None) -> Path:
    """Draws a recorded Timeline, or a Schedule in its ticks, to ``path``, an .svg.

    >>> pipeline.plot(pipeline.one_f_one_b(4, 8), "1f1b.svg", title="1f1b").name
    '1f1b.svg'

    Raises ValueError for another suffix and for a timeline without events.
    """
    check_type("plot: what", what, (Timeline, Schedule), "a Timeline or a Schedule")
    check_type("plot: path", path, (str, PathLike), "a path")
    check_type("plot: title", title, (str, type(None)), "a text")
    file = Path(path)
    if file.suffix != ".svg":
        raise ValueError(f"plot: path {str(file)!r} ends in {file.suffix!r}: write .svg")
    timeline = Timeline.of(what) if isinstance(what, Schedule) else what
    if not timeline.span:
        raise ValueError(f"plot: {timeline!r} has nothing that takes time")
    bubble = f"bubble {100 * timeline.bubble:.1f} %"
    lines = _svg(timeline, f"{title}: {bubble}" if title else bubble)
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def _svg(timeline: Timeline, title: str) -> list[str]:
    size, unit = scale(timeline.span, timeline.unit)
    foot = TOP + ROW * len(timeline.ranks)
    height, pixels = foot + BOTTOM, (WIDTH - LEFT - RIGHT) / (timeline.span / size)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        text(LEFT, 26, title, ' font-size="15"'),
    ]
    chunks = 1 + max(event.chunk for event in timeline.events)
    bars = []
    for row, rank in enumerate(timeline.ranks):
        y = TOP + ROW * row
        lines += [
            text(LEFT - 8, y + BAR / 2 + 4, f"rank {rank}", _END),
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{BAR}" '
            'fill="#f5f5f5"/>',
        ]
        for event, start, end in [*timeline.waits(rank), *timeline.pieces(rank)]:
            at, until = (start - timeline.start) / size, (end - timeline.start) / size
            x, width = LEFT + at * pixels, (until - at) * pixels
            colour, ink = _colours(event.kind, event.chunk, chunks)
            bars.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}" fill="{colour}" '
                f'stroke="#fff" stroke-width="0.5"><title>{event.action} on rank {rank}: '
                f"{at:.4g} to {until:.4g} {unit}</title></rect>"
            )
            number = "" if event.kind == "wait" else str(event.micro_batch)
            if number and width >= _DIGIT * len(number) + 4:
                ink = f'{_MIDDLE} fill="{ink}" pointer-events="none"'
                bars.append(text(x + width / 2, y + BAR / 2 + 4, number, ink))
    lines += bars
    for mark in marks(timeline.span / size):
        x = LEFT + mark * pixels
        lines.append(f'<path d="M{x:.2f} {foot}v5" stroke="#000"/>')
        lines.append(text(x, foot + 18, f"{mark:g}", _MIDDLE))
    split = any(event.kind == "W" for event in timeline.events)
    lines.append(text(LEFT, foot + 36, _LEGEND.format(_SPLIT if split else ""), ' fill="#666"'))
    lines.append(text(WIDTH - RIGHT, foot + 36, f"time, {unit}", _END))
    return [*lines, "</svg>", ""]


def text(x: float, y: float, content: str, more: str = "") -> str:
    return f'<text x="{x:.6g}" y="{y:g}"{more}>{escape(content)}</text>'


def _colours(kind: str, chunk: int, chunks: int) -> tuple[str, str]:
    """Of a bar and of the number in it: later chunks are lighter."""
    if kind == "wait":
        return _GREY, _GREY
    light = 0.42 + 0.36 * chunk / max(chunks - 1, 1)
    hue, full = _HUES[kind]
    rgb = (f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, light, full))
    return "#" + "".join(rgb), "#fff" if light < 0.6 else "#000"


def marks(span: float) -> list[float]:
    """Four to ten round numbers from 0 to ``span``."""
    rough = span / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(span / step * (1 + 1e-9)) + 1)]
