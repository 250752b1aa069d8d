"""Posts the receives of a micro-batch before its forward begins, so that its messages arrive while
another micro-batch is computed.

The receives of a program are not known before it runs. But if two micro-batches differ only in the
numbers in their tensors, the second receives the same messages as the first. So each micro-batch
posts the receives of the next one; the tags of messages name their micro-batch. If a program
receives other messages after all, its own rank notices: they have other sizes or places, and are
received as usual. From then on no receives are posted early.
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
from reshard.cross_mesh import expect


class Foresight:
    """Early receives of one run. ``row``: the actions of this rank's stage, in order."""

    def __init__(self, row: Iterable[Action], running: list[MicroBatch]) -> None:
        firsts = [a.micro_batch for a in row if a.kind == "F" and a.chunk == 0]
        fits = len({m.channel for m in running}) == len(running)  # else some share a channel
        self.next = dict(pairwise(firsts)) if fits else {}
        self.running = running
        self.kinds: dict[int, Any] = {}
        self.asked: dict[int, list[p2p.Early]] = {}

    def after(self, number: int) -> None:
        """Posts the receives of the next micro-batch, after the first visit of this one."""
        one, now = self.running[number], current_runtime()
        if p2p.in_vain(self.asked.pop(number, ())):
            now.foresees = False
        then = self.next.get(number)
        if then is None or not one.tape.came or not now.foresees:
            return
        other = self.running[then]
        if self._kind(number) != self._kind(then):
            return
        before, after = (one.channel, one.begins), (other.channel, p2p.transfers(other.channel))
        asked = self.asked[then] = []
        for src, dst, tag in one.tape.came:
            asked += expect(src, dst, p2p.moved_tag(tag, before, after))

    def _kind(self, number: int) -> Any:
        if number not in self.kinds:
            self.kinds[number] = kind_of(self.running[number].batch)
        return self.kinds[number]


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
