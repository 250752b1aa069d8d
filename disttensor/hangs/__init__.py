"""Finds out why the ranks of a program of torch.distributed wait for each other.

A thread of each rank looks at the main thread twice a second. If that waits for other ranks for
some seconds, all ranks post where they are (``status.py``), and one rank prints which of them
differs (``diagnosis.py``). It ends nothing. ``disttensor.comm.failure_watch`` explains errors of
collectives of this library.
"""

from disttensor.hangs.watcher import watch

__all__ = ["watch"]
