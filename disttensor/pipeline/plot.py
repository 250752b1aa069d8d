"""Draws a timeline: a row per rank, a colour each for forwards, backwards and waits."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from disttensor.checks import check_type
from disttensor.drawing.svg import WIDTH, colour, scale, write_svg
from disttensor.drawing.time_line import Bar, time_line
from disttensor.pipeline.schedule import Schedule
from disttensor.pipeline.timeline import Timeline

_LEFT, _RIGHT, _BAR = 70, WIDTH - 20, 28  # pixels
_GREY = "#d9d9d9"
_HUES = {"F": (0.59, 0.55), "B": (0.07, 0.85), "I": (0.07, 0.85), "W": (0.36, 0.4)}
_NOTE = (
    "blue: forward, orange: backward{}, lighter: later chunks, grey: waiting for a peer; "
    "number: micro-batch"
)
_SPLIT = " (of inputs; green: of weights)"


def plot(what: Timeline | Schedule, path: str | PathLike[str], title: str | None = None) -> Path:
    """Draws a recorded Timeline, or a Schedule in its ticks, to ``path``, an .svg.

    >>> pipeline.plot(pipeline.one_f_one_b(4, 8), "1f1b.svg", title="1f1b").name
    '1f1b.svg'

    Raises ValueError for another suffix and for a timeline without events.
    """
    check_type("plot: what", what, (Timeline, Schedule), "a Timeline or a Schedule")
    check_type("plot: path", path, (str, PathLike), "a path")
    check_type("plot: title", title, (str, type(None)), "a text")
    timeline = Timeline.of(what) if isinstance(what, Schedule) else what
    if not timeline.span:
        raise ValueError(f"plot: {timeline!r} has nothing that takes time")
    bubble = f"bubble {100 * timeline.bubble:.1f} %"
    is_split = any(event.kind == "W" for event in timeline.events)
    svg = time_line(
        f"{title}: {bubble}" if title else bubble,
        [(f"rank {rank}", _bars(timeline, rank)) for rank in timeline.ranks],
        timeline.span, timeline.unit, _LEFT, _RIGHT, _BAR,
        note=_NOTE.format(_SPLIT if is_split else ""), stroke=' stroke="#fff" stroke-width="0.5"',
    )  # fmt: skip
    return write_svg("plot", svg, path)


def _bars(timeline: Timeline, rank: int) -> Iterator[Bar]:
    size, unit = scale(timeline.span, timeline.unit)
    chunks = 1 + max(event.chunk for event in timeline.events)
    for event, start, end in [*timeline.waits(rank), *timeline.pieces(rank)]:
        at, until = start - timeline.start, end - timeline.start
        fill, ink = _colours(event.kind, event.chunk, chunks)
        tip = f"{event.action} on rank {rank}: {at / size:.4g} to {until / size:.4g} {unit}"
        label = "" if event.kind == "wait" else str(event.micro_batch)
        yield Bar(at, until, fill, tip, label, ink)


def _colours(kind: str, chunk: int, chunks: int) -> tuple[str, str]:
    """Returns the colours of a bar and of its label. Later chunks are lighter."""
    if kind == "wait":
        return _GREY, _GREY
    light = 0.42 + 0.36 * chunk / max(chunks - 1, 1)
    hue, full = _HUES[kind]
    return colour(hue, light, full), "#fff" if light < 0.6 else "#000"
