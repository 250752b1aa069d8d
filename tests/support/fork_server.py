"""Starts the workers of tests/support/pool.py as forks of a process that has imported PyTorch.

Importing PyTorch and disttensor takes four CPU seconds; torch._dynamo, which PyTorch imports at the
first step of an optimizer, takes two more; a fork takes some milliseconds. Each rank number has a
server of its own: processes that are forked from one have the same hash seed, and ranks that
iterate over a set of strings shall differ, as they do under torchrun. A server collects no garbage,
and its workers leave the imported modules out when they do.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STANDARD = (1, 2)  # the file descriptors of output and errors, which a worker takes over


class Worker:
    """A process that ``ForkServer`` has started; the methods are those of ``subprocess.Popen``."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.server, self.pid = server, pid
        self.status: int | None = None

    def send_signal(self, number: int) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 60.0) -> int:
        """Returns the exit code, or minus the signal. Raises subprocess.TimeoutExpired."""
        end = time.monotonic() + timeout
        while self.status is None:
            if self.server.channel.closed:  # nobody can say how the worker has ended
                return -signal.SIGKILL
            ended, status = self.server.ask(("wait", self.pid))
            if ended:
                self.status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            else:
                time.sleep(0.005)
        return self.status


class ForkServer:
    """A process that forks workers."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        # large blocks go back to the system when they are freed, whatever ran before: tests measure
        env.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
        self.channel, there = Pipe()
        command = [sys.executable, "-m", "tests.support.fork_server", str(there.fileno())]
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()]
        )
        there.close()

    def start(self, env: dict[str, str], handle: int, *config: Any) -> Worker:
        """Starts ``pool_worker.main(*config, handle)`` with these environment variables."""
        request = ("start", env, os.getcwd(), config)
        return Worker(self, self.ask(request, (handle, *STANDARD)))

    def ask(self, request: tuple[Any, ...], handles: tuple[int, ...] = ()) -> Any:
        """Sends the request and the file descriptors, and returns the answer."""
        try:
            self.channel.send(request)
            for handle in handles:
                reduction.send_handle(self.channel, handle, self.process.pid)
            return self.channel.recv()
        except BaseException:  # a time limit too: the answer would be taken for that of the next
            self.stop()
            raise

    def stop(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()


_servers: list[ForkServer] = []


def servers(count: int) -> list[ForkServer]:
    """The servers of the first ``count`` rank numbers: they start at first use, all at once."""
    _servers[:] = [ForkServer() if server.channel.closed else server for server in _servers]
    _servers.extend(ForkServer() for _ in range(len(_servers), count))
    return _servers[:count]


@atexit.register
def stop() -> None:
    """Ends all servers; the workers that they have started live on."""
    while _servers:
        _servers.pop().stop()


def serve(channel: Connection, main: Callable[..., None]) -> None:
    """Answers until the other end of ``channel`` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: pytest ends, and with it this process
    started = int("PYTEST_XDIST_WORKER" in os.environ)  # then it will start many
    while True:
        try:
            kind, *rest = channel.recv()
        except EOFError:
            return
        if kind == "wait":
            channel.send(os.waitpid(rest[0], os.WNOHANG))
            continue
        handles = [reduction.recv_handle(channel) for _ in range(1 + len(STANDARD))]
        if started == 1:  # the first worker starts as soon as it can
            importlib.import_module("torch._dynamo")
        started += 1
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            channel.close()
            _run(main, handles, *rest)
        for handle in handles:
            os.close(handle)
        channel.send(pid)


def _run(
    main: Callable[..., None],
    handles: list[int],
    env: dict[str, str],
    folder: str,
    config: tuple[Any, ...],
) -> None:
    """The life of a forked worker."""
    code = 1
    try:
        gc.enable()
        for number, handle in zip(STANDARD, handles[1:], strict=True):
            os.dup2(handle, number)
            os.close(handle)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(folder)
        main(*config, handles[0])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    gc.disable()
    from tests.support import pool_worker

    serve(Connection(int(sys.argv[1])), pool_worker.main)
