"""All process groups up front: made in one order, with errors that name the ranks that are
missing or want something else."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch.distributed as dist

from disttensor.comm import failures
from disttensor.comm.groups import process_group
from disttensor.comm.process_group import is_fake, world, world_store
from disttensor.errors import CommError
from disttensor.runtime import current_runtime


class _Wanted(NamedTuple):
    members: tuple[int, ...]
    lane: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        lane = f" (lane {self.lane})" if self.lane else ""
        return f"{'+'.join(self.axes)}{lane} of ranks {list(self.members)}"


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
    names: dict[tuple[tuple[int, ...], str], tuple[str, ...]] = {}
    for ranks, axes, lane in groups:
        key = tuple(sorted(ranks)), lane
        different = len(set(ranks)) == len(ranks)
        if not different or (ranks and not 0 <= min(ranks) <= max(ranks) < size):
            raise ValueError(
                f"create_groups: ranks {list(ranks)} of mesh axes {'+'.join(axes)} are not "
                f"different ranks of the world, which has ranks 0 to {size - 1}"
            )
        if len(ranks) > 1:  # of several names for the same ranks any will do
            names[key] = min(tuple(axes), names.get(key, tuple(axes)))
    if size == 1:
        return
    if is_fake():  # nobody else is there
        for (members, lane), axes in sorted(item for item in names.items() if rank in item[0][0]):
            process_group(members, axes, lane)
        return
    wanted = [_Wanted(*key, axes) for key, axes in sorted(names.items())]
    mine = [g for g in wanted if rank in g.members]
    meeting = _Rendezvous(timeout)
    meeting.agree(wanted)
    for g in mine:
        meeting.wait_for(g.members, str(wanted.index(g)), [g])
        try:
            process_group(g.members, g.axes, g.lane, timeout)
        except CommError as error:
            first = meeting.fail(f"rank {rank} could not make the group {g}")
            raise CommError(f"create_groups: {first}. On rank {rank}: {error}") from error
    meeting.wait_for(range(size), "end", wanted)


class _Rendezvous:
    """Ranks wait for each other by the store of the world. ``monitored_barrier`` needs a
    communicator, is of gloo alone, and cannot say what the others wait for."""

    def __init__(self, timeout: float) -> None:
        now = current_runtime()
        self.store = dist.PrefixStore(f"groups{now.meetings}", world_store())
        now.meetings += 1
        self.rank, self.size, self.timeout = *world(), timeout

    def fail(self, why: str) -> str:
        """Let all know what went wrong. Gives what went wrong first."""
        return str(self.store.compare_set("failed", "", why).decode())

    def wait_for(self, ranks: Sequence[int], place: str, wanted: Sequence[_Wanted]) -> None:
        """Return when all ``ranks`` are at ``place``. Raises CommError that names those that did
        not come."""
        self.store.set(f"{place}/{self.rank}", "")
        if self.store.add(f"{place}/count", 1) == len(ranks):
            self.store.set(f"{place}/all", "")
        end, pause = time.monotonic() + self.timeout, 0.001
        while not self.store.check([f"{place}/all"]):
            failed = self.store.check(["failed"])
            if failed or time.monotonic() > end:
                missing = [r for r in ranks if not self.store.check([f"{place}/{r}"])]
                if not missing:
                    return  # the last one came just now
                why = f" within {self.timeout:g} s"
                if failed:
                    why = f": {self.store.get('failed').decode()}"
                else:
                    self.fail(f"rank {self.rank} timed out waiting for ranks {missing}")
                needed = [str(g) for g in wanted if set(g.members) & set(missing)]
                raise CommError(
                    f"create_groups: ranks {missing} did not come{why}; rank {self.rank} waits for "
                    f"them to make {_shortened(needed)}. Every rank of the world calls "
                    f"create_groups, with the same groups.{failures.first()}"
                )
            time.sleep(pause)
            pause = min(0.2, pause * 2)

    def agree(self, wanted: Sequence[_Wanted]) -> None:
        """Raise CommError on all ranks, naming them, unless all want the same groups."""
        text = "\n".join(map(str, wanted))
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.store.set(f"digest/{self.rank}", digest)
        self.store.set(f"text/{digest}", text)
        if self.store.compare_set("digest", "", digest).decode() != digest:
            self.store.set("differs", "")
        self.wait_for(range(self.size), "start", wanted)
        if not self.store.check(["differs"]):
            return
        camps: dict[str, list[int]] = {}
        for r in range(self.size):
            camps.setdefault(self.store.get(f"digest/{r}").decode(), []).append(r)
        lists = [set(self.store.get(f"text/{d}").decode().split("\n")) for d in camps]
        common = set.intersection(*lists)
        lines = [
            f"  ranks {ranks}: {_shortened(sorted(names - common - {''}))}"
            for ranks, names in zip(camps.values(), lists, strict=True)
        ]
        raise CommError(
            "create_groups: ranks want different groups, and would wait for each other in vain. "
            "Beyond what all want:\n" + "\n".join(lines)
        )


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return "; ".join(names[:4]) + more if names else "no more groups"
