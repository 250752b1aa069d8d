"""Which memory a rank holds, over time: each storage from its first tensor to its end, by what it
is for."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from disttensor.errors import user_line
from disttensor.torch_private import storage_id

Tensor = torch.Tensor

CATEGORIES = (
    "parameters", "gathered parameters", "gradients", "optimizer state", "activations",
    "communication", "other",
)  # fmt: skip

# What the engine makes is for what the file says that makes it.
_FILES = {
    "/disttensor/fsdp/all_gather_buffer.py": "gathered parameters",
    "/disttensor/fsdp/reduce.py": "communication",
    "/disttensor/fsdp/bucket.py": "communication",
    "/disttensor/comm/": "communication",
    "/reshard/": "communication",
}
_DEPTH = 12  # frames that are looked at


@dataclass(eq=False, slots=True)
class Block:
    """The memory of one storage. ``born``, ``died``: numbers of events; ``changes``: the bytes that
    it has from an event on."""

    number: int
    where: str
    maker: str
    phase: str
    born: int
    changes: list[tuple[int, int]]
    died: int | None = None
    ref: Any = None


@dataclass(frozen=True)
class Memory:
    """The memory of one rank in a step, in bytes. ``at_peak``: by category; ``where``: the line
    that raised it to the peak; ``curve``: (event, bytes by category), in the order of events."""

    peak: int
    where: str
    at_peak: dict[str, int]
    curve: list[tuple[int, dict[str, int]]] = field(repr=False)


class MemoryLog:
    """Notes storages that operators bring about. It works on tensors with and without data."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.live: dict[int, Block] = {}
        self.clock = 0  # the number of the event that runs
        self.marked: dict[int, str] = {}  # what is known of a block, by its number
        self.backwards: list[int] = []  # clocks at which backwards began and ended, in turn

    def see(self, t: Tensor, phase: str) -> None:
        """``t`` came out of an operator."""
        storage = t.untyped_storage()
        key = storage_id(storage)
        if key in self.live or t.device.type == "meta":
            return
        block = Block(
            len(self.blocks), user_line(), _maker(), phase, self.clock,
            [(self.clock, storage.nbytes())],
        )  # fmt: skip
        self.blocks.append(block)
        self.live[key] = block
        block.ref = weakref.ref(storage, lambda _: self._gone(key, block))

    def _gone(self, key: int, block: Block) -> None:
        if self.live.get(key) is block:
            del self.live[key]
        block.died = self.clock

    def mark(self, t: Tensor, category: str) -> None:
        """The memory of ``t`` is of this category, whoever made it."""
        block = self.live.get(storage_id(t.untyped_storage()))
        if block is not None:
            self.marked[block.number] = category

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Sees storages that are resized, as gathered parameters are when they are freed."""
        usual = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            out = usual(storage, size)
            block = self.live.get(storage_id(storage))
            if block is not None:
                block.changes.append((self.clock, storage.nbytes()))
            return out

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = usual  # type: ignore[method-assign]

    def category(self, block: Block) -> str:
        """Known afterwards: what lives on from a forward into a backward was kept for it, what a
        backward leaves is a gradient."""
        known = self.marked.get(block.number) or block.maker
        if known:
            return known
        if block.phase == "forward" and self._backwards_before(block.died) > (
            self._backwards_before(block.born)
        ):
            return "activations"
        if block.phase == "backward" and self._outlives_backward(block):
            return "gradients"
        return "other"

    def _backwards_before(self, clock: int | None) -> int:
        """How many backwards have begun by then."""
        n = len(self.backwards) if clock is None else bisect_right(self.backwards, clock)
        return (n + 1) // 2

    def _outlives_backward(self, block: Block) -> bool:
        begun = bisect_right(self.backwards, block.born)
        end = self.backwards[begun] if begun < len(self.backwards) else self.clock
        return block.died is None or block.died > end

    def summary(self, first: int, last: int) -> Memory:
        """Of the events from number ``first`` up to ``last``."""
        steps: list[tuple[int, str, int, str]] = []
        for block in self.blocks:
            if block.died is not None and block.died < first:
                continue
            category, before = self.category(block), 0
            for clock, nbytes in (*block.changes, (block.died, 0)):
                if clock is not None and nbytes != before:
                    steps.append((max(clock, first - 1), category, nbytes - before, block.where))
                    before = nbytes
        steps.sort(key=lambda s: s[0])
        return _summed([s for s in steps if s[0] <= last], first)


def _summed(steps: Sequence[tuple[int, str, int, str]], first: int) -> Memory:
    now, total, peak, at_peak, where = dict.fromkeys(CATEGORIES, 0), 0, 0, {}, ""
    curve: list[tuple[int, dict[str, int]]] = []
    for i, (clock, category, change, line) in enumerate(steps):
        now[category] += change
        total += change
        more = i + 1 < len(steps)
        if clock < first and more and steps[i + 1][0] < first:
            continue  # what is there when the step begins counts at once
        if total > peak:
            peak, at_peak, where = total, dict(now), line
        if not more or steps[i + 1][0] != clock:
            curve.append((clock, dict(now)))
    return Memory(peak, where, at_peak, curve)


def _maker() -> str:
    """The category that the innermost of the engine's files says; "" for others."""
    frame: Any = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return ""
        file = frame.f_code.co_filename
        for part, category in _FILES.items():
            if part in file:
                return category
        frame = frame.f_back
    return ""
