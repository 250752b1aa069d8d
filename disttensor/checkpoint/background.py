"""Saves in the background, of all Checkpointers of this process.

They share one communicator, so they run one after another, in the order in which the program
started them. The order is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_calling = threading.RLock()
_writing: list[tuple[Path, threading.Thread]] = []  # the oldest first


@contextlib.contextmanager
def hold_lock() -> Iterator[None]:
    """Lets only one thread at a time call Checkpointers."""
    with _calling:
        yield


def start(folder: Path, job: Callable[[], None]) -> threading.Thread:
    """Runs ``job``, which writes into ``folder``, in a thread, after all jobs started before."""
    before = _writing[-1][1] if _writing else None

    def run() -> None:
        if before is not None:
            before.join()
        job()

    thread = threading.Thread(target=run, name="checkpoint")
    _writing[:] = [*(each for each in _writing if each[1].is_alive()), (folder.resolve(), thread)]
    thread.start()
    return thread


def wait(folder: Path) -> None:
    """Waits until no job writes into ``folder``: a new save removes the files of an unfinished
    save, and a finished save removes old checkpoints."""
    for other, thread in list(_writing):
        if other == folder.resolve():
            thread.join()
