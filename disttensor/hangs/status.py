"""Finds out where the main thread of this rank is, and whether it has stood still."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from disttensor.errors import headline
from disttensor.hangs.flight import StartedCollective, collectives
from disttensor.launching.script import is_library

_TORCH = os.sep.join(("", "torch", ""))
WAITS = "waits for other ranks"
# Folders of code that waits for other ranks, and of code that waits for data.
_WAITS = (f"{_TORCH}distributed{os.sep}", f"disttensor{os.sep}comm{os.sep}")
_LOADS = (f"{_TORCH}utils{os.sep}data{os.sep}", f"disttensor{os.sep}data{os.sep}")
_PEERS = {"send": "dst", "recv": "src"}  # blocking messages, and the argument that names the peer
_BUSY = 0.02  # share of the time that a thread which stands still may compute
_SWITCHES = 4.0  # times per second that a thread which stands still may wake up


class Status(NamedTuple):
    """The post of a rank.

    line, call  of the user's program, and the call that runs there
    inner       the function in which it runs, if that is in a library
    doing       "waits for other ranks", "waits for data", "sleeps", "computes" or "stands still"
    seconds     for which it has stood still
    peer        the rank that a message is from or for, or -1
    error       the exception that it handles, or ""
    """

    rank: int
    line: str
    call: str
    inner: str
    doing: str
    seconds: float
    peer: int
    error: str
    collectives: list[StartedCollective]

    def pending(self) -> StartedCollective | None:
        """Returns the oldest collective that has not ended."""
        return next((c for c in self.collectives if not c.is_done), None)

    def last(self, group: str) -> StartedCollective | None:
        """Returns the last collective that this rank has started in a group."""
        return next((c for c in reversed(self.collectives) if c.group == group), None)

    def waits(self) -> bool:
        return self.doing == WAITS


class MainThread:
    """The main thread, looked at from another one. ``since``: when it began to stand still."""

    def __init__(self) -> None:
        self.ident, self.id = threading.main_thread().ident, threading.main_thread().native_id
        self.place: Any = None
        self.before = (0.0, 0.0, 0)  # time, seconds of CPU, times that it woke up
        self.since = time.monotonic()

    def look(self) -> float:
        """Returns the seconds for which the thread has stood still: at one line, without computing,
        and seldom awake (a wait with a time limit wakes up)."""
        now, (_, users) = time.monotonic(), _split(self.frame())
        place = None if users is None else (users.f_code.co_filename, users.f_lineno)
        before, cpu, switches = self.before
        used, woken, is_ready = self._counts()
        self.before = now, used, woken
        passed = max(now - before, 1e-3)
        still = (
            not is_ready
            and used - cpu <= _BUSY * passed
            and woken - switches <= _SWITCHES * max(passed, 0.5)
        )
        if not still or place != self.place:
            self.since = now
        self.place = place
        return now - self.since

    def frame(self) -> Any:
        return sys._current_frames().get(self.ident or 0)

    def _counts(self) -> tuple[float, int, bool]:
        """Returns seconds of CPU, how often the thread has slept, and whether it could run now."""
        used, woken, is_ready = 0.0, 0, False
        with suppress(OSError, AttributeError, TypeError):
            used = time.clock_gettime(time.pthread_getcpuclockid(self.ident))  # type: ignore[arg-type]
            task = Path(f"/proc/self/task/{self.id}")
            is_ready = task.joinpath("stat").read_text().rsplit(")", 1)[1].split()[0] == "R"
            counts = task.joinpath("status").read_text().rpartition("\nvoluntary_ctxt_switches:")
            woken = int(counts[2].split()[0])
        return used, woken, is_ready

    def status(self, rank: int) -> Status:
        seconds, (called, users), found = self.look(), _split(self.frame()), collectives()
        line, inner = "", ""
        if users is not None:
            line = f"{users.f_code.co_filename}:{users.f_lineno}"
        if called:
            code = called[0].f_code
            at = f"{os.path.basename(code.co_filename)}:{called[0].f_lineno}"
            inner = f"{code.co_qualname}, {at}"
        doing = _doing(called, _call(called[0] if called else users))
        if doing == "computes" and seconds > 1:
            pending = any(not c.is_done for c in found)  # in C++, as DDP does
            doing = WAITS if pending else "stands still"
        return Status(
            rank, line, _call(users), inner, doing, round(seconds, 1), _peer(called),
            _handled(self.ident or 0), found,
        )  # fmt: skip


def _split(frame: Any) -> tuple[list[Any], Any]:
    """Returns the frames of libraries on top of a stack, innermost first, and the frame of the
    user's program that has called them, or None."""
    called = []
    while frame is not None and is_library(frame.f_code.co_filename):
        called.append(frame)
        frame = frame.f_back
    return called, frame


def _call(frame: Any) -> str:
    """Returns the source text of the call that a frame runs."""
    if frame is None:
        return ""
    at = frame.f_lasti // 2
    first, last, begin, end = next(islice(frame.f_code.co_positions(), at, None))
    if first is None or last is None or begin is None or end is None:
        return ""
    lines = [linecache.getline(frame.f_code.co_filename, n) for n in range(first, last + 1)]
    if not all(lines):
        return ""
    lines[-1] = lines[-1].encode()[:end].decode(errors="ignore")
    lines[0] = lines[0].encode()[begin:].decode(errors="ignore")
    text = " ".join("".join(lines).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _doing(called: list[Any], call: str) -> str:
    """Returns what a thread does, by the frames of libraries in which it is and its innermost
    call."""
    files = [frame.f_code.co_filename for frame in called]
    if any(part in file for file in files for part in _LOADS):
        return "waits for data"
    if any(part in file for file in files for part in _WAITS) or ".wait(" in call:
        return WAITS
    return "sleeps" if "sleep(" in call else "computes"


def _peer(called: list[Any]) -> int:
    """Returns the rank that a blocking message of torch.distributed is from or for, or -1."""
    for frame in called:
        name = _PEERS.get(frame.f_code.co_name)
        if name is not None and frame.f_code.co_filename.endswith("distributed_c10d.py"):
            peer = frame.f_locals.get(name)
            return peer if isinstance(peer, int) else -1
    return -1


def _handled(thread: int) -> str:
    """Returns the exception that a thread handles, or ""."""
    found: Any = sys._current_exceptions().get(thread)
    error = found[1] if isinstance(found, tuple) else found
    return "" if error is None else headline(error)[:200]
