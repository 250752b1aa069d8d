"""Creates all process groups in advance, in one order. Errors name the ranks that are missing or
that request different groups."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from disttensor.comm import failure_watch
from disttensor.comm.groups import process_group
from disttensor.comm.process_group import is_fake, missing_ranks, read_key, world, world_store
from disttensor.errors import CommError
from disttensor.runtime import current_runtime
from disttensor.torch_private import timeout_of


class _Wanted(NamedTuple):
    members: tuple[int, ...]
    purpose: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        purpose = f" (for {self.purpose})" if self.purpose else ""
        return f"{'+'.join(self.axes)}{purpose} of ranks {list(self.members)}"


def create_groups(
    groups: Iterable[tuple[Sequence[int], Sequence[str], str]], timeout: float | None = None
) -> None:
    """Creates the process groups of all ``(ranks, axes, purpose)``, in the same order on all ranks,
    so that no two ranks wait for each other in different groups.

    Every rank of the world calls this function with the same groups, including groups that it is
    not in. The call returns when all ranks have created their groups; ``new_group`` then finds
    them. A group of one rank needs no communicator and is skipped. Raises ValueError for ranks that
    are not in the world. Raises CommError, naming the ranks, if ranks do not arrive, request
    different groups, or cannot create one; each wait takes at most ``timeout`` seconds (None: the
    time limit of the process group).
    """
    rank, size = world()
    names: dict[tuple[tuple[int, ...], str], tuple[str, ...]] = {}
    for ranks, axes, purpose in groups:
        key = tuple(sorted(ranks)), purpose
        different = len(set(ranks)) == len(ranks)
        if not different or (ranks and not 0 <= min(ranks) <= max(ranks) < size):
            raise ValueError(
                f"create_groups: ranks {list(ranks)} of mesh axes {'+'.join(axes)} are not "
                f"different ranks of the world, which has ranks 0 to {size - 1}"
            )
        if len(ranks) > 1:  # the same ranks may have several names: one is enough
            names[key] = min(tuple(axes), names.get(key, tuple(axes)))
    wanted = [_Wanted(*key, axes) for key, axes in sorted(names.items())]
    if size == 1 or is_fake():  # there are no other ranks
        for g in wanted:
            if rank in g.members:
                process_group(g.members, g.axes, g.purpose)
        return
    now = current_runtime()
    usual = timeout_of(now.default)
    timeout = timeout or (usual.total_seconds() if usual else 600.0)
    store = dist.PrefixStore(f"groups{now.meetings}", world_store())
    now.meetings += 1
    _agree(store, wanted, timeout)
    for number, g in enumerate(wanted):
        if rank in g.members:
            _wait(store, str(number), g.members, [g], timeout)
            try:
                process_group(g.members, g.axes, g.purpose, timeout)
            except CommError as error:
                first = _post(store, f"rank {rank} could not make the group {g}")
                raise CommError(f"create_groups: {first}. On rank {rank}: {error}") from error
    _wait(store, "end", range(size), wanted, timeout)


def _post(store: Any, failure: str) -> str:
    """Posts a failure for all ranks. Returns the first failure that was posted."""
    return str(store.compare_set("failed", "", failure).decode())


def _wait(
    store: Any, place: str, ranks: Sequence[int], wanted: Sequence[_Wanted], timeout: float
) -> None:
    """Waits until all ``ranks`` are at ``place``. Raises CommError that names the ranks that did
    not arrive. ``monitored_barrier`` of torch needs a communicator, exists for gloo only, and
    cannot say which group the others wait for."""
    rank = world()[0]
    missing = missing_ranks(store, place, rank, ranks, timeout, lambda: store.check(["failed"]))
    if not missing:
        return
    failed = read_key(store, "failed")
    why = f" within {timeout:g} s" if failed is None else f": {failed}"
    if failed is None:
        _post(store, f"rank {rank} timed out waiting for ranks {missing}")
    needed = [str(g) for g in wanted if set(g.members) & set(missing)]
    does = "came later" if rank in missing else "waits for them"
    raise CommError(
        f"create_groups: ranks {missing} did not come{why}; rank {rank} {does} to make "
        f"{_shorten(needed)}. Every rank of the world calls create_groups, with the same groups."
        f"{failure_watch.first_failure()}"
    )


def _agree(store: Any, wanted: Sequence[_Wanted], timeout: float) -> None:
    """Raises CommError on all ranks, naming them, unless all request the same groups."""
    rank, size = world()
    text = "\n".join(map(str, wanted))
    digest = hashlib.sha256(text.encode()).hexdigest()
    store.set(f"digest/{rank}", digest)
    store.set(f"text/{digest}", text)
    if store.compare_set("digest", "", digest).decode() != digest:
        store.set("differs", "")
    _wait(store, "start", range(size), wanted, timeout)
    if not store.check(["differs"]):
        return
    ranks_of: dict[str, list[int]] = {}
    for r in range(size):
        ranks_of.setdefault(store.get(f"digest/{r}").decode(), []).append(r)
    lists = [set(store.get(f"text/{d}").decode().split("\n")) for d in ranks_of]
    common = set.intersection(*lists)
    lines = [
        f"  ranks {ranks}: {_shorten(sorted(names - common - {''}))}"
        for ranks, names in zip(ranks_of.values(), lists, strict=True)
    ]
    raise CommError(
        "create_groups: ranks want different groups, and would wait for each other in vain. "
        "Beyond what all want:\n" + "\n".join(lines)
    )


def _shorten(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return "; ".join(names[:4]) + more if names else "no more groups"
