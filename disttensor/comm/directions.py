"""A communicator for each direction of a pair of ranks, where the backend needs it.

NCCL carries out what two ranks post to one communicator in the order of posting: a send that comes
after a receive would wait until that has come, and the other rank may wait for just this send. So
there what goes from a to b has a process group of the two, and what goes from b to a another one.

Both are made when the two first have something to do with each other, whichever way. Transfers come
in the order of the program on all ranks, and those of one transfer in the order of the pairs, so
that of the ranks that wait for others to make a group the first pair always meets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from disttensor.comm.groups import process_group
from disttensor.comm.process_group import is_nccl, world
from disttensor.runtime import current_runtime


def needed(device: torch.device) -> bool:
    """For messages of tensors on ``device``: gloo, which carries those on a CPU, has tags."""
    return device.type != "cpu" and is_nccl()


def meet(peers: Iterable[int]) -> None:
    """Before the first message between this rank and each of ``peers``, which come here too."""
    me, known = world()[0], current_runtime().groups
    for pair in sorted({(min(me, peer), max(me, peer)) for peer in peers if peer != me}):
        for sender in pair:
            if (pair, _lane(sender)) not in known:
                made = process_group(pair, (f"{pair[0]} <-> {pair[1]}",), _lane(sender))
                dist.barrier(made)  # a batch of messages may not be the first thing in a group


def group(sender: int, receiver: int) -> Any:
    """What goes from ``sender`` to ``receiver``, after ``meet``."""
    pair = min(sender, receiver), max(sender, receiver)
    return current_runtime().groups[pair, _lane(sender)]


def _lane(sender: int) -> str:
    return f"messages from {sender}"
