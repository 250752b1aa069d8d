"""If one process of a job fails, all end: one prints the reason, and the others print nothing."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from disttensor.errors import CommError

# A rank that lost a peer has only a symptom: the peer, or torchrun, prints the cause and ends this
# rank. If this rank still runs after this number of seconds, it prints its own error.
_PATIENCE = 3.0


def run(main: Callable[[], None]) -> None:
    """Runs this process's part of a job. If it fails, the first rank that knows the reason prints
    it."""
    try:
        main()
        if dist.is_initialized():
            dist.destroy_process_group()
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except SystemExit as exit:
        if exit.code in (None, 0):
            raise
        _end(*(("", exit.code) if isinstance(exit.code, int) else (f"error: {exit.code}", 1)))
    except CommError as error:
        time.sleep(_PATIENCE)
        _end(f"error: {error}", 1)
    except Exception:
        _end(traceback.format_exc().rstrip(), 1)


def _end(reason: str, code: int) -> None:
    """Ends the process immediately: a normal exit would wait for process groups whose members are
    gone."""
    if reason and _first():
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        print(f"\n{rank}{reason}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _first() -> bool:
    """Returns True for the first call in the job. torchrun keeps the count: any rank may die."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return True
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=2))
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # each has its first failure
        return store.add(f"train_gpt/failures/{start}", 1) == 1
    except (RuntimeError, KeyError, ValueError):
        return True  # better twice than not at all
