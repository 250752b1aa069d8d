"""Posts the receives of a micro-batch before its forward begins, so that its messages arrive while
another micro-batch is computed.

The receives of a program are not known before it runs. But if two micro-batches differ only in the
numbers in their tensors, the second receives the same messages as the first. So each micro-batch
posts the receives of the next one; the tags of messages name their micro-batch. If a micro-batch
receives other messages, its rank detects this by their sizes or places, and receives them as usual.
From then on no receives are posted early.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch

from disttensor.comm import p2p
from disttensor.pipeline.action import Action
from disttensor.pipeline.micro_batch import MicroBatch
from disttensor.runtime import current_runtime
from disttensor.tensor.dist_tensor import DistTensor
from reshard.cross_mesh import post_early_receives


class EarlyReceives:
    """The early receives of one run. ``row``: the actions of this rank's stage, in order."""

    def __init__(self, row: Iterable[Action], running: list[MicroBatch]) -> None:
        firsts = [a.micro_batch for a in row if a.kind == "F" and a.chunk == 0]
        fits = len({m.channel for m in running}) == len(running)  # otherwise some share a channel
        self.next = {i: running[j] for i, j in pairwise(firsts)} if fits else {}
        self.kinds = {m.number: kind_of(m.batch) for m in running}
        self.posted: dict[int, list[p2p.Early]] = {}

    def post_next(self, one: MicroBatch) -> None:
        """Posts the receives of the next micro-batch, after the first visit of this one."""
        now, then = current_runtime(), self.next.get(one.number)
        if p2p.is_unclaimed(self.posted.pop(one.number, ())):
            now.posts_early_receives = False
        if then is None or not now.posts_early_receives:
            return
        if self.kinds[one.number] != self.kinds[then.number]:
            return
        before = one.channel, one.first_transfer
        after = then.channel, p2p.transfers(then.channel)
        posted = self.posted[then.number] = []
        for src, dst, tag in one.graph.first_receives:
            posted += post_early_receives(src, dst, p2p.tag_in_channel(tag, before, after))


def kind_of(batch: Any) -> Any:
    """Returns equal values for micro-batches with which a program sends the same messages, as far
    as shapes, dtypes and constants decide this.

    >>> kind_of({"tokens": torch.ones(2, 3)}) == kind_of({"tokens": torch.zeros(2, 3)})
    True
    >>> kind_of([torch.ones(2), 5]) == kind_of([torch.ones(2), 6])
    False
    """
    if isinstance(batch, DistTensor):
        return batch.spec
    if isinstance(batch, torch.Tensor):
        return batch.shape, batch.dtype
    if isinstance(batch, (list, tuple)):
        return type(batch), [kind_of(part) for part in batch]
    if isinstance(batch, dict):
        return type(batch), [(key, kind_of(part)) for key, part in batch.items()]
    if isinstance(batch, float):
        return float
    return batch if isinstance(batch, (int, str, bool, type(None))) else (object(),)
