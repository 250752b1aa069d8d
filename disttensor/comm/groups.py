"""Groups of ranks that communicate, and their process groups, created when first needed."""

from __future__ import annotations

import atexit
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from disttensor.comm import compare_collectives, failure_watch, lone_failure
from disttensor.comm.blocked_wait import BlockedWait
from disttensor.comm.process_group import wait_until, world, world_name
from disttensor.errors import CommError, MismatchError
from disttensor.runtime import current_runtime
from disttensor.torch_private import group_name, set_timeout, timeout_of


@dataclass(eq=False, slots=True, weakref_slot=True)
class Group:
    """Ranks that communicate: ``ranks`` in mesh order, ``index`` of this rank among them.

    >>> mesh.group((0,)), isinstance(mesh.group((0,)), reshard.Group)
    (Group(dp: ranks [0]), True)
    """

    ranks: tuple[int, ...]
    index: int
    axes: tuple[str, ...]
    pg: Any
    purpose: str = ""  # see new_group
    order: tuple[int, ...] = ()  # order[i]: the backend's number of member i
    in_rank_order: bool = True  # the backend numbers members by rank; True: this is the mesh order
    started: list[int] = field(default_factory=lambda: [0])  # collectives, of the communicator

    def __post_init__(self) -> None:
        numbers = {rank: i for i, rank in enumerate(sorted(self.ranks))}
        self.order = tuple(numbers[rank] for rank in self.ranks)
        self.in_rank_order = self.order == tuple(range(len(self.ranks)))

        if self.pg is not None:
            now = current_runtime()
            now.made.add(self)
            self.started = now.started.setdefault((tuple(sorted(self.ranks)), self.purpose), [0])

    @property
    def size(self) -> int:
        return len(self.ranks)

    def end(self) -> None:
        """Drops the process group, whose world has ended."""
        self.pg = Ended(repr(self))

    def to_backend(self, rows: Any) -> Any:
        """Reorders one entry per member from mesh order to the backend's order."""
        if self.in_rank_order:
            return rows
        return _pick(rows, sorted(range(self.size), key=self.order.__getitem__))

    def to_members(self, rows: Any) -> Any:
        """Reorders one entry per member from the backend's order to mesh order."""
        return rows if self.in_rank_order else _pick(rows, self.order)

    def __repr__(self) -> str:
        return f"Group({'+'.join(self.axes)}: ranks {list(self.ranks)})"


class Ended:
    """Replaces the process group of a world that has ended."""

    def __init__(self, group: str) -> None:
        self._group = group

    def error(self) -> CommError:
        return CommError(
            f"{self._group} belongs to a world that has ended (destroy_process_group was called). "
            "Make the mesh again, with dt.init_mesh or ProcessMesh, and the tensors on it"
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise self.error()


def _pick(rows: Any, order: Sequence[int]) -> Any:
    return rows[list(order)] if isinstance(rows, torch.Tensor) else [rows[i] for i in order]


def new_group(ranks: Sequence[int], axes: Sequence[str], purpose: str = "") -> Group:
    """Returns the group of ``ranks``, which include this rank. Cached; collective for its members.

    Each ``purpose`` has its own communicator over the same ranks. Collectives of two purposes are
    not ordered among each other, so background collectives never come between the collectives that
    the program waits for. Raises CommError, naming the ranks, if they do not all arrive.
    """
    ranks, axes = tuple(ranks), tuple(axes)
    if len(ranks) == 1:
        return Group(ranks, 0, axes, None, purpose)
    index, members = ranks.index(world()[0]), tuple(sorted(ranks))
    if compare_collectives.enabled and (members, purpose) not in current_runtime().groups:
        compare_collectives.compare_collective(
            Group(ranks, index, axes, None, purpose), "new_group"
        )
    return Group(ranks, index, axes, process_group(members, axes, purpose), purpose)


def world_group(purpose: str = "") -> Group:
    """Returns the group of all ranks."""
    return new_group(range(world()[1]), ("world",), purpose)


def process_group(
    members: tuple[int, ...], axes: Sequence[str], purpose: str = "", timeout: float | None = None
) -> Any:
    """Returns torch's process group of the sorted ``members``, created once; also for one rank,
    which only callers outside this package need. The default group is never returned: the user's
    own threads may use it, as torch's asynchronous checkpoints do.

    ``timeout``: seconds to wait for the others during creation; None: as long as for a collective.
    """
    now = current_runtime()
    key = (members, purpose)
    if key not in now.groups:
        failure_watch.watch()
        _wait_for_gloo()
        try:
            now.groups[key] = _new_process_group(members, purpose, timeout)
        except MismatchError:
            raise
        except Exception as error:
            raise failure_watch.comm_error(
                f"creating the process group of mesh axes {'+'.join(axes)} failed on rank "
                f"{world()[0]}: it needs ranks {list(members)} to arrive here together.", error
            ) from error  # fmt: skip
    return now.groups[key]


def _new_process_group(members: tuple[int, ...], purpose: str, timeout: float | None) -> Any:
    """Creates a group with its members only, under a name that follows from facts known to all of
    them. torch's default name contains the number of groups that a rank already has: ranks of
    different meshes would disagree about the name, and wait for each other until the time limit."""
    digest = hashlib.sha256(repr((members, purpose, world_name())).encode()).hexdigest()[:32]
    limit = None if timeout is None else timedelta(seconds=timeout)
    usual = timeout_of(current_runtime().default)  # torch gives each group 30 minutes
    _wait_for_members(members, purpose, digest, limit or usual)
    with group_name(f"disttensor_{digest}"):
        made = dist.new_group(members, limit or usual, use_local_synchronization=True)
        if limit is not None:  # the limit holds for the creation only
            set_timeout(usual, made)
        return made


def _wait_for_members(
    members: tuple[int, ...], purpose: str, name: str, limit: timedelta | None
) -> None:
    """Waits until all members are here, and then until all have seen this: a member that has ended
    since it came does not see it. Raises RuntimeError if one of them ends, fails or is late; torch
    does not check whether the members live."""
    watcher = failure_watch.watcher_of(current_runtime())
    if watcher is None:
        return
    end = time.monotonic() + (limit.total_seconds() if limit is not None else 1800)
    blocked: BlockedWait | None = None
    try:
        for state in ("is here", "sees all"):
            wanted = [f"group/{name}/{rank} {state}" for rank in members]
            watcher.store.set(f"group/{name}/{watcher.rank} {state}", "")
            while not wait_until(partial(watcher.store.check, wanted), 1.0):
                if time.monotonic() > end:
                    failure_watch.post_unseen(watcher)
                    raise RuntimeError("they are late")
                failed = watcher.failed or lone_failure.find(watcher, members)
                if failed or watcher.failed_rank(members) is not None:
                    raise RuntimeError("one of them has failed")
                if blocked is None:
                    words = f"the start of the group {members} {purpose}".rstrip()
                    blocked = BlockedWait(watcher, members, purpose, words, 1)
                blocked.check()
    finally:
        if blocked:
            blocked.end()


@cache
def _wait_for_gloo() -> None:
    """Gives gloo's threads a moment at exit to release the last tensors. A thread that requests the
    GIL for this while Python shuts down aborts the process (seen with torch 2.13 and Python 3.11,
    also without this project)."""
    atexit.register(time.sleep, 0.1)
