"""The life of a rank that is a child process: it joins, and reports its result or its error."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import signal
import socket
import sys
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from disttensor.comm import failure_watch, send_queue
from disttensor.errors import CommError, headline
from disttensor.launching.script import (
    end_with_parent,
    format_error,
    join_threads,
    leave,
    users_part,
)
from disttensor.runtime import current_runtime
from disttensor.torch_private import process_groups

# Process groups of worlds that were left. A fork keeps them: it does not have their threads, for
# which their destructors would wait.
LEFT_GROUPS: weakref.WeakSet[Any] = weakref.WeakSet()
ENDS = frozenset((signal.SIGINT, signal.SIGTERM))  # blocked from a fork to ``become_rank``

# A line with its end. A progress bar ends each of its lines by a carriage return.
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)")


class LinePrefixer(io.TextIOBase):
    """Writes whole lines, with a prefix, to another stream: lines of several ranks do not mix."""

    def __init__(self, stream: Any, prefix: str = "") -> None:
        self.stream, self.prefix = stream, prefix
        self._parts: list[str] = []  # of the line that has not ended

    @property
    def rest(self) -> str:
        """The line that has not ended."""
        return "".join(self._parts)

    def fileno(self) -> int:
        return int(self.stream.fileno())

    def write(self, text: str) -> int:
        if "\n" in text or "\r" in text or self._parts[-1:] == ["\r"]:
            whole = self.rest + text
            known = len(whole) - whole.endswith("\r")  # "\n" may follow
            end = 1 + max(whole.rfind(mark, 0, known) for mark in "\r\n")
            self._write(_LINE.findall(whole[:end]))
            self._parts = [whole[end:known], whole[known:]]
        else:
            self._parts.append(text)
        return len(text)

    def finish(self) -> None:
        """Writes the line that has not ended, at the end of the rank."""
        if self.rest:
            self._write([f"{self.rest}\n"])
        self._parts = []

    def _write(self, lines: list[str]) -> None:
        if lines:
            self.stream.write("".join(f"{self.prefix}{line}" for line in lines))
            self.stream.flush()


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Returns the environment of a rank, as torchrun sets it."""
    values = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):  # so gloo does not look up the name of the host
            values["GLOO_SOCKET_IFNAME"] = name
    return values


def become_rank(rank: int, size: int, parent: int, connection: Connection) -> None:
    """Makes this new process a rank. The parent handles Ctrl-C, and ends its ranks then."""
    end_with_parent(parent)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
    vars(sys).pop("last_value", None)  # an earlier error of the parent
    torch.set_num_threads(1)  # the threads of OpenMP do not survive a fork
    if not isinstance(sys.stdout, io.TextIOWrapper):  # in a notebook, which shows each write
        sys.stdout, sys.stderr = LinePrefixer(sys.stdout), LinePrefixer(sys.stderr)
    os.environ.update(environment(rank, size, connection.recv()))


def leave_world() -> None:
    """Leaves the world as at the end of a program: sent messages are delivered, and the other ranks
    learn that this one has ended."""
    if dist.is_initialized():
        send_queue.leave()
        failure_watch.leave()
        LEFT_GROUPS.update(process_groups())
        current_runtime().groups.clear()
        dist.destroy_process_group()
        current_runtime()


def end_rank(
    connection: Connection, error: BaseException | None, result: object = None,
    trace: TracebackType | None = None,
) -> NoReturn:  # fmt: skip
    """Reports the result or the error of this rank to the parent, and ends the process."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        error = None
    try:
        if error is None:
            try:
                join_threads()
                leave_world()
                report: tuple[str, Any] = "result", _pickled(result)
            except Exception as late:
                error = late
        if error is not None:
            trace = users_part(trace or error.__traceback__, __file__)
            text = format_error(error, trace)
            kind = "symptom" if isinstance(error, CommError) else "cause"
            report = kind, f"{headline(error)}\n\n{text}"
        for stream in (sys.stdout, sys.stderr):  # the parent ends this process after the report
            if isinstance(stream, LinePrefixer):
                stream.finish()
            with contextlib.suppress(Exception):  # closed, or without a reader
                stream.flush()
        connection.send(report)
    finally:
        leave(0)


def _pickled(result: object) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"the result, of type {type(result).__name__}, cannot be sent to the parent: {error}. "
            "Return numbers, texts, regular tensors, or containers of these"
        ) from None


def run_rank(
    rank: int, size: int, parent: int, connection: Connection, fn: Callable[..., Any], args: Any
) -> NoReturn:
    """Runs ``fn(*args)`` as a rank."""
    error, result = None, None
    try:
        become_rank(rank, size, parent, connection)
        result = fn(*args)
    except BaseException as caught:
        error = caught
    end_rank(connection, error, result)
