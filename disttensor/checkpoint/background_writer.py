"""Saves in the background, of all Checkpointers of this process.

They share one communicator, so they run one after another, in the order in which the program
started them. The order is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

_calling = threading.RLock()
_writing: list[tuple[str, Future[None]]] = []  # the oldest first


@contextlib.contextmanager
def hold_lock() -> Iterator[None]:
    """Lets only one thread at a time call Checkpointers."""
    with _calling:
        yield


def start(folder: str, job: Callable[[], None]) -> Future[None]:
    """Runs ``job``, which writes into ``folder``, in a thread, after all jobs started before."""
    before = [future for _, future in _writing]

    def run() -> None:
        wait_for(before)
        job()

    executor = ThreadPoolExecutor(1, "checkpoint")
    future = executor.submit(run)
    executor.shutdown(wait=False)  # the thread ends after the job
    _writing[:] = [*(each for each in _writing if not each[1].done()), (folder, future)]
    return future


def wait(folder: str) -> None:
    """Waits until no job writes into ``folder``: a new save removes the files of an unfinished
    save, and a finished save removes old checkpoints."""
    wait_for([future for other, future in _writing if other == folder])
