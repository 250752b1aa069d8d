"""Traces for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

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
