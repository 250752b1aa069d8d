"""A communicator for each direction between two ranks, on backends that need it.

NCCL runs the operations that two ranks post to one communicator in the order of posting. A send
posted after a receive would wait for the receive, while the other rank may wait for this send. So
messages from a to b have a process group of the two ranks, and messages from b to a another one.

Both groups are created at the first transfer between the two ranks, in either direction. Transfers
have the same order on all ranks, and so do the pairs of one transfer. So among the ranks that wait
to create a group, the first pair always meets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from disttensor.comm.groups import process_group
from disttensor.comm.process_group import is_nccl, world
from disttensor.runtime import current_runtime


def needs_directions(device: torch.device) -> bool:
    """Returns True if messages on ``device`` use NCCL. CPU tensors use gloo, which has tags."""
    return device.type != "cpu" and is_nccl()


def create_directions(peers: Iterable[int]) -> None:
    """Creates the groups of this rank and each of ``peers``, which make this call too."""
    me, known = world()[0], current_runtime().groups
    for pair in sorted({(min(me, peer), max(me, peer)) for peer in peers if peer != me}):
        for sender in pair:
            if (pair, _purpose_of(sender)) not in known:
                made = process_group(pair, (f"{pair[0]} <-> {pair[1]}",), _purpose_of(sender))
                dist.barrier(made)  # a batch of messages may not be a group's first operation


def group(sender: int, receiver: int) -> Any:
    """Returns the group of messages from ``sender`` to ``receiver``, created by
    ``create_directions``."""
    pair = min(sender, receiver), max(sender, receiver)
    return current_runtime().groups[pair, _purpose_of(sender)]


def _purpose_of(sender: int) -> str:
    return f"messages from {sender}"
