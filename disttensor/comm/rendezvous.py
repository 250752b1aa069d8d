"""Creates all process groups in advance, in one order. Errors name the ranks that are missing or
that request different groups."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch.distributed as dist

from disttensor.comm import failure_watch
from disttensor.comm.groups import process_group
from disttensor.comm.process_group import is_fake, missing_ranks, read_key, world, world_store
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
    """Creates the process groups of all ``(ranks, axes, lane)``, in the same order on all ranks, so
    that no two ranks wait for each other in different groups.

    Every rank of the world calls this function with the same groups, including groups that it is
    not in. The call returns when all ranks have created their groups; ``new_group`` then finds
    them. A group of one rank needs no communicator and is skipped. Raises ValueError for ranks that
    are not in the world. Raises CommError, naming the ranks, if ranks do not arrive, request
    different groups, or cannot create one; each wait takes at most ``timeout`` seconds.
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
        if len(ranks) > 1:  # any of several names for the same ranks will do
            names[key] = min(tuple(axes), names.get(key, tuple(axes)))
    if size == 1:
        return
    if is_fake():  # there are no other ranks
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
    """Barriers of ranks through the store of the world. ``monitored_barrier`` needs a communicator,
    exists for gloo only, and cannot say which group the others wait for."""

    def __init__(self, timeout: float) -> None:
        now = current_runtime()
        self.store = dist.PrefixStore(f"groups{now.meetings}", world_store())
        now.meetings += 1
        self.rank, self.size, self.timeout = *world(), timeout

    def fail(self, why: str) -> str:
        """Posts an error for all ranks. Returns the first error that was posted."""
        return str(self.store.compare_set("failed", "", why).decode())

    def wait_for(self, ranks: Sequence[int], place: str, wanted: Sequence[_Wanted]) -> None:
        """Waits until all ``ranks`` are at ``place``. Raises CommError that names the ranks that
        did not arrive."""
        missing = missing_ranks(
            self.store, place, self.rank, ranks, self.timeout, lambda: self.store.check(["failed"])
        )
        if not missing:
            return
        failed = read_key(self.store, "failed")
        why = f" within {self.timeout:g} s" if failed is None else f": {failed}"
        if failed is None:
            self.fail(f"rank {self.rank} timed out waiting for ranks {missing}")
        needed = [str(g) for g in wanted if set(g.members) & set(missing)]
        raise CommError(
            f"create_groups: ranks {missing} did not come{why}; rank {self.rank} waits for them to "
            f"make {_shortened(needed)}. Every rank of the world calls create_groups, with the "
            f"same groups.{failure_watch.first_failure()}"
        )

    def agree(self, wanted: Sequence[_Wanted]) -> None:
        """Raises CommError on all ranks, naming them, unless all request the same groups."""
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
