"""Runs a script in one process and on several, and names the first tensor that differs:
``python -m disttensor.verify --nproc 4 train.py``.

The script may use any library on ``torch.distributed``. It has to make the same global batches and
initial values for each number of processes.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import torch

from disttensor.errors import RankError, VerifyError
from disttensor.launching.script import run_command
from disttensor.verification import verify

if __name__ != "__main__":  # an import would replace the function dt.verify by this module
    raise ImportError("disttensor.verify is a command: python -m disttensor.verify")

parser = argparse.ArgumentParser(
    prog="python -m disttensor.verify",
    usage="%(prog)s --nproc N [options] script.py [arguments]   (or -m module [arguments])",
    description="Compare what a script computes on N processes with what it computes in one.",
)
parser.add_argument("--nproc", type=int, required=True, metavar="N", help="number of processes")
parser.add_argument("--steps", type=int, default=3, help="optimizer steps to compare; default: 3")
parser.add_argument("--dtype", help="float64 (default), another default dtype, or 'own'")
parser.add_argument("--whole", metavar="FILE:NAME", help="a function that puts pieces together")
parser.add_argument("--timeout", type=float, metavar="S", help="seconds for the N processes")
parser.add_argument("-m", dest="module", action="store_true", help="the script is a module")
parser.add_argument("command", nargs=argparse.REMAINDER, metavar="script.py [arguments]")
args = parser.parse_args()
if not args.command or not (args.module or Path(args.command[0]).is_file()):
    parser.error(f"there is no file {args.command[0] if args.command else 'to run'}")
file, _, name = (args.whole or "").rpartition(":")
dtype = getattr(torch, args.dtype or "float64") if args.dtype != "own" else None
command = ["-m", *args.command] if args.module else args.command
try:
    whole = runpy.run_path(file)[name] if file else None
    options = {"steps": args.steps, "whole": whole, "dtype": dtype, "timeout": args.timeout}
    print(verify(run_command, args.nproc, (command,), **options))
except (RankError, TimeoutError, VerifyError) as error:
    sys.exit(str(error))
