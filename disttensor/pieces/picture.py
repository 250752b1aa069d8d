"""Picture: which ranks hold which part of a tensor, from its spec alone, as text and as SVG."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from disttensor.comm.process_group import world
from disttensor.core.layout import Axes, Range, Ranges, Shape, balanced_ranges, chunk
from disttensor.core.placement import Balanced, Partial, Replicate, Shard
from disttensor.core.spec import DistSpec
from disttensor.drawing.svg import END, MIDDLE, colour, document, rectangle, text, write_svg
from disttensor.pieces.names import listed, span

_COLUMNS = 100  # of text
_MOST = 16  # rows or columns of boxes in a picture; of more, the middle is left out
_SHEETS = 4  # grids of boxes, for the pieces of a third dim
_LEFT, _BOX, _ROW, _LETTER = 78, 56, 34, 7.2  # pixels


class PieceOnRanks(NamedTuple):
    """A part of a tensor, from start to stop of each dim, and the ranks that hold it."""

    ranges: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]


class Sheet(NamedTuple):
    """A grid of boxes: ``ranks[row, column]``. A row or column is its start and stop, or None for
    those that are left out."""

    title: str
    rows: list[tuple[int, int] | None]
    columns: list[tuple[int, int] | None]
    ranks: dict[tuple[Any, Any], tuple[int, ...]]


def pieces_of(spec: DistSpec) -> tuple[list[PieceOnRanks], tuple[int, ...]]:
    """Returns the pieces in the order of their offsets, and the ranks that hold no element."""
    found: dict[Ranges, list[int]] = {}
    empty, mesh = [], spec.mesh
    balanced = {a for a, p in spec.layout.custom if isinstance(p, Balanced)}
    for rank, place in zip(mesh.ranks, mesh.coordinates(), strict=True):
        by_dim = [
            _ranges(size, axes, balanced, mesh.shape, place)
            for size, axes in zip(spec.shape, spec.layout.dims, strict=True)
        ]
        for ranges in itertools.product(*by_dim):
            found.setdefault(ranges, []).append(rank)
        if not all(by_dim):
            empty.append(rank)
    pieces = [PieceOnRanks(ranges, tuple(sorted(ranks))) for ranges, ranks in sorted(found.items())]
    return pieces, tuple(sorted(empty))


def bytes_on(spec: DistSpec) -> tuple[int, ...]:
    """Returns the bytes of the local tensor on each rank of the mesh, in the order of its ranks."""
    return tuple(
        spec.box_at(place).numel * spec.dtype.itemsize for place in spec.mesh.coordinates()
    )


def _ranges(size: int, axes: Axes, balanced: set[int], sizes: Shape, place: Shape) -> list[Range]:
    """Returns the parts of a dim that the rank at ``place`` holds, in their order there."""
    held = [(0, size)]
    for axis in axes:
        length, parts, index = sum(b - a for a, b in held), sizes[axis], place[axis]
        if axis in balanced:
            wanted = balanced_ranges(length, index, parts)
        else:
            start, count = chunk(length, parts, index)
            wanted = ((start, start + count),)
        cut, before = [], 0
        for a, b in held:
            for start, stop in wanted:
                first, last = max(a, a + start - before), min(b, a + stop - before)
                if first < last:
                    cut.append((first, last))
            before += b - a
        held = cut
    return [one for one in held if one[0] < one[1]]


@dataclass(frozen=True, repr=False)
class Picture:
    """Which ranks hold which part of a tensor. ``print`` shows it as text, a notebook as SVG.

    Attributes:
        title: the tensor and its mesh, in the notation of docs/debugging.md.
        pieces: (start and stop of each dim, ranks), in the order of their offsets.
        empty: the ranks of the mesh that hold no element.
        notes: the facts that the boxes do not show.
        sheets: the boxes as they are drawn.
    """

    title: str
    pieces: list[PieceOnRanks]
    empty: tuple[int, ...]
    notes: list[str]
    sheets: list[Sheet]

    @classmethod
    def of(cls, spec: DistSpec) -> Picture:
        spec = spec.on_root()
        pieces, empty = pieces_of(spec)
        cuts = [sorted({p.ranges[d] for p in pieces}) for d in range(spec.ndim)]
        split = [d for d, cut in enumerate(cuts) if len(cut) > 1]
        drawn = list(range(spec.ndim)) if spec.ndim <= 2 else split[:2]
        notes = _notes(spec, cuts, drawn, empty)
        others = [d for d in split if d not in drawn]
        slabs = list(itertools.product(*(cuts[d] for d in others)))
        if len(slabs) > _SHEETS:
            notes.append(f"{len(slabs) - _SHEETS} more such grids are left out")
        sheets = []
        for slab in slabs[:_SHEETS] if pieces else ():
            inside = [p for p in pieces if tuple(p.ranges[d] for d in others) == slab]
            at = ", ".join(f"dim {d} at {span(r)}" for d, r in zip(others, slab, strict=True))
            sheets.append(_sheet(at, inside, drawn))
        return cls(f"{spec!r} on {spec.mesh!r}", pieces, empty, notes, sheets)

    def __repr__(self) -> str:
        lines = [self.title]
        for sheet in self.sheets:
            lines += ["", *([sheet.title] if sheet.title else []), *_text(sheet)]
        return "\n".join([*lines, *([""] if self.notes else []), *self.notes])

    def _repr_svg_(self) -> str:
        lines: list[str] = []
        width, y = 40 + max(8.3 * len(self.title), _LETTER * max(map(len, self.notes))), 44.0
        colours: dict[tuple[int, ...], str] = {}
        for sheet in self.sheets:
            right, y = _draw(lines, sheet, y, colours)
            width = max(width, right + 20)
        for note in self.notes:
            y += 18
            lines.append(text(20, y, note))
        return document(self.title, 20, y + 18, lines, width)

    def save(self, path: str | PathLike[str]) -> Path:
        """Writes the picture to ``path``, an .svg. Returns the path."""
        return write_svg("Picture.save", self._repr_svg_(), path)


def _notes(
    spec: DistSpec, cuts: list[list[Range]], drawn: list[int], empty: tuple[int, ...]
) -> list[str]:
    mesh, out = spec.mesh, []
    if spec.ndim > 2 and drawn:
        ways = ("columns",) if len(drawn) == 1 else ("rows", "columns")
        shown = ", ".join(f"{w} are dim {d}" for w, d in zip(ways, drawn, strict=True))
        whole = [str(d) for d, cut in enumerate(cuts) if len(cut) < 2]
        out.append(shown + (f"; not split: dim {', '.join(whole)}" if whole else ""))
    for axis, p in enumerate(spec.placements):
        name = mesh.dim_names[axis]
        if isinstance(p, Partial):
            value = f"the value is the {p.reduce_op} over {name} of what the ranks of a box hold"
            out.append(f"{name}: {p}: {value}")
        elif type(p) not in (Shard, Balanced, Replicate):
            out.append(f"{name}: {p!r}: drawn as its base class, which may hold other rows")
    if empty:
        out.append(f"no element: {listed(empty)}")
    outside = sorted({*range(world()[1])} - {*mesh.ranks})
    if outside:
        out.append(f"outside the mesh: {listed(outside)}")
    left_out = [d for d in drawn if len(cuts[d]) > _MOST]
    out += [f"dim {d} has {len(cuts[d])} pieces, drawn in part" for d in left_out]
    held = bytes_on(spec)
    least, most = min(held), max(held)
    out.append(f"bytes on a rank: {least:,}" + (f" to {most:,}" if least < most else ""))
    return out


def _sheet(title: str, pieces: Sequence[PieceOnRanks], drawn: Sequence[int]) -> Sheet:
    """Returns the grid of pieces that differ in the dims ``drawn`` only, the last one as columns;
    without a second one there is one row, and without any one box."""

    def at(piece: PieceOnRanks, back: int) -> Range:
        return piece.ranges[drawn[-back]] if len(drawn) >= back else (0, 0)

    ranks: dict[tuple[Range | None, Range | None], tuple[int, ...]] = {
        (at(p, 2), at(p, 1)): p.ranks for p in pieces
    }
    rows, columns = (sorted({at(p, back) for p in pieces}) for back in (2, 1))
    return Sheet(title, elided(rows, _MOST), elided(columns, _MOST), ranks)


def elided(items: Sequence[Range | None], most: int) -> list[Range | None]:
    """Returns at most so many items: None is in the place of those in the middle."""
    if len(items) <= most:
        return list(items)
    first = most // 2
    return [*items[:first], None, *items[len(items) - (most - first - 1) :]]


def _text(sheet: Sheet) -> Iterator[str]:
    names = [span(row) for row in sheet.rows]
    left = max(map(len, names))
    wide = 2 + max(len(listed(r)) for r in sheet.ranks.values())
    wide = max(wide, 2 + max(len(span(c)) for c in sheet.columns))
    columns = elided(sheet.columns, max(1, (_COLUMNS - left - 2) // (wide + 1)))

    def line(name: str, start: str, cells: Sequence[str], between: str, stop: str) -> str:
        return f"{name:>{left}} {start}{between.join(cells)}{stop}".rstrip()

    bar = ["─" * wide] * len(columns)
    head = line("", " ", [span(c).center(wide) for c in columns], " ", "")
    yield from [head] if head else []
    for i, (name, row) in enumerate(zip(names, sheet.rows, strict=True)):
        yield line("", "├" if i else "┌", bar, "┼" if i else "┬", "┤" if i else "┐")
        cells = [listed(sheet.ranks.get((row, c), ())).center(wide) for c in columns]
        yield line(name, "│", cells, "│", "│")
    yield line("", "└", bar, "┴", "┘")


def _draw(
    lines: list[str], sheet: Sheet, y: float, colours: dict[tuple[int, ...], str]
) -> tuple[float, float]:
    """Adds a grid below ``y``. Returns its right edge and its lower edge."""
    wide = _LETTER * max(len(listed(r)) for r in sheet.ranks.values()) + 16
    total = sum(b - a for a, b in filter(None, sheet.columns)) or 1
    widths = [max(wide, _BOX, 480 * (c[1] - c[0]) / total if c else 0) for c in sheet.columns]
    if sheet.title:
        y += 18
        lines.append(text(20, y, sheet.title))
    y, x = y + 20, float(_LEFT)
    for column, width in zip(sheet.columns, widths, strict=True):
        lines.append(text(x + width / 2, y - 6, span(column), MIDDLE))
        x += width
    for row in sheet.rows:
        lines.append(text(_LEFT - 8, y + _ROW / 2 + 4, span(row), END))
        x = float(_LEFT)
        for column, width in zip(sheet.columns, widths, strict=True):
            ranks = sheet.ranks.get((row, column), ())
            if ranks not in colours:
                hue = 0.58 + 0.618034 * len(colours)  # neighbours differ
                colours[ranks] = colour(hue, 0.83, 0.55) if ranks else "#ededed"
            edge = ' stroke="#444" stroke-width="1"'
            lines.append(rectangle(x, y, width, _ROW, colours[ranks], listed(ranks), edge))
            lines.append(text(x + width / 2, y + _ROW / 2 + 4, listed(ranks), MIDDLE))
            x += width
        y += _ROW
    return x, y
