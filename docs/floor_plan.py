"""Draws docs/floor_plan.svg: a box for each package, and which imports which.

    python docs/floor_plan.py            writes the picture
    python docs/floor_plan.py --check    exits with 1 where the picture is not that of the imports

A box is a package, or a module at the root of ``disttensor``. A box stands above all that it
imports. An arrow that follows from others (a imports b, b imports c, so a -> c) is left out.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "floor_plan.svg"
WIDTH, HEIGHT, GAP, LINES = 178, 74, 14, 4  # of a box, in pixels; lines of its text
DOOR = "disttensor"


def boxes() -> dict[str, list[Path]]:
    """The files of each box."""
    found: dict[str, list[Path]] = {"ops": [], "reshard": [], DOOR: []}
    for package in ("disttensor", "ops", "reshard"):
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            name = package if package != "disttensor" else DOOR if len(parts) == 2 else parts[1]
            if package == "disttensor" and len(parts) == 2 and parts[1] != "__init__":
                name = parts[1]
            found.setdefault(name, []).append(file)
    return found


def imported(file: Path, names: set[str]) -> set[str]:
    """The boxes that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for parts in (target.split(".") for target in targets):
            if parts[0] in ("ops", "reshard"):
                found.add(parts[0])
            elif parts[0] == "disttensor" and len(parts) > 1 and parts[1] in names:
                found.add(parts[1])
    return found


def graph() -> dict[str, set[str]]:
    """box -> the boxes that it imports. The two files that begin with ``import disttensor`` do so
    for the order of loading only."""
    files = boxes()
    names = set(files)
    return {box: set().union(*(imported(f, names) for f in files[box])) - {box} for box in files}


def levels(needs: dict[str, set[str]]) -> list[list[str]]:
    """Boxes by floor, from the ground: each stands right above the highest that it imports."""
    floor: dict[str, int] = {}
    while len(floor) < len(needs):
        free = [r for r in needs if r not in floor and needs[r] <= floor.keys()]
        if not free:
            raise SystemExit(f"these boxes import each other: {sorted(needs.keys() - floor)}")
        floor |= {r: 1 + max((floor[n] for n in needs[r]), default=-1) for r in free}
    return [[r for r in needs if floor[r] == n] for n in range(max(floor.values()) + 1)]


def direct(needs: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The arrows that do not follow from others."""

    def reached(box: str) -> set[str]:
        return needs[box].union(*(reached(n) for n in needs[box]))

    return {
        (box, n)
        for box, ns in needs.items()
        for n in ns
        if not any(n in reached(other) for other in ns - {n})
    }


def said(box: str) -> str:
    """Returns the first sentence of a package's docstring."""
    files = boxes()[box]
    head = next((f for f in files if f.stem == "__init__"), files[0])
    text = " ".join((ast.get_docstring(ast.parse(head.read_text())) or "").split("\n\n")[0].split())
    return text.removeprefix(f"{box}: ").split(". ")[0].rstrip(".").replace("``", "")


def svg() -> str:
    needs = graph()
    floors = levels(needs)
    width = max(map(len, floors)) * (WIDTH + GAP) + GAP
    place: dict[str, tuple[float, float]] = {}
    for n, floor in enumerate(reversed(floors)):
        left = (width - len(floor) * (WIDTH + GAP) + GAP) / 2
        for i, box in enumerate(sorted(floor)):
            place[box] = left + i * (WIDTH + GAP), GAP + n * (HEIGHT + 3 * GAP)
    height = GAP + len(floors) * (HEIGHT + 3 * GAP) - 2 * GAP
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for above, below in sorted(direct(needs)):
        (x0, y0), (x1, y1) = place[above], place[below]
        start, end = (x0 + WIDTH / 2, y0 + HEIGHT), (x1 + WIDTH / 2, y1)
        bend = (end[1] - start[1]) / 2
        out.append(
            f'<path d="M{start[0]:g} {start[1]:g}C{start[0]:g} {start[1] + bend:g} {end[0]:g} '
            f'{end[1] - bend:g} {end[0]:g} {end[1]:g}" fill="none" stroke="#9aa5b1"/>'
        )
    for box, (x, y) in place.items():
        package = len(boxes()[box]) > 1
        out.append(
            f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="5" '
            f'fill="{"#e3f0ff" if package else "#f4f4f0"}" stroke="#52606d"/>'
            f'<text x="{x + 8:g}" y="{y + 16:g}" font-size="13" font-weight="bold">{box}</text>'
        )
        lines = textwrap.wrap(said(box), 33, max_lines=LINES, placeholder=" ...")
        out += [
            f'<text x="{x + 8:g}" y="{y + 30 + 12 * i:g}" font-size="10">{escape(line)}</text>'
            for i, line in enumerate(lines)
        ]
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    if "--check" not in sys.argv:
        FILE.write_text(svg())
    elif FILE.read_text() != svg():
        sys.exit(f"{FILE.name} is not that of the imports: run python {sys.argv[0]}")
