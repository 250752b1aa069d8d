"""Adds to an error of a failed collective or message which rank failed first, or where the others
are.

A waiting rank sees only that a neighbour is gone, and the neighbour may have waited itself. So the
first failing rank posts its error to the store of the process group. A killed rank posts nothing;
the first rank that misses it posts its number. If all ranks live, each reports the line that its
program has reached.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
import traceback
from types import TracebackType
from typing import Any

from disttensor import callbacks
from disttensor.comm import watcher
from disttensor.comm.process_group import is_fake, world
from disttensor.runtime import Runtime, current_runtime, last_runtime

_PATIENCE = 4.0  # seconds for a failing rank to post its error, and for others to answer
_SHOWN = 16  # ranks whose source line an error shows
_before: Any = None  # the previous hook, which ours calls last


def watch() -> Runtime:
    """Posts uncaught errors of this process to the other ranks, and reads theirs, from now on.
    Cheap after the first call. Returns the Runtime of the current world."""
    global _before
    now = current_runtime()
    if now.watcher is None:
        watcher.of(now)
    if _before is None:
        _before, sys.excepthook = sys.excepthook, _hook
    return now


def unwatch() -> None:
    """Undoes ``watch``, unless another hook has been installed since."""
    global _before
    if sys.excepthook is _hook:
        sys.excepthook, _before = _before, None


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, Exception):
        with contextlib.suppress(Exception):  # the error itself is shown in any case
            line = traceback.extract_tb(trace)[-1] if trace is not None else None
            where = f" ({line.filename}:{line.lineno})" if line is not None else ""
            text = str(error).splitlines()
            words = f"{kind.__name__}: {text[0] if text else ''}"[:400]
            post(f"rank {world()[0]} failed first: {words}{where}")
    (_before or sys.__excepthook__)(kind, error, trace)


def post(what: str) -> str:
    """Posts an error for all ranks unless there is one already. Returns the first error posted."""
    beside = watcher.of(current_runtime())
    if beside is None or beside.lost:
        return what
    if not beside.failed:
        _hear_failed(beside, beside.store.compare_set("failed", "", what).decode())
    return beside.failed


def _all_ended(beside: watcher.Watcher) -> bool:
    """Waits until all other ranks have ended, at most two seconds. Returns True if they have."""
    end = time.monotonic() + 2.0
    while beside.store.add("ended", 0) < beside.size - 1:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def first() -> str:
    """Returns a sentence: which rank failed first, or where each rank is if all live."""
    beside = watcher.of(current_runtime())
    if beside is None:
        alone = world()[1] == 1 or is_fake() or watcher.store_answers()
        return "" if alone else f" {_LOST}."
    if beside.lost or beside.failed:
        return f" {beside.failed or _LOST}."
    end, gone = time.monotonic() + _PATIENCE, None
    try:
        while gone is None and not beside.store.check(["failed"]):
            if time.monotonic() > end:
                return _places(beside)
            time.sleep(0.1)
            gone = beside.gone(_PATIENCE)
        if gone is None:
            _hear_failed(beside, beside.store.get("failed").decode())
            return f" {beside.failed}."
        how = "is gone without a word: killed, or ended by os._exit, or by gloo (which does that "
        how += "where two ranks send different sizes; DISTTENSOR_DEBUG=1 compares them first)"
        if beside.store.check([f"left/{gone}"]):
            how = "has ended its program before the others"
        return f" {post(f'rank {gone} {how}')}."
    except Exception:
        beside.lost = True
        return f" {beside.failed or _LOST}."


_LOST = "The store of the world is gone, with rank 0 if that keeps it, or with the launcher"


def _hear_failed(beside: watcher.Watcher, what: str) -> bool:
    beside.failed = what
    beside.store.set(f"heard/{beside.rank}", "")
    return True


def _places(beside: watcher.Watcher) -> str:
    """Returns where each rank is, when all live: they wait for each other, or for a slow rank.
    Ranks that have never communicated are listed separately, since they may have ended."""
    unseen = post_unseen(beside)
    seen = [r for r in range(beside.size) if r not in unseen]
    who = beside.failed if unseen else "All ranks live"
    beside.store.set("asked", "")
    said = beside.said("place", seen[:_SHOWN], _PATIENCE)
    lines = [f"\n  rank {rank}: {place}" for rank, place in said.items()]
    return f" {who}. Where {'the others' if unseen else 'they'} are:" + "".join(lines) + "\n "


def post_unseen(beside: watcher.Watcher) -> list[int]:
    """Posts and returns the ranks that have never started a watcher."""
    unseen = [r for r in range(beside.size) if not beside.store.check([f"process/{r}"])]
    if unseen:
        post(f"ranks {unseen} ended before they made a mesh, or have not come so far")
    return unseen


def _say_place(beside: watcher.Watcher, asked: str) -> bool:
    steps = current_runtime().steps
    done = f"after {steps.count} optimizer steps, " if steps is not None else ""
    beside.store.set(f"place/{beside.rank}", f"{done}{beside.place()}")
    return True


callbacks.on_report["failed"] = _hear_failed
callbacks.on_report["asked"] = _say_place


@atexit.register
def _leave() -> None:
    """Records that this rank ends. The rank that keeps the store waits for the others."""
    beside = last_runtime().watcher
    if beside:
        with contextlib.suppress(Exception):
            if beside.lost:  # the store is gone
                return
            if not beside.failed:
                beside.store.set(f"left/{beside.rank}", "")
                if not beside.keeps_store:
                    beside.store.add("ended", 1)
                elif not hasattr(sys, "last_value") and not _all_ended(beside):
                    post(f"rank {beside.rank} has ended its program before the others")
            if beside.failed:
                if beside.keeps_store:  # the store, and the error in it, end with this rank
                    beside.said("heard", range(beside.size), _PATIENCE)
                return
        beside.stop()
