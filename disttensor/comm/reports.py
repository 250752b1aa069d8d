"""Ranks post values for each other in a store, from threads that never block in it.

A ``Topic`` has one value for each rank, as where its program is. Other ranks read it, or wait some
seconds for the values of several ranks. Each rank posts the number of its process, by which ranks
of one machine see whether it runs.
"""

from __future__ import annotations

import copy
import json
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch.distributed as dist

from disttensor.comm.process_group import open_store, read_key, wait_until

T = TypeVar("T")

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
        PROCESS.post(self, RankProcess(_machine(), os.getpid()))

    def is_closed(self) -> bool:
        """Returns True if the store has ended. After that, C++ would print each operation."""
        return bool(select.select([self.line], [], [], 0)[0])

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
        found = PROCESS.read(self, [rank]).get(rank)
        return process_state(found.pid) if found and found.machine == _machine() else None

    def failed_rank(self, ranks: Sequence[int] = ()) -> int | None:
        """Returns a rank (of ``ranks``) that has left the world or whose process has ended, or
        None. Processes on this machine are looked up; on others a rank has ended if it has no
        heartbeat for some time."""
        elsewhere = {}
        for r in ranks or range(self.size):
            state = self.process_state(r)
            if state == "" or LEFT.has(self, r):
                return r
            if state is None and PROCESS.has(self, r):
                elsewhere[r] = self.store.add(f"beat/{r}", 0)
        if elsewhere:
            time.sleep(PATIENCE)
        still = (r for r, beats in elsewhere.items() if self.store.add(f"beat/{r}", 0) == beats)
        return next(still, None)


class Topic(Generic[T]):
    """Values that ranks post, at most one for each rank, in the keys ``name/rank`` as JSON.

    ``kind``: a NamedTuple, of which the values are; None: they are texts or lists.
    """

    def __init__(self, name: str, kind: Callable[..., T] | None = None) -> None:
        self.name, self.kind = name, kind

    def post(self, to: Reports, value: T) -> None:
        """Posts the value of this rank in place of an earlier one."""
        to.store.set(f"{self.name}/{to.rank}", json.dumps(value))

    def withdraw(self, of: Reports, rank: int) -> None:
        of.store.delete_key(f"{self.name}/{rank}")

    def has(self, of: Reports, rank: int) -> bool:
        """Returns True if the rank has posted a value."""
        return bool(of.store.check([f"{self.name}/{rank}"]))

    def read(self, of: Reports, ranks: Iterable[int]) -> dict[int, T]:
        """Returns the values that these ranks have posted."""
        texts = {rank: read_key(of.store, f"{self.name}/{rank}") for rank in ranks}
        values = {rank: json.loads(text) for rank, text in texts.items() if text is not None}
        return {r: self.kind(*v) for r, v in values.items()} if self.kind else values

    def gather(self, of: Reports, ranks: Iterable[int], seconds: float) -> dict[int, T]:
        """Returns the values of these ranks. Waits at most ``seconds`` for all, then leaves out the
        missing ones."""
        ranks = list(ranks)
        wait_until(lambda: of.store.check([f"{self.name}/{rank}" for rank in ranks]), seconds)
        return self.read(of, ranks)


class RankProcess(NamedTuple):
    """``machine``: the same for processes that can look up each other's process ids."""

    machine: str
    pid: int


PROCESS = Topic("process", RankProcess)
LEFT: Topic[str] = Topic("left")  # the rank has ended its program


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
    """Returns the machine of this ``RankProcess``."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # a name for this process only
