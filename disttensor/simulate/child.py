"""Runs a function in a forked process, so that it changes nothing of this one: its globals, files,
folder, environment and handlers are as they were.

The child writes files to a scratch folder (``scratch_files.py``) and does not reach other processes
(``refusals.py``). The result, and the text that the function prints, arrive through a pipe.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

import torch

from disttensor.errors import SimulationError
from disttensor.simulate.refusals import refuse_effects
from disttensor.simulate.scratch_files import ScratchFiles, places_of_calls

T = TypeVar("T")
# Set in the child: a script may read it.
VARIABLE = "DISTTENSOR_SIMULATION"
_FORKS = "fork-based multiprocessing", "in forked subprocess"  # torch, after a GPU was used


class _ChildTraceback(Exception):
    """The traceback of an error of the child, as text."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class Child(Generic[T]):
    """A forked process that runs ``function(files)``.

    name  the name of the process in errors
    take  a function that makes the result from the value that the process sends

    The result has to be picklable. ``modules`` that are imported in the child are not imported
    here, so an error of a class that only the child knows is a SimulationError.
    """

    def __init__(
        self, function: Callable[[ScratchFiles], Any], name: str, take: Callable[[Any], T]
    ) -> None:
        self.name, self.take = name, take
        self._folder = tempfile.TemporaryDirectory(prefix="disttensor-simulate-")
        places_of_calls(len(sys.modules))
        reader, writer = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # else the child would flush the same text
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of threads, which do not run there
            self._pid = os.fork()
        if not self._pid:
            os.close(reader)
            _run(function, writer, self._folder.name)
        os.close(writer)
        self._pipe = os.fdopen(reader, "rb")

    def result(self) -> T:
        """Waits for the result. Raises the exception of the function, or SimulationError if the
        child has ended without one."""
        try:
            while True:
                kind, value, text = pickle.load(self._pipe)
                if kind == "text":
                    sys.stdout.write(value)
                elif kind == "result":
                    return self.take(value)
                else:
                    raise value from _ChildTraceback(text)
        except EOFError:
            _, status = os.waitpid(self._pid, 0)
            self._pid = 0
            code = os.waitstatus_to_exitcode(status)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise SimulationError(
                f"the process of {self.name} ended with {how} before the step was over: it called "
                "os._exit, it crashed, or the memory of this machine is full"
            ) from None
        finally:
            self.end()

    def end(self) -> None:
        """Ends the child if it still runs, and removes its files."""
        self._pipe.close()
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0
        self._folder.cleanup()


class _Relay(io.TextIOBase):
    """Standard output of the child: ``write`` sends the text to the parent."""

    def __init__(self, send: Callable[[str, Any], None], above: Any) -> None:
        self.send, self.above = send, above

    def write(self, text: str) -> int:
        self.send("text", text)
        return len(text)

    def isatty(self) -> bool:
        return self.above is not None and bool(self.above.isatty())


def _run(function: Callable[[ScratchFiles], Any], writer: int, folder: str) -> NoReturn:
    """Runs the function in the child, sends its result and ends the process."""
    lock, pipe, modules = threading.Lock(), os.fdopen(writer, "wb"), {*sys.modules}

    def send(kind: str, value: Any, text: str = "") -> None:
        data = pickle.dumps((kind, value, text))
        with lock:
            pipe.write(data)
            pipe.flush()

    try:
        sys.stdout, sys.dont_write_bytecode = _Relay(send, sys.stdout), True
        os.environ[VARIABLE] = "1"
        torch.set_num_threads(1)  # the threads of OpenMP did not come along
        files = ScratchFiles(folder)
        files.replace_calls()
        refuse_effects(folder)
        send("result", function(files))
    except BaseException as error:
        send("error", _sendable(error, modules), "".join(traceback.format_exception(error)))
    finally:
        for process in multiprocessing.active_children():  # of a DataLoader
            process.kill()
        os._exit(0)


def _sendable(error: BaseException, modules: set[str]) -> BaseException:
    """Returns the error, or a SimulationError with its text if the parent cannot load it, or if the
    cause is the fork."""
    text = str(error)
    if any(part in text for part in _FORKS):
        return SimulationError(
            "simulate runs each rank in a forked process, and torch has used a GPU in this process "
            f"before, after which forked ones cannot ({text.partition('. ')[0]}). Simulate before "
            "the first use of a GPU, or by python -m disttensor.simulate"
        )
    try:
        if type(error).__module__ in modules and str(pickle.loads(pickle.dumps(error))) == text:
            return error
    except Exception:  # it cannot be pickled, whatever the reason
        pass
    return SimulationError(f"{type(error).__name__}: {text}")
