"""Keeps sent messages until they are delivered.

gloo reads a message from the sender's memory when the receiver posts its receive, which may be much
later. Until then it needs the buffer *and* the Work, and the Work's ``is_completed`` does not
report delivery. So a separate thread waits for the Works in order, and then drops both. It wakes
for many messages at a time: a wake for each message would slow down the program.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from typing import Any

import torch

from disttensor.comm import failure_watch
from disttensor.comm.process_group import is_fake, world
from disttensor.errors import CommError
from disttensor.runtime import Runtime, current_runtime

LINGER = 0.05  # seconds in which the thread collects messages
EXIT_SECONDS = 60.0  # how long a process at its end waits for undelivered messages

_Entry = tuple[Any, torch.Tensor, Any, Runtime]


class SendQueue:
    """Works and buffers of messages under way."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed, self.hurry = (threading.Condition(self.lock) for _ in range(2))
        self.open: deque[_Entry] = deque()  # not delivered; the thread waits for the first
        self.used = False
        self.hurried = 0  # callers that wait for delivery

    def put(self, work: Any, buffer: torch.Tensor, description: object) -> None:
        """Keeps a Work and its buffer until delivery. ``description``: of the message in errors;
        formatted only then. Does nothing in a fake process group."""
        if is_fake():
            return
        with self.lock:
            if not self.used:
                self.used = True
                threading.Thread(target=self._deliver, name="p2p send queue", daemon=True).start()
            self.open.append((work, buffer, description, current_runtime()))
            self.changed.notify_all()

    def _deliver(self) -> None:
        while True:
            with self.lock:
                self.changed.wait_for(lambda: self.open)
                self.hurry.wait_for(lambda: self.hurried, LINGER)
            for _ in range(len(self.open)):
                _wait_for(*self.open[0])
                with self.lock:
                    self.open.popleft()
                    self.changed.notify_all()

    def held(self) -> list[Any]:
        """Returns the descriptions of messages that may be undelivered."""
        with self.lock:
            return [description for _, _, description, _ in self.open]

    def flush(self, seconds: float | None) -> bool:
        """Waits until all messages are delivered. Returns False if some are not in time."""
        with self.lock:
            self.hurried += 1
            self.hurry.notify_all()
            try:
                return self.changed.wait_for(lambda: not self.open, seconds)
            finally:
                self.hurried -= 1


def _wait_for(work: Any, buffer: torch.Tensor, description: object, sender: Runtime) -> None:
    try:
        if buffer.is_cuda:
            while not work.is_completed():  # a wait would block a stream
                time.sleep(1e-3)
        else:
            work.wait()
    except RuntimeError as error:
        sender.undelivered = sender.undelivered or failed(description, error)


QUEUE = SendQueue()


def failed(description: object, error: Exception) -> CommError:
    return failure_watch.comm_error(
        f"{description}. This failed: the other rank is gone, or did not come here within the time "
        "limit of the process group; look for the first error among the ranks.", error
    )  # fmt: skip


def check_delivered() -> None:
    """Raises the error of an earlier message of this world that failed."""
    error = current_runtime().undelivered
    if error is not None:
        raise error


def flush(seconds: float | None = None) -> None:
    """Waits until all messages of this rank are delivered. Raises CommError if one is not."""
    if not QUEUE.flush(seconds):
        raise CommError(
            f"rank {world()[0]}: {len(QUEUE.open)} messages were not taken within {seconds} s by "
            "the ranks that they were sent to"
        )
    check_delivered()


def _reset_after_fork() -> None:
    """Starts anew in a forked process, which has no thread that delivers."""
    global QUEUE
    QUEUE = SendQueue()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


@atexit.register
def leave() -> None:
    """Waits at exit for undelivered messages; after an error, for two seconds only."""
    if QUEUE.used:
        QUEUE.flush(2.0 if hasattr(sys, "last_value") else EXIT_SECONDS)
        time.sleep(0.1)  # as in groups.py: gloo's threads release the tensors
