"""Pictures as SVG: documents, texts, boxes, legends, colours, round numbers."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, ROW, TOP = 1000, 34, 44  # pixels
END, MIDDLE = ' text-anchor="end"', ' text-anchor="middle"'


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


def colour(hue: float, light: float, full: float) -> str:
    """Returns a colour, from numbers of 0 to 1."""
    rgb = colorsys.hls_to_rgb(hue % 1, light, full)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


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


def write_svg(where: str, svg: str, path: str | PathLike[str]) -> Path:
    """Writes a picture. Raises ValueError for a suffix other than .svg. ``where``: for the
    error."""
    file = Path(path)
    if file.suffix != ".svg":
        raise ValueError(
            f"{where}: path {str(file)!r} ends in {file.suffix!r}: write .svg, which a browser "
            "shows and Inkscape, rsvg-convert or cairosvg turn into other formats"
        )
    file.write_text(svg, encoding="utf-8")
    return file
