"""Compares reads of values between ranks before a value is used.

A rank that reads a value alone (``if rank == 0: print(loss.item())``) sends a message that the
others do not send. It may meet a message of their next read, of the same kind and size, and both
would go on with wrong numbers. So the ranks exchange eight bytes: a hash of the spec of the tensor
and of the line, plus the number of errors that calls have raised on this rank. If a rank has caught
an error alone, messages of two calls may have met before the read.
"""

from __future__ import annotations

import os
import sys
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from disttensor.cache import cached
from disttensor.comm import compare_collectives, failure_watch
from disttensor.comm.collective_call import call_error, gather_rows
from disttensor.comm.groups import Ended, Group
from disttensor.comm.lone_failure import errors_with
from disttensor.comm.process_group import is_fake
from disttensor.comm.reports import Topic
from disttensor.errors import MismatchError, Place, show_place, user_place
from disttensor.observe import observers
from disttensor.runtime import current_runtime, last_runtime
from disttensor.torch_private import (
    object_device,
    without_function_modes,
    without_modes,
)

_READ: Topic[str] = Topic("read")  # what the rank reads, and where
_PATIENCE = 4.0  # seconds for the other ranks to post their reads


def compare_read(spec: Any) -> None:
    """Raises MismatchError, naming the ranks and their lines, if a rank that this one communicates
    with does not read a tensor with ``spec`` at this line of the user's program."""
    if is_fake() or compare_collectives.enabled:  # compares the collective of the read
        return
    for o in observers:
        o.compare_read()
    number, words = _read(spec, user_place(sys._getframe(1)))
    for axis in sorted(spec.varies):
        pg = spec.mesh.group((axis,)).pg
        if isinstance(pg, Ended):
            raise pg.error()
        group = spec.mesh.group((axis,), "reads")  # its messages meet no others
        if group.size == 1:
            continue
        errors = errors_with(group.ranks) if last_runtime().raises else []
        mine = number + len(errors)
        with without_function_modes(), without_modes():  # they see the read that follows
            numbers = _exchange(mine, group)
        if any(other != mine for other in numbers):
            _raise(words + (f", after an error: {errors[-1]}" if errors else ""), group)


def _exchange(number: int, group: Group) -> list[int]:
    """Returns the number of each member. Observers do not see the message."""
    mine = torch.tensor([number], device=object_device(group.pg))
    memory = np.empty(group.size, dtype=np.int64)  # read without torch, which may forbid it
    rows = torch.from_numpy(memory).to(mine.device)
    try:
        gather_rows(rows, mine, group, "read")
    except MismatchError:
        raise
    except RuntimeError as error:
        raise call_error("a read", group, error) from error
    numbers: list[int] = memory.tolist() if rows.is_cpu else rows.tolist()
    return numbers


@cached(4096)
def _read(spec: Any, place: Place) -> tuple[int, str]:
    """Returns a hash, the same in every process and on every machine, and a description."""
    where = place and (os.path.basename(place[0]), place[1])
    digest = blake2b(f"{spec!r} {where}".encode(), digest_size=7).digest()
    return int.from_bytes(digest), f"{spec!r} at {show_place(place)}"


def _raise(words: str, group: Group) -> None:
    rank, reads = group.ranks[group.index], {}
    watcher = failure_watch.watcher_of(current_runtime())
    if watcher is not None:
        _READ.post(watcher, words)
        reads = _READ.gather(watcher, sorted(group.ranks), _PATIENCE)
    every = {**dict.fromkeys(sorted(group.ranks), "something else"), rank: words, **reads}
    text = (
        f"ranks read different values: {', '.join(f'rank {r}: {t}' for r, t in every.items())}. "
        "A read of a value that is split or pending is a message: all ranks read it, on one line. "
        "value = loss.item() stands outside of if rank == 0, and print(value) inside"
    )
    failure_watch.post(text)
    raise MismatchError(text)
