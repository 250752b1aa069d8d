"""Debug mode: the members of a group compare which collective each is about to start.

They use the store and not the collective itself, so the comparison works even if ranks disagree.
The error says which rank makes which call, and names the ranks that did not arrive.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from disttensor.checks import check_positive
from disttensor.comm.process_group import read_key, world_store
from disttensor.errors import MismatchError, user_line
from disttensor.runtime import current_runtime

# Global to the process instead of context variables: collectives of a backward are compared too,
# and run in autograd's threads, which have their own contexts.
enabled = os.environ.get("DISTTENSOR_DEBUG", "") not in ("", "0")
timeout = timedelta(seconds=float(os.environ.get("DISTTENSOR_DEBUG_SECONDS", "30")))


class compare_ranks:
    """``with compare_ranks(seconds=30):`` (or ``DISTTENSOR_DEBUG=1``): ranks compare each
    collective before it runs.

    Enter and leave the block on all ranks alike. Raises MismatchError, naming the ranks, if they
    differ.

    >>> with dt.debugging.compare_ranks(seconds=10):
    ...     dt.ones(4, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()]).sum().item()
    4.0
    """

    def __init__(self, seconds: float = 30.0) -> None:
        check_positive("compare_ranks: seconds", seconds, "a positive number")
        self.seconds = seconds

    def __enter__(self) -> compare_ranks:
        global enabled, timeout
        self.before = enabled, timeout
        enabled, timeout = True, timedelta(seconds=self.seconds)
        return self

    def __exit__(self, *exc: object) -> None:
        global enabled, timeout
        enabled, timeout = self.before


def compare_collective(group: Any, description: str) -> None:
    """Raises MismatchError if the members of ``group`` do not start the same collective next."""
    store, axes, ranks = world_store(), "+".join(group.axes), list(group.ranks)
    of_group = f"calls/{'-'.join(map(str, ranks))}/{axes}/{group.purpose}"
    counts, rank = current_runtime().calls, ranks[group.index]
    number, counts[of_group] = counts[of_group], counts[of_group] + 1
    mine = f"{description} at {user_line()}"
    store.set(f"last/{rank}", f"{axes} #{number}: {mine}")
    store.set(f"{of_group}/{number}/{rank}", mine)
    calls = {}
    for other in ranks:
        try:
            store.wait([f"{of_group}/{number}/{other}"], timeout)
        except Exception:
            last = read_key(store, f"last/{other}") or "nothing yet"
            raise MismatchError(
                f"rank {rank} is at {mine}, over {axes} (ranks {ranks}), but rank {other} did not "
                f"come within {timeout.total_seconds():g} s; its last collective: {last}"
            ) from None
        calls[other] = store.get(f"{of_group}/{number}/{other}").decode()
    if number:  # all members have reached this call, so all have read the entry of the previous one
        store.delete_key(f"{of_group}/{number - 1}/{rank}")
    if len({call.split(" at ")[0] for call in calls.values()}) > 1:
        lines = "\n".join(f"  rank {r}: {text}" for r, text in shorten(calls).items())
        raise MismatchError(f"ranks disagree about the next collective over {axes}:\n{lines}")


def shorten(calls: dict[int, str]) -> dict[int, str]:
    """Shortens long texts ("call at line") to the part around the first difference."""
    pairs = zip(*calls.values(), strict=False)
    cut = next((i for i, letters in enumerate(pairs) if len(set(letters)) > 1), 0)
    begin = max(0, cut - 60)
    return {
        rank: text
        if len(text) < 400
        else f"... {text[begin : begin + 300]} ... at {text.rsplit(' at ', 1)[-1]}"
        for rank, text in calls.items()
    }
