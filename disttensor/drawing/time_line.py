"""A time line as SVG: rows of bars above an axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from disttensor.drawing.svg import (
    END,
    MIDDLE,
    ROW,
    TOP,
    document,
    legend,
    marks,
    rectangle,
    scale,
    text,
)

_DIGIT = 7  # pixels


class Bar(NamedTuple):
    """A bar of a time line. ``label`` is drawn inside where it fits, in colour ``ink``; a ``thin``
    bar is drawn below the others."""

    start: float
    end: float
    colour: str
    tip: str
    label: str = ""
    ink: str = "#000"
    thin: bool = False


def time_line(
    title: str, rows: Sequence[tuple[str, Iterable[Bar]]], span: float, unit: str, left: float,
    right: float, height: float, entries: Sequence[tuple[str, str]] = (), note: str = "",
    stroke: str = "",
) -> str:  # fmt: skip
    """Returns a time line as SVG.

    Args:
        title: of the picture.
        rows: the name and the bars of each row.
        span: the end of the time axis, which begins at 0.
        unit: of the times.
        left: the left edge of the bars, in pixels.
        right: their right edge.
        height: of a bar that is not thin.
        entries: the names and colours of a legend at the right.
        note: a text below the axis.
        stroke: SVG attributes of each bar.
    """
    inner, foot, scale_x = right - left, TOP + ROW * len(rows), (right - left) / span
    names, bars = [], []
    for i, (name, row) in enumerate(rows):
        y = ROW * i
        names.append(text(left - 8, TOP + y + height / 2 + 4, name, END))
        names.append(rectangle(left, TOP + y, inner, height, "#f5f5f5"))
        for bar in row:
            x, width = bar.start * scale_x, (bar.end - bar.start) * scale_x
            top, high = (y + height + 2, 6) if bar.thin else (y, height)
            bars.append(rectangle(x, top, width, high, bar.colour, bar.tip, stroke))
            if bar.label and width >= _DIGIT * len(bar.label) + 4:
                ink = f'{MIDDLE} fill="{bar.ink}" pointer-events="none"'
                bars.append(text(x + width / 2, y + height / 2 + 4, bar.label, ink))
    frame = (  # the page of a report changes its viewBox to zoom
        f'<svg class="bars" x="{left:g}" y="{TOP}" width="{inner:g}" height="{foot - TOP}" '
        f'viewBox="0 0 {inner:g} {foot - TOP}" preserveAspectRatio="none">'
    )
    notes = [text(left, foot + 36, note, ' fill="#666"')] if note else []
    axis = time_axis(left, right, foot, span, unit)
    lines = [*names, frame, *bars, "</svg>", *axis, *notes, *legend(entries, right)]
    return document(title, left, max(foot + 44, TOP + 20 * len(entries)), lines)


def time_axis(left: float, right: float, y: float, span: float, unit: str) -> list[str]:
    """Returns an axis from 0 to ``span`` at height ``y``."""
    size, unit = scale(span, unit)
    lines = []
    for mark in marks(span / size):
        x = left + mark * size / span * (right - left)
        lines.append(f'<path d="M{x:.2f} {y:g}v5" stroke="#000"/>')
        lines.append(text(x, y + 18, f"{mark:g}", MIDDLE + ' class="tick"'))
    return [*lines, text(right, y + 36, f"time, {unit}", END)]
