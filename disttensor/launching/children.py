"""The ranks that a process has started: forked or spawned, asked for reports, and ended."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from disttensor.comm.process_group import open_store
from disttensor.errors import RankError
from disttensor.launching.rank import ENDS, LEFT_GROUPS
from disttensor.runtime import current_runtime

GRACE = 6.0  # seconds after a symptom in which its cause may be reported


class Forked:
    """A fork of this process, with the part of multiprocessing.Process that is used here.

    pid: 0 in the fork.
    """

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):  # or both processes write what is in the buffers
            stream.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: threads are running
            self.pid = os.fork()
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # other code has already waited for this process
                pid, status = self.pid, 0
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def kill(self) -> None:
        if self.exitcode is None:
            os.kill(self.pid, signal.SIGKILL)

    def join(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self.exitcode is None and time.monotonic() < end:
            time.sleep(0.005)


class Children:
    """The ranks of a world of ``size`` that are children of this process.

    results: by rank, pickled. failures: (kind, rank, text). A CommError is a "symptom": the rank
    has waited for one that failed. Another error, or a killed process, is a "cause".
    """

    def __init__(self, who: str, size: int) -> None:
        self.who, self.size = who, size
        self.store: Any = None
        self.processes: dict[int, Any] = {}
        self.connections: dict[int, Connection] = {}
        self.results: dict[int, bytes] = {}
        self.failures: list[tuple[str, int, str]] = []

    def start(self, rank: int, start: Callable[[Connection], Any]) -> Connection | None:
        """Starts a rank: the process that ``start`` returns for its end of a connection. Returns
        this end in a fork, and None in this process."""
        here, there = Pipe()
        parent, before = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        try:
            process = start(there)
            if process.pid == 0:
                gc.freeze()  # the parent's garbage may refer to threads that a fork does not have
                self.kept = list(LEFT_GROUPS)  # never read: destructors of groups must not run here
                for connection in (here, *self.connections.values()):
                    connection.close()
                return there
            there.close()
            self.processes[rank], self.connections[rank] = process, here
            return None
        finally:
            if os.getpid() == parent:  # a Ctrl-C in the fork would run the rest of the program
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def start_store(self) -> int:
        """Starts the store of the world, and sends its port to all ranks. Returns the port."""
        self.store = open_store("127.0.0.1", 0, keeps=True)
        for connection in self.connections.values():
            with contextlib.suppress(OSError):  # a rank that died is found by ``receive``
                connection.send(self.store.port)
        return int(self.store.port)

    @property
    def missing(self) -> list[int]:
        """The ranks that have not reported yet."""
        failed = {rank for _, rank, _ in self.failures}
        return [r for r in self.processes if r not in self.results and r not in failed]

    def receive(self, seconds: float) -> list[int]:
        """Receives reports until all have arrived, a rank has failed, or the time is over. Returns
        the missing ranks."""
        end, failed = time.monotonic() + seconds, len(self.failures)
        while (missing := self.missing) and len(self.failures) == failed:
            if time.monotonic() > end:
                break
            ended = [r for r in missing if self.processes[r].exitcode is not None]
            ready = wait([self.connections[r] for r in missing], 0 if ended else 0.1)
            for rank in missing:
                # a process that an ended rank has started may hold the connection
                if self.connections[rank] in ready or rank in ended:
                    self._read(rank, self.connections[rank] in ready)
        return self.missing

    def _read(self, rank: int, has_report: bool) -> None:
        kind, value = "cause", None
        with contextlib.suppress(EOFError, OSError):
            if has_report:
                kind, value = self.connections[rank].recv()
        if kind == "result":
            self.results[rank] = value or b""
        elif value is not None:
            self.failures.append((kind, rank, f"rank {rank} of {self.size}: {value}"))
        else:
            process = self.processes[rank]
            process.join(5.0)
            code = process.exitcode
            how = f"ended with exit code {code}, without a Python error"
            if code is not None and code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
            text = f"rank {rank} of {self.size} (process {process.pid}) {how}"
            self.failures.insert(0, (kind, rank, f"{text}. The other ranks were ended too"))

    def check(self) -> None:
        """Raises RankError if a rank has failed; of several failures, for a cause."""
        if self.failures:
            self.receive(0.2)
            end = time.monotonic() + GRACE
            while all(kind == "symptom" for kind, *_ in self.failures) and self.missing:
                if time.monotonic() > end:
                    break
                self.receive(end - time.monotonic())
            # causes come first: "cause" < "symptom"
            _, rank, text = min(self.failures, key=lambda failure: failure[0])
            raise RankError(f"{self.who}: {text}", rank)

    def kill(self) -> None:
        """Ends all processes, and returns when they are gone."""
        for process in self.processes.values():
            process.kill()
        for rank, process in self.processes.items():
            process.join(60.0)
            self.connections[rank].close()


def check_alone(who: str) -> None:
    """Raises RuntimeError if this process is a rank already."""
    current_runtime()  # drops a world that has been left
    started = {"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
    if dist.is_initialized():
        raise RuntimeError(
            f"{who}: this process is rank {dist.get_rank()} of {dist.get_world_size()} already. "
            "Start the ranks before a mesh is made, or call "
            "torch.distributed.destroy_process_group() first"
        )
    if started:
        raise RuntimeError(
            f"{who}: this process was started as a rank ({', '.join(sorted(started))} in the "
            "environment). Call it in a process that no launcher has started"
        )
