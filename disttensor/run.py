"""Starts a script on processes of this machine, or of several: ``python -m disttensor.run --nproc 4
script.py``.

It is torchrun with other defaults, and with one readable error: the first rank that failed prints
its traceback, and the others print nothing.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from disttensor.launching import script

USAGE = (
    "{prog} --nproc N [options of torchrun] script.py [arguments]\n"
    "       {prog} --nproc N [options of torchrun] -m module [arguments]"
)


def main(
    arguments: list[str] | None = None,
    prog: str = "python -m disttensor.run",
    runner: str = script.__file__,
) -> int:
    """Runs a command line. Returns an exit status when all processes are gone. ``runner``: the file
    that runs the script in each rank."""
    parser = torchrun.get_args_parser()
    parser.prog, parser.usage = prog, USAGE.format(prog=prog)
    parser.description = "Run a script on N processes of this machine. Other options: of torchrun."
    parser.add_argument(
        "--nproc", dest="nproc_per_node", default=argparse.SUPPRESS, metavar="N",
        help="number of processes on this machine",
    )  # fmt: skip
    args = parser.parse_args(arguments)
    try:
        processes = torchrun.determine_local_world_size(args.nproc_per_node)
    except ValueError:
        processes = 0
    if processes < 1:
        parser.error(f"--nproc {args.nproc_per_node}: a whole number from 1 up is expected")
    if not (args.no_python or args.run_path):
        command = [args.training_script, *args.training_script_args]
        if not args.module and not Path(args.training_script).is_file():
            parser.error(f"there is no file {args.training_script}")
        args.training_script_args = ["-m", *command] if args.module else command
        args.training_script, args.module = runner, False
    if args.nnodes in ("1", "1:1") and not args.rdzv_endpoint and args.master_port is None:
        args.standalone = True
    args.signals_to_handle = ""  # ours are handled below
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _raise)
    logging.disable(logging.ERROR)
    os.environ["DISTTENSOR_PARENT"] = str(os.getpid())  # it may end before a rank has started
    os.environ.setdefault("PYTHONHASHSEED", "0")  # a set of names has one order on all ranks
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    try:
        torchrun.run(args)
    except KeyboardInterrupt:
        return _end(f"interrupted: all {processes} processes have ended", 130)
    except SignalException as caught:
        name = signal.Signals(caught.sigval).name
        return _end(f"{name}: all {processes} processes have ended", 128 + caught.sigval)
    except ChildFailedError as failed:
        return _report(*failed.get_first_failure())
    return 0


def _raise(number: int, frame: FrameType | None) -> None:
    """Handles a signal by an exception, which ends the ranks.

    Within ``subprocess`` the signal is sent again a little later: an exception between two lines of
    ``Popen.poll`` would leave its lock taken, and then the end of a rank is not seen for a minute.
    """
    while frame is not None:
        if frame.f_code.co_filename == subprocess.__file__:
            threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
            return
        frame = frame.f_back
    if number == signal.SIGINT:  # a quiet SIGTERM ends the ranks
        raise KeyboardInterrupt
    raise SignalException(f"process {os.getpid()} got signal {number}", signal.Signals(number))


def _report(rank: int, failure: ProcessFailure) -> int:
    """Prints the first failure, unless the rank has done so. Returns the exit status."""
    status = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    details: Any = failure.message
    if isinstance(details, dict):
        return _end(f"rank {rank}: {details['extraInfo']['py_callstack']}", status)
    if failure.exitcode < 0:
        who, name = f"rank {rank} (process {failure.pid})", signal.Signals(-failure.exitcode).name
        return _end(f"{who} was killed by {name}; the other ranks were ended too", status)
    return status


def _end(text: str, status: int) -> int:
    print(f"\n{text}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
