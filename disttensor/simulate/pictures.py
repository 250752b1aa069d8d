"""The pictures of a report as SVG: memory over the step, bytes by axis, the time line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from disttensor.drawing.svg import END, ROW, TOP, WIDTH, document, legend, marks, rectangle, text
from disttensor.drawing.time_line import Bar, time_axis, time_line
from disttensor.simulate.events import PHASES
from disttensor.simulate.kind import Kind, names_of
from disttensor.simulate.memory import CATEGORIES
from disttensor.simulate.text import amount, seconds
from disttensor.simulate.transfers import Span

LEFT, RIGHT, HEIGHT, BAR = 150, WIDTH - 175, 300, 20  # pixels
INNER = RIGHT - LEFT
_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#aaaaaa")
_LANES = {"wait for ranks": "#c9c9c9", "wait for a stage": "#ededed", "communication": "#8172b3"}
_PHASES = dict(zip(PHASES, _COLOURS, strict=False))
_FINE = 1 / 8000  # of the step: bars with smaller gaps are drawn as one


def memory(kind: Kind) -> str:
    """Draws the memory of one rank over the step, by category. A pixel shows its highest value."""
    end = kind.timeline.end or 1.0
    times = [0.0, *kind.timeline.times]
    points: dict[int, dict[str, int]] = {}
    before: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for at, held in kind.memory.curve:
        x = int(times[min(at, len(times) - 1)] / end * INNER)
        if x not in points or sum(held.values()) > sum(points[x].values()):
            points[x] = held
    high = max(kind.peak_memory, 1)
    size, unit = _unit(high)
    below, lines, y0 = dict.fromkeys(range(INNER + 1), 0.0), [], TOP + HEIGHT
    for name, colour in zip(CATEGORIES, _COLOURS, strict=True):
        top, held = {}, before
        for x in below:
            held = points.get(x, held)
            top[x] = below[x] + held[name] / high * HEIGHT
        if top != below:
            path = [*_corners(top), *reversed(_corners(below))]
            lines.append(
                f'<polygon points="{" ".join(path)}" fill="{colour}"><title>{name}: '
                f"{amount(kind.memory.at_peak.get(name, 0))} at the peak</title></polygon>"
            )
        below = top
    for mark in marks(high / size):
        y = y0 - mark * size / high * HEIGHT
        lines.append(f'<path d="M{LEFT - 5} {y:.1f}h5" stroke="#000"/>')
        lines.append(text(LEFT - 8, y + 4, f"{mark:g} {unit}", END))
    title = f"memory of ranks {names_of(kind.ranks)}: {amount(kind.peak_memory)} at the peak"
    lines += time_axis(LEFT, RIGHT, y0, end, "s")
    lines += legend(zip(CATEGORIES, _COLOURS, strict=True), RIGHT)
    return document(title, LEFT, y0 + 44, lines)


def volume(kinds: Sequence[Kind]) -> str:
    """Draws the bytes that a rank sends over each axis, by phase; of all kinds the most."""
    found: dict[str, tuple[int, Kind, dict[str, int]]] = {}
    for k in kinds:
        for axis, (_, nbytes) in k.volume().items():
            if axis not in found or nbytes > found[axis][0]:
                found[axis] = nbytes, k, k.sent_by_phase(axis)
    high, lines = max([1, *(n for n, _, _ in found.values())]), []
    for row, (axis, (nbytes, kind, phases)) in enumerate(sorted(found.items())):
        y, x = TOP + row * ROW, float(LEFT)
        lines.append(text(LEFT - 8, y + 19, axis, END))
        for phase, n in phases.items():
            width = n / high * INNER
            tip = f"{phase}: {n:,} bytes"
            lines.append(rectangle(x, y, width, ROW - 8, _PHASES[phase], tip))
            x += width
        label = amount(nbytes) + (f" (ranks {names_of(kind.ranks)})" if len(kinds) > 1 else "")
        inside = x > LEFT + INNER / 2
        lines.append(text(x - 6 if inside else x + 6, y + 19, label, END if inside else ""))
    title = "bytes that one rank sends in a step, by axis"
    lines += legend(_PHASES.items(), RIGHT)
    return document(title, LEFT, TOP + max(len(found), len(_PHASES)) * ROW + 10, lines)


def timeline(kinds: Sequence[Kind]) -> str:
    """Draws when each kind of rank computes and waits, and below, thin, the communication."""
    end = max(k.timeline.end for k in kinds) or 1.0
    return time_line(
        f"time line: {seconds(end)}; ranks of one kind do the same",
        [(names_of(k.ranks), _bars(k.timeline.spans, end * _FINE)) for k in kinds],
        end, "s", LEFT, RIGHT, BAR, [*_PHASES.items(), *_LANES.items()],
    )  # fmt: skip


def _bars(spans: Iterable[Span], gap: float) -> Iterator[Bar]:
    """Yields the bars of spans. Spans of one lane and phase that touch are one bar."""
    out: list[tuple[Span, str]] = []
    last: dict[bool, int] = {}
    for s in sorted(spans, key=lambda s: s.start):
        thin = s.lane == "communication"
        i = last.get(thin)
        if i is not None:
            one = out[i][0]
            if (one.lane, one.phase) == (s.lane, s.phase) and s.start - one.end <= gap:
                out[i] = one._replace(end=max(one.end, s.end)), s.lane
                continue
        last[thin] = len(out)
        out.append((s, f"{s.lane}: {s.name}"))
    for s, name in out:
        if s.end > s.start:
            colour = _PHASES[s.phase] if s.lane == "compute" else _LANES[s.lane]
            tip = f"{name}, {s.phase}: {seconds(s.start)} to {seconds(s.end)}"
            yield Bar(s.start, s.end, colour, tip, thin=s.lane == "communication")


def _corners(heights: dict[int, float]) -> list[str]:
    """Returns the points of a curve, without points between two of the same height."""
    return [
        f"{LEFT + x},{TOP + HEIGHT - y:.1f}"
        for x, y in heights.items()
        if not heights.get(x - 1) == y == heights.get(x + 1)
    ]


def _unit(nbytes: float) -> tuple[int, str]:
    power = min(int(nbytes).bit_length() // 10, 4) if nbytes >= 1024 else 0
    return 1 << 10 * power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
