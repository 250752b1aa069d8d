"""A picture as PNG: the few elements that the pictures of a report are made of (rectangles,
polygons, lines, text, and an svg in it), drawn by matplotlib."""

from __future__ import annotations

import importlib
import re
from os import PathLike
from typing import Any
from xml.etree import ElementTree

_DPI = 100
_POINTS = 72 / _DPI  # of a pixel
_ALIGN = {"start": "left", "middle": "center", "end": "right"}


def draw(svg: str, path: str | PathLike[str]) -> None:
    """Raises ImportError, with what to install, where matplotlib is not."""
    try:
        figure = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ImportError(
            "to_png draws by matplotlib, which is not installed: pip install 'disttensor[plot]', "
            "or write .svg (to_svg), which needs nothing"
        ) from None
    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    page = figure.Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
    axes = page.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    shapes: list[Any] = []
    _elements(root, axes, shapes, 0.0, 0.0)
    collections = importlib.import_module("matplotlib.collections")
    axes.add_collection(collections.PatchCollection(shapes, match_original=True))
    page.savefig(path, format="png")


def _elements(parent: Any, axes: Any, shapes: list[Any], left: float, top: float) -> None:
    """Those in ``parent``, whose corner is at ``left``, ``top``; ``shapes`` are drawn at once."""
    patches = importlib.import_module("matplotlib.patches")
    for e in parent:
        at, kind = e.attrib, e.tag.rpartition("}")[2]
        x, y = left + float(at.get("x", 0)), top + float(at.get("y", 0))
        if kind == "svg":
            _elements(e, axes, shapes, x, y)
        elif kind == "rect":
            size = float(at["width"]), float(at["height"])
            shapes.append(patches.Rectangle((x, y), *size, facecolor=at["fill"], linewidth=0))
        elif kind == "polygon":
            corners = [tuple(map(float, p.split(","))) for p in at["points"].split()]
            shapes.append(patches.Polygon(corners, facecolor=at["fill"], linewidth=0))
        elif kind == "path":
            x, y, way, length = _line(at["d"])
            ends = ([x, x + length], [y, y]) if way == "h" else ([x, x], [y, y + length])
            axes.plot(*ends, color=at["stroke"], linewidth=_POINTS)
        elif kind == "text":
            points = float(at.get("font-size", 12)) * _POINTS
            align = _ALIGN[at.get("text-anchor", "start")]
            axes.text(x, y, e.text, fontsize=points, ha=align, va="baseline", parse_math=False)


def _line(d: str) -> tuple[float, float, str, float]:
    """Of "M1 2h5": from where, which way, how far."""
    found = re.fullmatch(r"M([\d.]+) ([\d.]+)([hv])([\d.]+)", d)
    assert found is not None, d
    x, y, way, length = found.groups()
    return float(x), float(y), way, float(length)
