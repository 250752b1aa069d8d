"""Debug mode: before a collective runs, its members compare which call each is about to make.

The comparison uses the store of the process group and not the collective itself, so it works even
if ranks disagree. The error says which rank makes which call, and names the ranks that did not
arrive.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from disttensor.checks import check_positive
from disttensor.comm.process_group import world_store
from disttensor.errors import MismatchError, user_line
from disttensor.runtime import current_runtime

# Global to the process instead of context variables: collectives of a backward are compared too,
# and run in autograd's threads, which have their own contexts.
enabled = os.environ.get("DISTTENSOR_DEBUG", "") not in ("", "0")
timeout = timedelta(seconds=float(os.environ.get("DISTTENSOR_DEBUG_SECONDS", "30")))


class debug:
    """``with debug(seconds=30):`` (or ``DISTTENSOR_DEBUG=1``): ranks compare each collective before
    it runs.

    Enter and leave the block on all ranks alike. Raises MismatchError, naming the ranks, if they
    differ.

    >>> with dt.debug(seconds=10):
    ...     dt.ones(4, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()]).sum().item()
    4.0
    """

    def __init__(self, seconds: float = 30.0) -> None:
        check_positive("debug: seconds", seconds, "a positive number")
        self.seconds = seconds

    def __enter__(self) -> debug:
        global enabled, timeout
        self.before = enabled, timeout
        enabled, timeout = True, timedelta(seconds=self.seconds)
        return self

    def __exit__(self, *exc: object) -> None:
        global enabled, timeout
        enabled, timeout = self.before


def compare(group: Any, what: str) -> None:
    store = world_store()
    rank = group.ranks[group.index]
    of_group = f"calls/{'-'.join(map(str, group.ranks))}/{'+'.join(group.axes)}/{group.lane}"
    calls = current_runtime().calls
    call, calls[of_group] = calls[of_group], calls[of_group] + 1
    name = f"{of_group}/{call}"
    mine = f"{what} at {user_line()}"
    store.set(f"last/{rank}", f"{'+'.join(group.axes)} #{call}: {mine}")
    store.set(f"{name}/{rank}", mine)
    seen = {}
    for other in group.ranks:
        try:
            store.wait([f"{name}/{other}"], timeout)
        except Exception:
            last = "nothing yet"
            if store.check([f"last/{other}"]):
                last = store.get(f"last/{other}").decode()
            raise MismatchError(
                f"rank {rank} is at {mine}, over {'+'.join(group.axes)} (ranks "
                f"{list(group.ranks)}), but rank {other} did not come within "
                f"{timeout.total_seconds():g} s; its last collective: {last}"
            ) from None
        seen[other] = store.get(f"{name}/{other}").decode()
    if call:  # all members have reached this call, so all have read the entry of the previous one
        store.delete_key(f"{of_group}/{call - 1}/{rank}")
    kinds = {r: text.split(" at ")[0] for r, text in seen.items()}
    if len(set(kinds.values())) > 1:
        lines = "\n".join(f"  rank {r}: {text}" for r, text in differing(seen).items())
        raise MismatchError(
            f"ranks disagree about the next collective over {'+'.join(group.axes)}:\n{lines}"
        )


def differing(texts: dict[int, str]) -> dict[int, str]:
    """Shortens long texts ("what at line") to the part around the first difference."""
    alike = zip(*texts.values(), strict=False)
    cut = next((i for i, letters in enumerate(alike) if len(set(letters)) > 1), 0)
    begin = max(0, cut - 60)

    def short(text: str) -> str:
        if len(text) < 400:
            return text
        return f"... {text[begin : begin + 300]} ... at {text.rsplit(' at ', 1)[-1]}"

    return {rank: short(text) for rank, text in texts.items()}
