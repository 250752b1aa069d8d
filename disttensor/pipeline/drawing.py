"""Draws timelines and other pictures as SVG, writes them as .svg or .png, and writes traces for
Perfetto and chrome://tracing."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree
from xml.sax.saxutils import escape

WIDTH, ROW, TOP = 1000, 34, 44  # pixels
END, MIDDLE = ' text-anchor="end"', ' text-anchor="middle"'
_DIGIT = 7  # pixels
_DPI = 100
_POINTS = 72 / _DPI  # of a pixel
_ALIGN = {"start": "left", "middle": "center", "end": "right"}

# SVG ----------------------------------------------------------------------------------------------


def document(
    title: str, left: float, height: float, lines: Iterable[str], width: float = WIDTH
) -> str:
    """Returns a picture of ``lines`` on a white ground, with a title that begins at ``left``."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" font-size="12">'
    )
    ground = f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>'
    return "\n".join([head, ground, text(left, 26, title, ' font-size="15"'), *lines, "</svg>", ""])


def text(x: float, y: float, content: str, more: str = "") -> str:
    return f'<text x="{x:.6g}" y="{y:g}"{more}>{escape(content)}</text>'


def rectangle(
    x: float, y: float, width: float, height: float, colour: str, tip: str = "", more: str = ""
) -> str:
    inner = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect x="{x:.6g}" y="{y:g}" width="{width:.3f}" height="{height:g}" fill="{colour}"'
        f"{more}>{inner}</rect>"
    )


def legend(entries: Iterable[tuple[str, str]], x: float) -> list[str]:
    """Returns a list of (name, colour) at the right of a picture."""
    lines = []
    for i, (name, colour) in enumerate(entries):
        lines.append(rectangle(x + 14, TOP + 20 * i, 12, 12, colour))
        lines.append(text(x + 31, TOP + 20 * i + 10, name))
    return lines


def time_axis(left: float, right: float, y: float, span: float, unit: str) -> list[str]:
    """Returns an axis from 0 to ``span`` at height ``y``."""
    size, unit = scale(span, unit)
    lines = []
    for mark in marks(span / size):
        x = left + mark * size / span * (right - left)
        lines.append(f'<path d="M{x:.2f} {y:g}v5" stroke="#000"/>')
        lines.append(text(x, y + 18, f"{mark:g}", MIDDLE + ' class="tick"'))
    return [*lines, text(right, y + 36, f"time, {unit}", END)]


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


def marks(span: float) -> list[float]:
    """Returns four to ten round numbers from 0 to ``span``."""
    rough = span / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(span / step * (1 + 1e-9)) + 1)]


def scale(span: float, unit: str) -> tuple[float, str]:
    """Returns (size, name) of a readable unit for ``span``: s, ms or µs for seconds."""
    if unit == "s" and 0 < span < 1:
        return (1e-3, "ms") if span >= 1e-3 else (1e-6, "µs")
    return 1, unit


# Files --------------------------------------------------------------------------------------------


def write_picture(where: str, svg: str, path: str | PathLike[str]) -> Path:
    """Writes a picture as .svg or, by matplotlib, as .png. Raises ValueError for another suffix,
    and ImportError if matplotlib is needed and not installed. ``where``: for the errors."""
    file = Path(path)
    if file.suffix == ".svg":
        file.write_text(svg, encoding="utf-8")
    elif file.suffix == ".png":
        _write_png(where, svg, file)
    else:
        raise ValueError(f"{where}: path {str(file)!r} ends in {file.suffix!r}: write .svg or .png")
    return file


def _write_png(where: str, svg: str, file: Path) -> None:
    """Draws the elements of our pictures: rectangles, polygons, lines, text, and an svg inside."""
    try:
        figure = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ImportError(
            f"{where}: a .png is drawn by matplotlib, which is not installed: "
            "pip install 'disttensor[plot]', or write .svg, which needs no other package"
        ) from None
    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    page = figure.Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
    axes = page.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    shapes: list[Any] = []
    _draw(root, axes, shapes, 0.0, 0.0)
    collections = importlib.import_module("matplotlib.collections")
    axes.add_collection(collections.PatchCollection(shapes, match_original=True))
    page.savefig(file, format="png")


def _draw(parent: Any, axes: Any, shapes: list[Any], left: float, top: float) -> None:
    """Draws the elements of ``parent``, whose corner is at ``left``, ``top``. Patches are added to
    ``shapes``, to be drawn at once."""
    patches = importlib.import_module("matplotlib.patches")
    for e in parent:
        at, kind = e.attrib, e.tag.rpartition("}")[2]
        x, y = left + float(at.get("x", 0)), top + float(at.get("y", 0))
        edge: dict[str, Any] = {"linewidth": 0}
        if "stroke-width" in at:
            edge = {"linewidth": float(at["stroke-width"]) * _POINTS, "edgecolor": at["stroke"]}
        if kind == "svg":
            _draw(e, axes, shapes, x, y)
        elif kind == "rect":
            size = float(at["width"]), float(at["height"])
            shapes.append(patches.Rectangle((x, y), *size, facecolor=at["fill"], **edge))
        elif kind == "polygon":
            corners = [tuple(map(float, p.split(","))) for p in at["points"].split()]
            shapes.append(patches.Polygon(corners, facecolor=at["fill"], **edge))
        elif kind == "path":
            found = re.fullmatch(r"M([\d.]+) ([\d.]+)([hv])([\d.]+)", at["d"])
            assert found is not None, at["d"]
            x, y, length = (float(found[i]) for i in (1, 2, 4))
            ends = ([x, x + length], [y, y]) if found[3] == "h" else ([x, x], [y, y + length])
            axes.plot(*ends, color=at["stroke"], linewidth=_POINTS)
        elif kind == "text":
            axes.text(
                x, y, e.text, fontsize=float(at.get("font-size", 12)) * _POINTS,
                ha=_ALIGN[at.get("text-anchor", "start")], va="baseline", parse_math=False,
                color=at.get("fill", "#000"), zorder=3,
            )  # fmt: skip


# name, category, number of the thread, start, end, and anything else to show
TraceSpan = tuple[str, str, int, float, float, dict[str, Any]]


def write_chrome_trace(
    path: str | PathLike[str], processes: Iterable[tuple[str, int, Iterable[TraceSpan]]],
    threads: Sequence[str], microseconds: float = 1e6,
) -> Path:  # fmt: skip
    """Writes a trace that Perfetto and chrome://tracing open.

    Args:
        path: of the file.
        processes: the name, number and spans of each process.
        threads: the names of the threads of a process.
        microseconds: length of a unit of time.
    """
    events: list[dict[str, Any]] = []
    for process, pid, spans in processes:
        meta = {"ph": "M", "pid": pid}
        events.append({**meta, "name": "process_name", "args": {"name": process}})
        for tid, thread in enumerate(threads):
            events.append({**meta, "name": "thread_name", "tid": tid, "args": {"name": thread}})
        for name, category, tid, start, end, args in spans:
            ts, dur = start * microseconds, (end - start) * microseconds
            span = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid}
            events.append({**span, "ts": ts, "dur": dur, "args": args})
    file = Path(path)
    file.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return file
