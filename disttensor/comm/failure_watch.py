"""Adds to the error of a failed collective or message which rank failed first, or which line each
rank has reached.

A waiting rank sees only that a neighbour is gone, and the neighbour may have waited itself. So the
first failing rank posts its error to the store of the process group. A killed rank posts nothing;
the first rank that misses it posts its number. If all ranks live, each reports the line that its
program has reached.

A watcher thread posts to the store that this rank lives, reads the posts of other ranks, and posts
the line of a program that waits. It has its own connection to the store, used once a second and for
posts of the program. The program never waits for a heartbeat, so a slow rank raises no alarm.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from disttensor import callbacks
from disttensor.comm.process_group import (
    LOST,
    is_fake,
    keeps_store,
    read_key,
    wait_until,
    world,
    world_name,
)
from disttensor.comm.reports import LEFT, PATIENCE, PROCESS, Reports, Topic, address_of
from disttensor.errors import CommError, headline, user_line
from disttensor.runtime import Runtime, current_runtime, last_runtime
from disttensor.torch_private import default_group, default_store

PERIOD = 1.0  # seconds
_SHOWN = 16  # ranks whose source line an error shows
_PLACE: Topic[str] = Topic("place")  # the line that the program has reached
_RECEIVED: Topic[str] = Topic("received")  # the rank has read the first failure
_before: Any = None  # the previous hook, which ours calls last


class Watcher(Reports):
    """The watcher of one world."""

    def __init__(self, now: Runtime) -> None:
        self.kept = default_store()
        super().__init__(*address_of(self.kept), f"disttensor/{world_name()}", *world())
        self.runtime, self.program = weakref.ref(now), threading.get_ident()
        self.keeps_store, self.store_lasts = keeps_store(), now.store_lasts
        self.jobs: queue.SimpleQueue[tuple[Callable[[Any], None], threading.Event]] = (
            queue.SimpleQueue()
        )
        self.received: set[str] = set()  # keys of reports
        self.lost = False  # the store can no longer be reached
        self.failed = ""  # the first error, as text
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self.thread.start()

    def submit(self, job: Callable[[Any], None]) -> threading.Event:
        """Runs ``job(store)`` in the thread soon. Returns an Event that is set afterwards."""
        ended = threading.Event()
        if not self.stopped.is_set():
            self.jobs.put((job, ended))
        if self.stopped.is_set():  # perhaps since then: the thread may not see the job
            ended.set()
        return ended

    def has_world(self) -> bool:
        """Returns False after the end of the world. A simulated world may have its place."""
        now = self.runtime()
        group = None if now is None else now.default
        return now is not None and group is not None and (now.is_aside or group is default_group())

    def stop(self) -> None:
        if not self.stopped.is_set():
            self.stopped.set()
            self.jobs.put((lambda store: None, threading.Event()))
            if threading.current_thread() is not self.thread:
                self.thread.join(PERIOD)

    def end(self) -> None:
        """Ends with the world. A store that ends with it too is released at once; in a store that
        lasts, this rank records at its exit that it has left."""
        if self.store_lasts:
            last_runtime().watcher = self
            return
        self.stop()
        self.kept = None

    def _run(self) -> None:
        due = 0.0
        try:
            while not self.stopped.is_set() and self.has_world():
                if self.is_closed():
                    self.lost = True
                    break
                if time.monotonic() >= due:
                    self.beat()
                    self._read_reports()
                    for fn in callbacks.on_heartbeat:
                        fn(self)
                    due = time.monotonic() + PERIOD
                try:
                    job, ended = self.jobs.get(timeout=PERIOD)
                except queue.Empty:
                    continue
                try:
                    job(self.store)
                    self._read_reports()
                finally:
                    ended.set()
        except Exception:  # the rank or launcher that kept the store is gone
            self.lost = True
        self.stopped.set()
        while not self.jobs.empty():
            self.jobs.get()[1].set()

    def _read_reports(self) -> None:
        for key, fn in callbacks.on_report.items():
            report = None if key in self.received else read_key(self.store, key)
            if report is not None and fn(self, report):
                self.received.add(key)


def watcher_of(now: Runtime) -> Watcher | None:
    """Returns the watcher of this world, started if needed; None without other ranks or a store."""
    if now.watcher is None and now.default is not None:
        now.watcher = False
        if world()[1] > 1 and not is_fake() and _store_answers():
            # another type of store, or one that has ended since
            with contextlib.suppress(AttributeError, RuntimeError, OSError):
                now.watcher = Watcher(now)
    return now.watcher or None


def _store_answers() -> bool:
    """Returns False if the store is gone, with the rank or the launcher that kept it."""
    try:
        default_store().check([""])
    except RuntimeError:
        return False
    return True


# The first failure --------------------------------------------------------------------------------


def watch() -> Runtime:
    """Posts uncaught errors of this process to the other ranks, and reads theirs, from now on.
    Cheap after the first call. Returns the Runtime of the current world."""
    global _before
    now = current_runtime()
    if now.watcher is None:
        watcher_of(now)
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
            post(f"rank {world()[0]} failed first: {headline(error)[:400]}{where}")
    (_before or sys.__excepthook__)(kind, error, trace)


def post(failure: str) -> str:
    """Posts an error for all ranks unless there is one already. Returns the first error posted."""
    watcher = watcher_of(current_runtime())
    if watcher is None or watcher.lost:
        return failure
    if not watcher.failed:
        _receive_failure(watcher, watcher.store.compare_set("failed", "", failure).decode())
    return watcher.failed


def post_unseen(watcher: Watcher) -> list[int]:
    """Posts and returns the ranks that have never started a watcher."""
    unseen = [r for r in range(watcher.size) if not PROCESS.has(watcher, r)]
    if unseen:
        post(f"ranks {unseen} ended before they made a mesh, or have not come so far")
    return unseen


def comm_error(text: str, error: Exception) -> CommError:
    """Returns the error of a failed collective or message: ``text``, the first failure of the
    world, and the first line of the backend's ``error``."""
    words = str(error).splitlines()
    return CommError(f"{text}{first_failure()} Backend error: {words[0] if words else error!r}")


