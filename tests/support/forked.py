"""A program in a fork of the test process: like a script in a terminal, without the imports."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import IO


def start(program: Callable[[], int | None], stdin: str = "") -> tuple[int, IO[str]]:
    """Starts ``program``. Returns its process id, and what it prints. The output is at its end when
    no process is left that the program has started."""
    importlib.import_module("torch._dynamo")  # once: else ranks that the program starts import it
    (answers, ask), (read, write) = os.pipe(), os.pipe()
    os.write(ask, stdin.encode())
    os.close(ask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: threads are running
        pid = os.fork()
    if pid == 0:
        status: int | None = 1
        try:
            gc.freeze()  # garbage of the tests may refer to threads that are not here
            for handle, number in ((answers, 0), (write, 1), (write, 2)):
                os.dup2(handle, number)
            for handle in (answers, read, write):
                os.close(handle)
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
            sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = program()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status or 0)
    os.close(write)
    os.close(answers)
    return pid, os.fdopen(read)


def run(program: Callable[[], int | None], stdin: str = "") -> tuple[int, str]:
    """Runs ``program``. Returns its exit code, or minus the signal, and what it has printed."""
    pid, output = start(program, stdin)
    return end_of(pid, output)


def end_of(pid: int, output: IO[str]) -> tuple[int, str]:
    with output:
        text = output.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text
