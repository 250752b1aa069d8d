"""Who communicates: groups of ranks, and their process groups, made when first needed."""

from __future__ import annotations

import atexit
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from disttensor.comm import desync, failures, lone_failure, watcher
from disttensor.comm.process_group import attempt, world
from disttensor.errors import CommError
from disttensor.runtime import current_runtime
from disttensor.torch_private import (
    group_name,
    set_timeout,
    timeout_of,
)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Group:
    """Ranks that communicate: ``ranks`` in mesh order, ``index`` of this rank among them.

    >>> mesh.group((0,)), isinstance(mesh.group((0,)), dt.Group)
    (Group(dp: ranks [0]), True)
    """

    ranks: tuple[int, ...]
    index: int
    axes: tuple[str, ...]
    pg: Any
    lane: str = ""  # see new_group
    order: tuple[int, ...] = ()  # order[i]: the backend's number of member i
    in_rank_order: bool = True  # the backend numbers members by rank: is that the mesh order?

    def __post_init__(self) -> None:
        numbers = {rank: i for i, rank in enumerate(sorted(self.ranks))}
        self.order = tuple(numbers[rank] for rank in self.ranks)
        self.in_rank_order = self.order == tuple(range(len(self.ranks)))

    @property
    def size(self) -> int:
        return len(self.ranks)

    def to_backend(self, rows: Any) -> Any:
        """What there is for each member, in the order of the backend's numbers."""
        if self.in_rank_order:
            return rows
        return _picked(rows, sorted(range(self.size), key=self.order.__getitem__))

    def to_members(self, rows: Any) -> Any:
        """The way back: from the order of the backend's numbers to that of the mesh."""
        return rows if self.in_rank_order else _picked(rows, self.order)

    def __repr__(self) -> str:
        return f"Group({'+'.join(self.axes)}: ranks {list(self.ranks)})"


def _picked(rows: Any, order: Sequence[int]) -> Any:
    return rows[list(order)] if isinstance(rows, torch.Tensor) else [rows[i] for i in order]


def new_group(ranks: Sequence[int], axes: Sequence[str], lane: str = "") -> Group:
    """The group of ``ranks``, this rank among them. Collective for its members only, and cached.

    Each ``lane`` has a communicator of its own over the same ranks: what is started in one is in no
    order with the collectives of another, so that those in the background never come between those
    that are waited for. Raises CommError that names the ranks when they do not all arrive.
    """
    ranks, axes = tuple(ranks), tuple(axes)
    if len(ranks) == 1:
        return Group(ranks, 0, axes, None, lane)
    index, members = ranks.index(world()[0]), tuple(sorted(ranks))
    if desync.enabled and (members, lane) not in current_runtime().groups:
        desync.compare(Group(ranks, index, axes, None, lane), "new_group")
    return Group(ranks, index, axes, process_group(members, axes, lane), lane)


def world_group() -> Group:
    """All ranks."""
    return new_group(range(world()[1]), ("world",))


def process_group(
    members: tuple[int, ...], axes: Sequence[str], lane: str = "", timeout: float | None = None
) -> Any:
    """torch's process group of the sorted ``members``, made once; of one rank too, which our own
    calls never need. It is never the default group, which the user's own threads may use, as
    torch's asynchronous checkpoints do.

    ``timeout``: seconds to wait for the others while it is made; None: as long as for any
    collective.
    """
    now = current_runtime()
    key = (members, lane)
    if key not in now.groups:
        failures.watch()
        _linger()
        try:
            now.groups[key] = _new_process_group(members, lane, timeout)
        except Exception as error:
            raise CommError(
                f"creating the process group of mesh axes {'+'.join(axes)} failed on rank "
                f"{world()[0]}: it needs ranks {list(members)} to arrive here together."
                f"{failures.first()} Backend error: {error}"
            ) from error
    return now.groups[key]


def _new_process_group(members: tuple[int, ...], lane: str, timeout: float | None) -> Any:
    """A group that its members alone create, under a name that follows from what all of them know.
    torch puts the number of groups that a rank already has into the name: ranks of different meshes
    would wait for each other in vain."""
    digest = hashlib.sha256(repr((members, lane, attempt())).encode()).hexdigest()[:32]
    limit = None if timeout is None else timedelta(seconds=timeout)
    usual = timeout_of(current_runtime().default)  # torch gives each group 30 minutes
    _arrive(members, digest, limit or usual)
    with group_name(f"disttensor_{digest}"):
        made = dist.new_group(members, limit or usual, use_local_synchronization=True)
        if limit is not None:  # of the making only
            set_timeout(usual, made)
        return made


def _arrive(members: tuple[int, ...], name: str, limit: timedelta | None) -> None:
    """Wait until all members are here, as long as they live, which torch would not look at."""
    beside = watcher.of(current_runtime())
    if beside is None:
        return
    wanted = [f"group/{name}/{rank}" for rank in members]
    beside.store.set(f"group/{name}/{world()[0]}", "")
    pause, look = 0.001, time.monotonic() + 1
    end = time.monotonic() + (limit.total_seconds() if limit is not None else 1800)
    while not beside.store.check(wanted):
        if time.monotonic() > look:
            look += 1
            late = time.monotonic() > end
            if late:
                failures.post_unseen(beside)
            failed = beside.failed or lone_failure.find(beside, members)
            if late or failed or beside.gone(4, members) is not None:
                raise RuntimeError("they are late" if late else "one of them has failed")
        time.sleep(pause)
        pause = min(0.1, pause * 2)


@cache
def _linger() -> None:
    """At exit, give gloo's threads a moment to let go of the last tensors. One that asks for the
    GIL to do so while Python shuts down aborts the process (seen in torch 2.13 with Python 3.11, in
    plain torch programs too)."""
    atexit.register(time.sleep, 0.1)
