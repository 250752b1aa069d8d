"""Which memory a rank holds, over time: each storage from its first tensor to its end, by what it
is for."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    """The memory of one storage. ``born``, ``died``: numbers of operators; ``where``: the line that
    made it; ``nbytes``: what it has now."""

    number: int
    maker: str
    phase: str
    born: int
    where: str
    nbytes: int = 0
    died: int | None = None
    ref: Any = None


class Step(NamedTuple):
    """The memory number ``block``, which ``made`` made, has so many bytes more, or less, in event
    number ``event`` of the step."""

    event: int
    category: str
    nbytes: int
    where: str
    block: int
    made: str


Held = dict[str, int]  # bytes by category


class _Change(NamedTuple):
    """``block`` has so many bytes more, or less, since event number ``event``."""

    event: int
    block: Block
    nbytes: int
    where: str


@dataclass(frozen=True)
class Memory:
    """The memory of one rank in a step, in bytes. ``at_peak``: by category; ``where``: the line
    that raised it to the peak; ``curve``: (number of events of the step before, bytes by category),
    in order. Of what the step itself has made by then: ``kept``, activations by the line that made
    them, and ``largest``, of each category the largest tensor and its line."""

    peak: int
    where: str
    at_peak: dict[str, int]
    kept: dict[str, int] = field(repr=False)
    largest: dict[str, tuple[int, str]] = field(repr=False)
    curve: list[tuple[int, dict[str, int]]] = field(repr=False)


class MemoryLog:
    """Notes storages that operators bring about. It works on tensors with and without data."""

    def __init__(self) -> None:
        self.count = 0  # of blocks
        self.changes: list[_Change] = []  # in the order in which they came
        self.live: dict[int, Block] = {}
        self.clock = 0  # of operators, views too
        self.event = 0  # the number of the event that is recorded
        self.marked: dict[int, str] = {}  # what is known of a block, by its number
        self.backwards: list[int] = []  # clocks at which backwards began and ended, in turn

    def see(self, t: Tensor, phase: str) -> None:
        """``t`` came out of an operator."""
        storage = t.untyped_storage()
        key = storage_id(storage)
        if key in self.live or t.device.type == "meta":
            return
        block = Block(self.count, _maker(), phase, self.clock, user_line())
        self.count += 1
        self.live[key] = block
        self._has(block, storage.nbytes(), block.where)
        block.ref = weakref.ref(storage, lambda _: self._gone(key, block))

    def _has(self, block: Block, nbytes: int, where: str = "") -> None:
        self.changes.append(_Change(self.event, block, nbytes - block.nbytes, where))
        block.nbytes = nbytes

    def _gone(self, key: int, block: Block) -> None:
        if self.live.get(key) is block:
            del self.live[key]
        block.died = self.clock
        self._has(block, 0)

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
                self._has(block, storage.nbytes(), user_line())
            return out

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = usual  # type: ignore[method-assign]

    def category(self, block: Block) -> str:
        """Known afterwards: what lives on from a forward into a backward was kept for it, what a
        backward leaves is a gradient."""
        known = self.marked.get(block.number)
        if known or block.maker == "gathered parameters":
            return known or block.maker
        if block.phase == "forward" and self._backwards_before(block.died) > (
            self._backwards_before(block.born)
        ):
            return "activations"
        if block.phase == "backward" and self._outlives_backward(block):
            return "gradients"
        return block.maker or "other"

    def _backwards_before(self, clock: int | None) -> int:
        """How many backwards have begun by then."""
        n = len(self.backwards) if clock is None else bisect_right(self.backwards, clock)
        return (n + 1) // 2

    def _outlives_backward(self, block: Block) -> bool:
        begun = bisect_right(self.backwards, block.born)
        end = self.backwards[begun] if begun < len(self.backwards) else self.clock
        return block.died is None or block.died > end

    def between(self, first: int, last: int) -> tuple[Held, list[Step]]:
        """What is held at the change number ``first``, by category, and the changes from there up
        to number ``last``."""
        held: Held = dict.fromkeys(CATEGORIES, 0)
        names: dict[int, str] = {}
        steps: list[Step] = []
        for i, change in enumerate(self.changes[:last]):
            block = change.block
            name = names.get(block.number)
            if name is None:
                name = names[block.number] = self.category(block)
            if i < first:
                held[name] += change.nbytes
            else:
                steps.append(Step(
                    change.event, name, change.nbytes, change.where, block.number,
                    block.where,
                ))  # fmt: skip
        return held, steps


def summary(held: Held, steps: Sequence[Step]) -> Memory:
    """Of a step that begins with what is ``held``."""
    now, total = dict(held), sum(held.values())
    peak, at_peak, where, until = total, dict(now), "what is there when the step begins", 0
    curve: list[tuple[int, Held]] = [(0, dict(now))]
    for i, step in enumerate(steps):
        now[step.category] += step.nbytes
        total += step.nbytes
        if total > peak:
            peak, at_peak, where, until = total, dict(now), step.where, i + 1
        if i + 1 == len(steps) or steps[i + 1].event != step.event:
            curve.append((step.event, dict(now)))
    return Memory(max(peak, 0), where, at_peak, *_tensors(steps[:until]), curve)


def _tensors(steps: Sequence[Step]) -> tuple[dict[str, int], dict[str, tuple[int, str]]]:
    """What there is after these steps: see ``Memory.kept`` and ``Memory.largest``."""
    sizes: Counter[tuple[int, str, str]] = Counter()
    for step in steps:
        sizes[step.block, step.category, step.made] += step.nbytes
    kept: Counter[str] = Counter()
    largest: dict[str, tuple[int, str]] = {}
    for (_, category, made), nbytes in sizes.items():
        if category == "activations" and nbytes > 0:
            kept[made] += nbytes
        if nbytes > largest.get(category, (0, ""))[0]:
            largest[category] = nbytes, made
    return dict(kept), largest


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
