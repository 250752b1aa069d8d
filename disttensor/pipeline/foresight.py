"""What a micro-batch will receive is asked for before its forward begins, so that it comes while
another one is computed.

Nothing says it before the program of the micro-batch has run that far. But it is what the one
before has received, if both are given the same but for the numbers in their tensors. So each asks
for the next one, as its messages say by their tags whose they are. A program that does something
else all the same finds that out alone: its messages have other sizes or places, and come as ever.
From then on nothing is asked for ahead.
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
    """Of a run: ``row`` is what this rank's stage does, in this order."""

    def __init__(self, row: Iterable[Action], running: list[MicroBatch]) -> None:
        firsts = [a.micro_batch for a in row if a.kind == "F" and a.chunk == 0]
        fits = len({m.channel for m in running}) == len(running)  # else some count together
        self.next = dict(pairwise(firsts)) if fits else {}
        self.running = running
        self.kinds: dict[int, Any] = {}
        self.asked: dict[int, list[p2p.Early]] = {}

    def after(self, number: int) -> None:
        """The first visit of this micro-batch is over: ask for what the next one receives."""
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
    """Equal for micro-batches with which a program does the same, as far as that can be told.

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