def first_failure() -> str:
    """Returns a sentence: which rank failed first, or where each rank is if all live."""
    watcher = watcher_of(current_runtime())
    if watcher is None:
        alone = world()[1] == 1 or is_fake() or _store_answers()
        return "" if alone else f" {LOST}."
    try:
        if not watcher.lost and not watcher.failed and not _find_failure(watcher):
            return _places(watcher)
    except Exception:
        watcher.lost = True
    return f" {watcher.failed or LOST}."


def _find_failure(watcher: Watcher) -> bool:
    """Waits some seconds for the error of a rank, or its end. Returns False if all ranks live."""
    end = time.monotonic() + PATIENCE
    while not watcher.store.check(["failed"]):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
        rank = watcher.failed_rank()
        if rank is not None:
            how = "is gone without a word: killed, or ended by os._exit, or by gloo (which does "
            how += "that where two ranks send different sizes; DISTTENSOR_DEBUG=1 compares them "
            how += "first)"
            if LEFT.has(watcher, rank):
                how = "has ended its program before the others"
            post(f"rank {rank} {how}")
            return True
    return _receive_failure(watcher, watcher.store.get("failed").decode())


def _receive_failure(watcher: Watcher, failure: str) -> bool:
    watcher.failed = failure
    _RECEIVED.post(watcher, "")
    return True


def _places(watcher: Watcher) -> str:
    """Returns where each rank is, when all live: they wait for each other, or for a slow rank.
    Ranks that have never communicated are listed separately, since they may have ended."""
    unseen = post_unseen(watcher)
    seen = [r for r in range(watcher.size) if r not in unseen]
    watcher.store.set("asked", "")
    places = _PLACE.gather(watcher, seen[:_SHOWN], PATIENCE)
    lines = "".join(f"\n  rank {rank}: {place}" for rank, place in places.items())
    if unseen:
        return f" {watcher.failed}. Where the others are:{lines}\n "
    return f" All ranks live. Where they are:{lines}\n "


def _report_place(watcher: Watcher, _: str) -> bool:
    """Posts the line that the program of this rank has reached."""
    steps = current_runtime().steps
    done = f"after {steps.count} optimizer steps, " if steps is not None else ""
    line = user_line(sys._current_frames().get(watcher.program))
    _PLACE.post(watcher, f"{done}{line}")
    return True


callbacks.on_report["failed"] = _receive_failure
callbacks.on_report["asked"] = _report_place


def _forget_watcher() -> None:
    """Removes the watcher in a forked process, which is not a rank: it posts no error or end."""
    last_runtime().watcher = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_watcher)


@atexit.register
def leave() -> None:
    """Records that this rank ends. The rank that keeps the store waits for the others."""
    watcher = last_runtime().watcher
    if watcher:
        with contextlib.suppress(Exception):
            if watcher.lost or watcher.is_closed():  # the store is gone
                return
            if not watcher.failed:
                LEFT.post(watcher, "")
                others = watcher.size - 1
                if not watcher.keeps_store:
                    watcher.store.add("ended", 1)
                elif not hasattr(sys, "last_value") and not wait_until(
                    lambda: watcher.store.add("ended", 0) >= others, 2.0
                ):
                    post(f"rank {watcher.rank} has ended its program before the others")
            if watcher.failed:
                if watcher.keeps_store:  # the store, and the error in it, end with this rank
                    _RECEIVED.gather(watcher, range(watcher.size), PATIENCE)
                return
        watcher.stop()
