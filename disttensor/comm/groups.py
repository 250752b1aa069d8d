"""Who communicates: groups of ranks and their process groups, made when first needed, or all up
front."""

from __future__ import annotations

import atexit
import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from disttensor import runtime
from disttensor.comm import failures
from disttensor.comm.process_group import world
from disttensor.errors import CommError
from disttensor.torch_private import (
    default_store,
    default_timeout,
    group_name,
    set_timeout,
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
    calls: int = 0  # of debug mode
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
    pg = process_group(tuple(sorted(ranks)), axes, lane)
    return Group(ranks, ranks.index(world()[0]), axes, pg, lane)


def world_group() -> Group:
    """All ranks."""
    return new_group(range(world()[1]), ("world",))


def process_group(
    members: tuple[int, ...], axes: Sequence[str], lane: str = "", timeout: float | None = None
) -> Any:
    """torch's process group of the sorted ``members``, made once; of one rank too, which our own
    calls never need.

    ``timeout``: seconds to wait for the others while it is made; None: as long as for any
    collective.
    """
    rank, size = world()
    now = runtime.current()
    key = (members, lane)
    if key not in now.groups:
        failures.watch()
        _linger()
        try:
            whole = members == tuple(range(size)) and not lane
            now.groups[key] = now.default if whole else _new_process_group(members, lane, timeout)
        except Exception as error:
            raise CommError(
                f"creating the process group of mesh axes {'+'.join(axes)} failed on rank {rank}: "
                f"it needs ranks {list(members)} to arrive here together.{failures.first()} "
                f"Backend error: {error}"
            ) from error
    return now.groups[key]


def _new_process_group(members: tuple[int, ...], lane: str, timeout: float | None) -> Any:
    """A group that its members alone create, under a name that follows from members and lane alone.
    torch puts the number of groups that a rank already has into the name: ranks of different meshes
    would wait for each other in vain."""
    digest = hashlib.sha256(repr((members, lane)).encode()).hexdigest()[:32]
    limit = None if timeout is None else timedelta(seconds=timeout)
    with group_name(f"disttensor_{digest}"):
        made = dist.new_group(members, limit, use_local_synchronization=True)
        if limit is not None:  # of the making only
            set_timeout(default_timeout(c10d.Backend(dist.get_backend(made))), made)
        return made


@cache
def _linger() -> None:
    """At exit, give gloo's threads a moment to let go of the last tensors. One that asks for the
    GIL to do so while Python shuts down aborts the process (seen in torch 2.13 with Python 3.11, in
    plain torch programs too)."""
    atexit.register(time.sleep, 0.1)


# All groups up front ------------------------------------------------------------------------------


def create_groups(
    groups: Iterable[tuple[Sequence[int], Sequence[str], str]], timeout: float = 300.0
) -> None:
    """Make the process groups of all ``(ranks, axes, lane)`` in one order, so that no two ranks
    wait for each other in two.

    Every rank of the world makes the call, with the same groups, also those that it is not in. It
    returns when all ranks have made theirs; ``new_group`` finds them then. What needs no
    communicator (one rank) is left out. Raises ValueError for ranks that are not in the world, and
    CommError that names the ranks, within ``timeout`` seconds each time that it waits, where some
    do not come, want other groups, or cannot make one.
    """
    rank, size = world()
    listed: dict[tuple[tuple[int, ...], str], tuple[str, ...]] = {}
    for ranks, axes, lane in groups:
        members = tuple(sorted(ranks))
        if len(set(members)) != len(members) or not all(0 <= r < size for r in members):
            raise ValueError(
                f"create_groups: ranks {list(ranks)} of mesh axes {'+'.join(axes)} are not "
                f"different ranks of the world, which has ranks 0 to {size - 1}"
            )
        if len(members) > 1:
            axes = tuple(
                axes
            )  # where axes of several names have the same ranks, one name is as good
            listed[members, lane] = min(axes, listed.get((members, lane), axes))
    wanted = [_Wanted(*key, axes) for key, axes in sorted(listed.items())]
    if size == 1:
        return
    if dist.get_backend() == "fake":  # nobody else is there
        for g in wanted:
            if rank in g.members:
                process_group(g.members, g.axes, g.lane)
        return
    meeting = _Meeting(timeout)
    meeting.arrive("list", range(size), wanted)
    meeting.agree(wanted)
    for number, g in enumerate(wanted):
        if rank in g.members:
            meeting.arrive(f"group{number}", g.members, [g])
            try:
                process_group(g.members, g.axes, g.lane, timeout)
            except CommError as error:
                first = meeting.tell(f"rank {rank} could not make the group {g}")
                raise CommError(f"create_groups: {first}. On rank {rank}: {error}") from error
    meeting.arrive("done", range(size), wanted)


class _Wanted(NamedTuple):
    members: tuple[int, ...]
    lane: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        lane = f" (lane {self.lane})" if self.lane else ""
        return f"{'+'.join(self.axes)}{lane} of ranks {list(self.members)}"


class _Meeting:
    """Ranks wait for each other, by the store of the world: it works where there is no communicator
    yet, and knows who is missing."""

    def __init__(self, timeout: float) -> None:
        now = runtime.current()
        self.store = dist.PrefixStore(f"disttensor/groups{now.meetings}", default_store())
        now.meetings += 1
        self.rank, self.size, self.timeout = *world(), timeout

    def tell(self, what: str) -> str:
        """Let all know what went wrong. Gives what was told first."""
        return str(self.store.compare_set("failed", "", what).decode())

    def arrive(self, place: str, ranks: Sequence[int], wanted: Sequence[_Wanted]) -> None:
        """Return when all ``ranks`` are at ``place``. Raises CommError that names those that did
        not come."""
        at = f"at/{place}"
        self.store.set(f"{at}/{self.rank}", "")
        if self.store.add(f"{at}/count", 1) == len(ranks):
            self.store.set(f"{at}/all", "")
        end = time.monotonic() + self.timeout
        pause = 0.001
        while not self.store.check([f"{at}/all"]):
            told = self.store.check(["failed"])
            if told or time.monotonic() > end:
                missing = [r for r in ranks if not self.store.check([f"{at}/{r}"])]
                if not missing:
                    break  # the last one came just now
                why = (
                    f": {self.store.get('failed').decode()}"
                    if told
                    else f" within {self.timeout:g} s"
                )
                if not told:
                    self.tell(f"rank {self.rank} timed out waiting for ranks {missing}")
                raise CommError(
                    f"create_groups: ranks {missing} did not come{why}; rank {self.rank} waits for "
                    f"them to make {_some(wanted, missing)}. Every rank of the world calls "
                    f"create_groups, with the same groups.{failures.first()}"
                )
            time.sleep(pause)
            pause = min(0.2, pause * 2)

    def agree(self, wanted: Sequence[_Wanted]) -> None:
        """Raise CommError on all ranks, naming them, unless all want the same groups."""
        text = "\n".join(map(str, wanted))
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.store.set(f"digest/{self.rank}", digest)
        if self.store.compare_set("digest", "", digest).decode() != digest:
            self.store.set("differs", "")
        self.arrive("digest", range(self.size), wanted)
        if not self.store.check(["differs"]):
            return
        self.store.set(f"text/{digest}", text)
        self.arrive("text", range(self.size), wanted)
        camps: dict[str, list[int]] = {}
        for r in range(self.size):
            camps.setdefault(self.store.get(f"digest/{r}").decode(), []).append(r)
        lists = [set(self.store.get(f"text/{d}").decode().split("\n")) for d in camps]
        common = set.intersection(*lists)
        lines = [
            f"  ranks {ranks}: {_first(sorted(names - common - {''}))}"
            for ranks, names in zip(camps.values(), lists, strict=True)
        ]
        raise CommError(
            "create_groups: ranks want different groups, and would wait for each other in vain. "
            "Beyond what all want:\n" + "\n".join(lines)
        )


def _some(wanted: Sequence[_Wanted], missing: Sequence[int]) -> str:
    """The groups that need the missing ranks."""
    return _first([str(g) for g in wanted if set(g.members) & set(missing)])


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return "; ".join(names[:4]) + more if names else "no more groups"
