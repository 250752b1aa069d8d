"""Compares facts that all ranks must share, where values of the ranks enter the program.

Later calls decide by these facts what they send, so a difference is raised at the entry, on all
ranks alike.
"""

from __future__ import annotations

from typing import Any

from disttensor.comm.groups import Group
from disttensor.comm.objects import gather_results
from disttensor.comm.process_group import is_fake
from disttensor.errors import MismatchError
from disttensor.observe import observers_of_thread


def agree(who: str, group: Group, own: Any = None, /, **facts: Any) -> list[Any]:
    """Returns ``own`` of every member, in mesh order, which may differ; sends one message.

    Args:
        who: the call, in errors.
        own: a picklable value.
        facts: picklable values by name, as ``dtype=x.dtype``, that have to be equal on all members.

    Raises:
        MismatchError: on all members, if a fact differs or the members are at different calls. It
            names the fact and the value of each rank.
    """
    if own is not None and is_fake():
        for o in observers_of_thread():
            o.exchange_own(own)
    everyone = gather_results(who, group, lambda: (facts, own))
    for name in facts:
        holders: dict[str, list[int]] = {}
        for rank, (theirs, _) in zip(group.ranks, everyone, strict=True):
            holders.setdefault(str(theirs.get(name)), []).append(rank)
        if len(holders) > 1:
            held = ", ".join(
                f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                for value, ranks in holders.items()
            )
            raise MismatchError(
                f"{who}: {name} differs between the ranks: {held}. Give the same {name} on every "
                "rank"
            )
    return [value for _, value in everyone]
