"""A thread beside the program: posts to the store that this rank lives, reads the posts of other
ranks, and answers for a program that waits.

The thread has its own connection to the store, used once a second and for posts of the program. The
program never waits for a heartbeat, so a slow rank raises no alarm.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from disttensor import callbacks
from disttensor.comm.process_group import attempt, is_fake, keeps_store, world
from disttensor.errors import user_line
from disttensor.runtime import Runtime
from disttensor.torch_private import default_store

PERIOD = 1.0  # seconds


class Watcher:
    """The watcher of one world. ``store``: usable from any thread that does not block in it."""

    def __init__(self, now: Runtime) -> None:
        self.rank, self.size = world()
        self.world, self.program = id(now.default), threading.get_ident()
        self.keeps_store, self.kept = keeps_store(), default_store()
        self.store = _own_connection(self.kept, now.number)
        self.jobs: queue.SimpleQueue[tuple[Callable[[Any], None], threading.Event]] = (
            queue.SimpleQueue()
        )
        self.known: set[str] = set()
        self.lost = False  # the store can no longer be reached
        self.failed = ""  # the first error, as text: disttensor.comm.failures
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self.store.set(f"process/{self.rank}", _process())
        self.thread.start()

    def ask(self, job: Callable[[Any], None]) -> threading.Event:
        """Runs ``job(store)`` in the thread soon. Returns an Event that is set afterwards."""
        ended = threading.Event()
        if self.stopped.is_set():
            ended.set()
        else:
            self.jobs.put((job, ended))
        return ended

    def stop(self) -> None:
        if not self.stopped.is_set():
            self.stopped.set()
            self.jobs.put((lambda store: None, threading.Event()))
            self.thread.join(PERIOD)

    def _run(self) -> None:
        due = 0.0
        try:
            while not self.stopped.is_set() and id(dist.group.WORLD) == self.world:
                if time.monotonic() >= due:
                    self._beat()
                    due = time.monotonic() + PERIOD
                try:
                    job, ended = self.jobs.get(timeout=PERIOD)
                except queue.Empty:
                    continue
                try:
                    job(self.store)
                    self._hear()
                finally:
                    ended.set()
        except Exception:  # the rank or launcher that kept the store is gone
            self.lost = True
        self.stopped.set()
        while not self.jobs.empty():
            self.jobs.get()[1].set()

    def _beat(self) -> None:
        self.store.add(f"beat/{self.rank}", 1)
        self._hear()
        for fn in callbacks.on_heartbeat:
            fn(self)

    def _hear(self) -> None:
        for key, fn in callbacks.on_report.items():
            known = key in self.known or not self.store.check([key])
            if not known and fn(self, self.store.get(key).decode()):
                self.known.add(key)

    # State of the other ranks ---------------------------------------------------------------------

    def gone(self, seconds: float, ranks: Sequence[int] = ()) -> int | None:
        """Returns a rank (of ``ranks``) whose process has ended; None: all live. Processes on this
        machine are looked up; on others a rank is gone if it has no heartbeat for ``seconds``."""
        asked = ranks or range(self.size)
        everyone = [r for r in asked if self.store.check([f"process/{r}"])]
        elsewhere = {}
        for r in everyone:
            machine, pid = self.store.get(f"process/{r}").decode().rsplit(" ", 1)
            if machine != _machine():
                elsewhere[r] = self.store.add(f"beat/{r}", 0)
            elif not _runs(int(pid)):
                return r
        if elsewhere:
            time.sleep(seconds)
        still = (r for r, beats in elsewhere.items() if self.store.add(f"beat/{r}", 0) == beats)
        return next(still, None)

    def said(self, what: str, ranks: Iterable[int], seconds: float) -> dict[int, str]:
        """Returns the texts that these ranks have posted under ``what``. Waits at most ``seconds``
        for all, then leaves out the missing ones."""
        keys = {rank: f"{what}/{rank}" for rank in ranks}
        end = time.monotonic() + seconds
        while not self.store.check([*keys.values()]) and time.monotonic() < end:
            time.sleep(0.05)
        there = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {rank: self.store.get(key).decode() for rank, key in there.items()}

    def place(self) -> str:
        """Returns the line that the program of this rank has reached."""
        return user_line(sys._current_frames().get(self.program))


def of(now: Runtime) -> Watcher | None:
    """Returns the watcher of this world, started if needed; None without other ranks or a store."""
    if now.watcher is None and now.default is not None:
        now.watcher = False
        if world()[1] > 1 and not is_fake() and store_answers():
            with contextlib.suppress(RuntimeError, AttributeError):  # another type of store
                now.watcher = Watcher(now)
    return now.watcher or None


def store_answers() -> bool:
    """Returns False if the store is gone, with the rank or the launcher that kept it."""
    try:
        default_store().check([""])
    except RuntimeError:
        return False
    return True


def _own_connection(store: Any, number: int) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    limit = timedelta(seconds=10)
    own = dist.TCPStore(
        store.host, store.port, is_master=False, timeout=limit, wait_for_workers=False
    )
    return dist.PrefixStore(f"disttensor/{attempt()}/world{number}", own)


def _machine() -> str:
    """Returns a name that is equal for processes which can look up each other's process ids."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # a name for this process only


def _process() -> str:
    return f"{_machine()} {os.getpid()}"


def _runs(pid: int) -> bool:
    """Returns True if the process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
