"""The pictures of a report, as SVG: memory over the step, bytes by axis, the time line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from disttensor.pipeline.plot import marks, text
from disttensor.pipeline.timeline import scale
from disttensor.simulate.events import PHASES
from disttensor.simulate.kind import Kind, names_of
from disttensor.simulate.memory import CATEGORIES
from disttensor.simulate.text import amount, seconds
from disttensor.simulate.transfers import Span

WIDTH, LEFT, RIGHT, TOP, HEIGHT, ROW = 1000, 150, 175, 40, 300, 34  # pixels
INNER = WIDTH - LEFT - RIGHT
_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#aaaaaa")
_LANES = {"wait for ranks": "#c9c9c9", "wait for a stage": "#ededed", "communication": "#8172b3"}
_PHASES = dict(zip(PHASES, _COLOURS, strict=False))
_END, _MIDDLE = ' text-anchor="end"', ' text-anchor="middle"'
_FINE = 1 / 8000  # of the step: bars with less between them are drawn as one


def memory(kind: Kind) -> str:
    """The memory of one rank over the step, by category; the curve is the highest of each pixel."""
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
        lines.append(text(LEFT - 8, y + 4, f"{mark:g} {unit}", _END))
    title = f"memory of ranks {names_of(kind.ranks)}: {amount(kind.peak_memory)} at the peak"
    legend = _legend(zip(CATEGORIES, _COLOURS, strict=True), TOP)
    return _svg(title, y0 + 40, [*lines, *_ticks(end, y0), *legend])


def volume(kinds: Sequence[Kind]) -> str:
    """What a rank sends over each axis, of all kinds the most, by phase."""
    found: dict[str, tuple[int, Kind, dict[str, int]]] = {}
    for k in kinds:
        for axis, (_, nbytes) in k.volume().items():
            if axis not in found or nbytes > found[axis][0]:
                found[axis] = nbytes, k, k.sent_by_phase(axis)
    high, lines = max([1, *(n for n, _, _ in found.values())]), []
    for row, (axis, (nbytes, kind, phases)) in enumerate(sorted(found.items())):
        y, x = TOP + row * ROW, float(LEFT)
        lines.append(text(LEFT - 8, y + 19, axis, _END))
        for phase, n in phases.items():
            width = n / high * INNER
            lines.append(_bar(x, y, width, ROW - 8, _PHASES[phase], f"{phase}: {n:,} bytes"))
            x += width
        said = amount(nbytes) + (f" (ranks {names_of(kind.ranks)})" if len(kinds) > 1 else "")
        inside = x > LEFT + INNER / 2
        lines.append(text(x - 6 if inside else x + 6, y + 19, said, _END if inside else ""))
    title = "bytes that one rank sends in a step, by axis"
    legend = _legend(_PHASES.items(), TOP)
    return _svg(title, TOP + max(len(found), len(_PHASES)) * ROW + 10, [*lines, *legend])


def timeline(kinds: Sequence[Kind]) -> str:
    """When each kind of rank computes and waits; below it, thin, what is sent beside."""
    end = max(k.timeline.end for k in kinds) or 1.0
    foot, lines, bars = TOP + len(kinds) * ROW, [], []
    for row, k in enumerate(kinds):
        y = row * ROW
        lines.append(text(LEFT - 8, TOP + y + 18, names_of(k.ranks), _END))
        for lane, phase, start, stop, names in _merged(k.timeline.spans, end * _FINE):
            beside = lane == "communication"
            colour = _PHASES[phase] if lane == "compute" else _LANES[lane]
            said = f"{names}, {phase}: {seconds(start)} to {seconds(stop)}"
            x, width = start / end * INNER, (stop - start) / end * INNER
            top, high = (y + 22, 6) if beside else (y, 20)
            bars.append(_bar(x, top, width, high, colour, said))
    height = foot - TOP
    frame = (
        f'<svg class="bars" x="{LEFT}" y="{TOP}" width="{INNER}" height="{height}" '
        f'viewBox="0 0 {INNER} {height}" preserveAspectRatio="none">'
    )
    title = f"time line: {seconds(end)}; ranks of one kind do the same"
    legend = _legend([*_PHASES.items(), *_LANES.items()], TOP)
    return _svg(
        title,
        max(foot, TOP + 6 * 20) + 40,
        [*lines, frame, *bars, "</svg>", *_ticks(end, foot), *legend],
    )


def _merged(spans: Iterable[Span], gap: float) -> list[tuple[str, str, float, float, str]]:
    """(lane, phase, start, end, what) of spans of one lane and phase that touch."""
    out: list[tuple[str, str, float, float, str]] = []
    last: dict[bool, int] = {}
    for s in sorted(spans, key=lambda s: s.start):
        beside = s.lane == "communication"
        i = last.get(beside)
        if i is not None:
            lane, phase, start, end, _ = out[i]
            if (lane, phase) == (s.lane, s.phase) and s.start - end <= gap:
                out[i] = lane, phase, start, max(end, s.end), lane
                continue
        last[beside] = len(out)
        out.append((s.lane, s.phase, s.start, s.end, f"{s.lane}: {s.name}"))
    return [o for o in out if o[3] > o[2]]


def _svg(title: str, height: float, lines: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {WIDTH} {height:g}" font-family="sans-serif" font-size="12">'
    )
    ground = f'<rect width="{WIDTH}" height="{height:g}" fill="#fff"/>'
    return "\n".join([head, ground, text(LEFT, 24, title, ' font-size="15"'), *lines, "</svg>", ""])


def _corners(heights: dict[int, float]) -> list[str]:
    """Points of the curve, without those that lie between two of one height."""
    return [
        f"{LEFT + x},{TOP + HEIGHT - y:.1f}"
        for x, y in heights.items()
        if not heights.get(x - 1) == y == heights.get(x + 1)
    ]


def _bar(x: float, y: float, width: float, height: float, colour: str, said: str) -> str:
    return (
        f'<rect x="{x:.3f}" y="{y:g}" width="{width:.3f}" height="{height:g}" fill="{colour}">'
        f"<title>{escape(said)}</title></rect>"
    )


def _legend(entries: Iterable[tuple[str, str]], y: float) -> list[str]:
    lines = []
    for i, (name, colour) in enumerate(entries):
        at = y + 20 * i
        lines.append(_bar(LEFT + INNER + 14, at, 12, 12, colour, name))
        lines.append(text(LEFT + INNER + 31, at + 10, name))
    return lines


def _ticks(end: float, y: float) -> list[str]:
    """A time axis at ``y``."""
    size, unit = scale(end, "s")
    lines = []
    for mark in marks(end / size):
        x = LEFT + mark * size / end * INNER
        lines.append(f'<path d="M{x:.2f} {y}v5" stroke="#000"/>')
        lines.append(text(x, y + 18, f"{mark:g}", _MIDDLE + ' class="tick"'))
    return [*lines, text(LEFT + INNER, y + 34, f"time, {unit}", _END)]


def _unit(nbytes: float) -> tuple[int, str]:
    power = min(int(nbytes).bit_length() // 10, 4) if nbytes >= 1024 else 0
    return 1 << 10 * power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
