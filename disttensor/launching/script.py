"""Runs a script as a rank of ``python -m disttensor.run``: ``python script.py FILE ARGUMENTS`` or
``python script.py -m MODULE ARGUMENTS``.

An uncaught error goes into the file that torchrun names, and the launcher prints it once. This file
is run by its path and imports the standard library only, so the script decides what is imported
first, and the environment of the import.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, NoReturn

PERIOD = 0.5  # seconds between two looks at the parent
_HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Files that are not the user's: frozen modules, the standard library, installed packages, ours
_LIBRARY = re.compile(
    rf"^<|^{re.escape(os.path.dirname(os.__file__))}/|/(?:site|dist)-packages/"
    rf"|^{re.escape(_HOME)}/(?:disttensor|ops|reshard)/"
)
PATIENCE = 3.0  # seconds that a symptom waits, so that the cause is the first error


def is_library(file: str) -> bool:
    """Returns True for a file that is not the user's."""
    return _LIBRARY.search(file) is not None


def end_with_parent(parent: int) -> None:
    """Ends this process soon after its parent, whose process id is ``parent``, however the parent
    ends."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PERIOD)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def join_threads() -> None:
    """Waits for threads, as Python does at its end: one may write a checkpoint."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def leave(status: int) -> NoReturn:
    """Ends this process without the clean-up of Python, which would wait for process groups whose
    members are gone, and would run what a parent has registered."""
    join_threads()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or without a reader
            stream.flush()
    os._exit(status)


def users_part(trace: TracebackType | None, *ours: str) -> TracebackType | None:
    """Returns a traceback without its first frames if they are in the files ``ours``."""
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def format_error(error: BaseException, trace: TracebackType | None) -> str:
    """Returns a traceback whose last line is the user's line, if the error was raised below it."""
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    frames = traceback.extract_tb(trace)
    users = [f for f in frames if not is_library(f.filename)]
    if not users or users[-1] is frames[-1]:
        return text
    at = users[-1]
    return f"{text}\n  at {at.filename}:{at.lineno}, in {at.name}: {at.line}"


def _record(error: BaseException, text: str) -> None:
    """Writes an error as torch.distributed.elastic expects it."""
    details = {"py_callstack": text, "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": message}, file)


def _hook(kind: Any, error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        leave(130)
    if kind.__name__ == "CommError":  # of disttensor, which this file does not import
        time.sleep(PATIENCE)
    main = getattr(sys.modules["__main__"], "__file__", __file__)  # this file, or one that runs it
    trace = users_part(trace, main, __file__, runpy.__file__, "<frozen runpy>")
    if "TORCHELASTIC_ERROR_FILE" not in os.environ or os.environ.get(
        "TORCHELASTIC_MAX_RESTARTS", "0"
    ) not in ("", "0"):  # torchrun reports the last attempt only
        sys.__excepthook__(kind, error, trace)
    else:
        _record(error, format_error(error, trace))
    leave(1)


def run_command(command: list[str]) -> None:
    """Runs a script, as ``python FILE ARGUMENTS`` or ``python -m MODULE ARGUMENTS``."""
    is_module = command[0] == "-m"
    sys.argv = command[is_module:]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


def main(command: list[str]) -> None:
    end_with_parent(int(os.environ.get("DISTTENSOR_PARENT", os.getppid())))
    sys.excepthook = _hook
    try:
        run_command(command)
    except SystemExit as end:
        if isinstance(end.code, str) and "TORCHELASTIC_ERROR_FILE" in os.environ:
            _record(end, f"error: {end.code}")
            end.code = 1
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
