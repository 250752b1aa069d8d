"""The time lines of kinds in the format of Chrome's tracing, which Perfetto opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disttensor.simulate.transfers import Row

_LANES = ("compute", "communication", "wait for ranks", "wait for a stage")


def trace(rows: Sequence[tuple[str, int, Row]]) -> dict[str, Any]:
    """(name, number of the process, its time line) of each kind, as what JSON is made of."""
    events: list[dict[str, Any]] = []
    for name, number, row in rows:
        meta = {"ph": "M", "pid": number}
        events.append({**meta, "name": "process_name", "args": {"name": name}})
        for lane, text in enumerate(_LANES):
            events.append({**meta, "name": "thread_name", "tid": lane, "args": {"name": text}})
        events += [
            {
                "ph": "X", "name": s.name, "cat": s.phase, "pid": number,
                "tid": _LANES.index(s.lane), "ts": s.start * 1e6, "dur": (s.end - s.start) * 1e6,
                "args": {"where": s.where},
            }
            for s in row.spans
        ]  # fmt: skip
    return {"traceEvents": events}
