"""The collectives that this process has started, as PyTorch's flight recorder keeps them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from disttensor.launching.script import is_library
from disttensor.torch_private import flight_record, members_of

KEPT = 2000  # collectives that the recorder keeps
_SENT = 32  # collectives of each group that a rank posts
# Kinds for which ranks may give tensors of other sizes.
_UNEVEN = {"all_to_all", "gather", "scatter", "all_gather", "allgather", "alltoall"}


class StartedCollective(NamedTuple):
    """The ``number``-th collective of the group ``ranks``. ``words``: what all members start alike;
    ``age``: seconds since its start; ``is_done``: it has ended."""

    group: str
    ranks: list[int]
    number: int
    words: str
    line: str
    age: float
    is_done: bool

    def __str__(self) -> str:
        return f"{self.words} (#{self.number} of {show_ranks(self.ranks)})"


def start_recorder() -> None:
    """Makes torch record collectives, in worlds that start later."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT))


def collectives() -> list[StartedCollective]:
    """Returns the last collectives of each group, and all that have not ended; oldest first."""
    groups, kept = members_of(), []
    newer: Counter[str] = Counter()
    for entry in reversed(flight_record()):
        name, _ = entry["process_group"]
        if entry["is_p2p"] or name not in groups:
            continue
        newer[name] += 1
        if newer[name] <= _SENT or not _is_done(entry):
            kept.append(_collective(entry, name, groups[name]))
    return kept[::-1]


def _is_done(entry: dict[str, Any]) -> bool:
    return bool(entry["retired"] or entry["state"] == "completed")


def _collective(entry: dict[str, Any], name: str, ranks: list[int]) -> StartedCollective:
    kind = entry["profiling_name"].partition(":")[2].lstrip("_")
    words = kind
    if entry["input_sizes"] and kind not in _UNEVEN:
        types = " and ".join(dict.fromkeys(t.lower() for t in entry["input_dtypes"]))
        words += f" of {' and '.join(map(str, entry['input_sizes']))} {types}"
    age = time.time() - entry["time_created_ns"] / 1e9
    line = _line((f["filename"], f["line"]) for f in entry.get("frames", ()))
    return StartedCollective(
        name, ranks, entry["collective_seq_id"], words, line, round(age, 1), _is_done(entry)
    )


def _line(frames: Iterable[tuple[str, int]]) -> str:
    """Returns the innermost line of the user's program."""
    found = next(((file, line) for file, line in frames if not is_library(file)), None)
    return "" if found is None else f"{found[0]}:{found[1]}"


def show_ranks(ranks: Iterable[int]) -> str:
    """Returns "rank 3", "ranks 0 to 7" or "ranks 0, 4, 8"."""
    every = sorted(ranks)
    if len(every) == 1:
        return f"rank {every[0]}"
    if every == list(range(every[0], every[-1] + 1)) and len(every) > 2:
        return f"ranks {every[0]} to {every[-1]}"
    return f"ranks {', '.join(map(str, every))}"
