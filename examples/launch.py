"""torchrun on this machine, where an error is one line instead of pages:

    python examples/launch.py 4 examples/train_gpt.py --pp 2 --tp 2

is ``torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --pp 2 --tp 2``.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def launch(processes: int, command: list[str]) -> int:
    """Run ``command`` on so many local processes. Returns an exit status when all are gone."""
    logging.disable(logging.ERROR)
    os.environ.setdefault("PYTHONHASHSEED", "0")  # a set of names has one order on all ranks
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # SIGINT is not in torchrun's list: Ctrl-C raises here, and a quiet SIGTERM ends the ranks.
    signals = "--signals-to-handle=SIGTERM,SIGHUP"
    try:
        torchrun(["--standalone", f"--nproc-per-node={processes}", signals, *command])
    except KeyboardInterrupt:
        print(f"\ninterrupted: all {processes} processes have ended", file=sys.stderr)
        return 130
    except SignalException as caught:
        name = signal.Signals(caught.sigval).name
        print(f"\n{name}: all {processes} processes have ended", file=sys.stderr)
        return 128 + caught.sigval
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode  # it has said why itself
        name = signal.Signals(-failure.exitcode).name
        who = f"rank {rank} (process {failure.pid})"
        print(f"\n{who} was killed by {name}; the other ranks were ended too", file=sys.stderr)
        return 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 3 or not sys.argv[1].isdigit() or int(sys.argv[1]) < 1:
        sys.exit(f"usage: python {sys.argv[0]} PROCESSES SCRIPT [ARGUMENTS ...]")
    sys.exit(launch(int(sys.argv[1]), sys.argv[2:]))
