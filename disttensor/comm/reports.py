"""Ranks post texts for each other in a store, from threads that never block in it.

A rank posts a text under a subject (``place/3``: where rank 3 is). Other ranks read it, or wait
some seconds for the texts of several ranks. Each rank posts the number of its process, by which
ranks of one machine see whether it runs.
"""

from __future__ import annotations

import copy
import os
import select
import socket
import time
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from disttensor.comm.process_group import open_store, read_key, wait_until

PATIENCE = 4.0  # seconds for other ranks to post their reports, or one more heartbeat


class Reports:
    """The posts of ranks 0 to ``size`` - 1 in the TCPStore at ``host`` and ``port``, under keys
    that begin with ``prefix``. ``rank``: of this process. ``store``: usable from any thread that
    does not block in it."""

    def __init__(self, host: str, port: int, prefix: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        own = open_store(host, port, keeps=False, limit=timedelta(seconds=10))
        self.store: Any = dist.PrefixStore(prefix, own)
        # A socket that closes with the store. Its file descriptor is closed with this object.
        self.line = socket.create_connection((host, port), 10.0).detach()
        weakref.finalize(self, os.close, self.line).atexit = False
        self.store.set(f"process/{rank}", f"{_machine()} {os.getpid()}")

    def is_closed(self) -> bool:
        """Returns True if the store has ended. After that, C++ would print each operation."""
        return bool(select.select([self.line], [], [], 0)[0])

    def gather(self, subject: str, ranks: Iterable[int], seconds: float) -> dict[int, str]:
        """Returns the texts that these ranks have posted under ``subject``. Waits at most
        ``seconds`` for all, then leaves out the missing ones."""
        keys = {rank: f"{subject}/{rank}" for rank in ranks}
        wait_until(lambda: self.store.check([*keys.values()]), seconds)
        texts = {rank: read_key(self.store, key) for rank, key in keys.items()}
        return {rank: text for rank, text in texts.items() if text is not None}

    def of_world(self, prefix: str) -> Reports:
        """Returns the posts of another world in the same store, to read."""
        other = copy.copy(self)
        other.store = dist.PrefixStore(prefix, self.store.underlying_store)
        return other

    def beat(self) -> None:
        """Posts that this rank lives."""
        self.store.add(f"beat/{self.rank}", 1)

    def process_state(self, rank: int) -> str | None:
        """Returns the state of the process of ``rank`` as the system calls it ("T": stopped); "":
        it has ended. None: not known, because it is on another machine or has posted nothing."""
        machine, _, pid = (read_key(self.store, f"process/{rank}") or "").rpartition(" ")
        return process_state(int(pid)) if machine == _machine() else None

    def failed_rank(self, ranks: Sequence[int] = ()) -> int | None:
        """Returns a rank (of ``ranks``) that has left the world or whose process has ended, or
        None. Processes on this machine are looked up; on others a rank has ended if it has no
        heartbeat for some time."""
        elsewhere = {}
        for r in ranks or range(self.size):
            state = self.process_state(r)
            if state == "" or self.store.check([f"left/{r}"]):
                return r
            if state is None and self.store.check([f"process/{r}"]):
                elsewhere[r] = self.store.add(f"beat/{r}", 0)
        if elsewhere:
            time.sleep(PATIENCE)
        still = (r for r, beats in elsewhere.items() if self.store.add(f"beat/{r}", 0) == beats)
        return next(still, None)


def address_of(store: Any) -> tuple[str, int]:
    """Returns host and port of the TCPStore below ``store``. Raises AttributeError for another type
    of store."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host, store.port


def process_state(pid: int) -> str:
    """Returns the state of a process of this machine, one letter; "" if it has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""
    return "" if state in "ZX" else state


def _machine() -> str:
    """Returns a name that is equal for processes which can look up each other's process ids."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # a name for this process only
