"""The memory of a rank over time: each storage from its first tensor until it is freed, by
category."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch

from disttensor.comm.log import CommRecord
from disttensor.errors import user_line
from disttensor.simulate.events import Name
from disttensor.torch_private import storage_id

Tensor = torch.Tensor

CATEGORIES = (
    "parameters", "gathered parameters", "gradients", "optimizer state", "activations",
    "communication", "other",
)  # fmt: skip

# The category of a storage that the engine makes, by the file that makes it.
_FILES = {
    "/disttensor/fsdp/all_gather_buffer.py": "gathered parameters",
    "/disttensor/gradients/reduce.py": "communication",
    "/disttensor/gradients/rows.py": "communication",
    "/disttensor/comm/": "communication",
    "/reshard/": "communication",
}
_DEPTH = 12  # frames that are searched


@dataclass(eq=False, slots=True)
class StorageRecord:
    """One storage. ``born``, ``died``: numbers of operators; ``where``: the line that made it;
    ``nbytes``: its present size; ``marked``: its category, if the program shows it."""

    maker: str
    phase: str
    born: int
    where: str
    nbytes: int = 0
    died: int | None = None
    marked: str = ""
    ref: Any = None


class MemoryChange(NamedTuple):
    """Storage ``block`` (a number or name), made at line ``made``, grows by ``nbytes`` (or shrinks,
    if negative)."""

    category: str
    nbytes: int
    where: str
    block: Name
    made: str


Held = dict[str, int]  # bytes by category


class _Change(NamedTuple):
    """A MemoryChange whose category is not known yet."""

    block: StorageRecord
    nbytes: int
    where: str


@dataclass(frozen=True)
class Memory:
    """The memory of one rank in a step, in bytes.

    peak     the largest sum of all storages
    where    the line that raised it to the peak
    at_peak  the bytes at the peak, by category
    kept     activations of the step at the peak, by the line that made them
    largest  the largest tensor of the step at the peak, and its line, of each category
    curve    (number of events before, bytes by category), in order
    """

    peak: int
    where: str
    at_peak: dict[str, int]
    kept: dict[str, int] = field(repr=False)
    largest: dict[str, tuple[int, str]] = field(repr=False)
    curve: list[tuple[int, dict[str, int]]] = field(repr=False)


class MemoryLog:
    """Records the storages that operators make. It works on tensors with and without data.

    log  the changes, in order; StepRecorder adds the events between them
    """

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.live: dict[int, StorageRecord] = {}
        self.held: dict[StorageRecord, int] = {}  # bytes of each storage when the step begins
        self.clock = 0  # counts operators, views too
        self.backwards: list[int] = []  # clocks at which backwards began and ended, in turn

    def begin_step(self) -> None:
        self.held = {block: block.nbytes for block in self.live.values()}
        self.log.clear()

    def see(self, t: Tensor, phase: str) -> None:
        """Records the storage of ``t``, the result of an operator."""
        storage = t.untyped_storage()
        key = storage_id(storage)
        if key in self.live or t.device.type == "meta":
            return
        block = StorageRecord(_maker(), phase, self.clock, user_line())
        self.live[key] = block
        self._has(block, storage.nbytes(), block.where)
        block.ref = weakref.ref(storage, lambda _: self._gone(key, block))

    def _has(self, block: StorageRecord, nbytes: int, where: str = "") -> None:
        self.log.append(_Change(block, nbytes - block.nbytes, where))
        block.nbytes = nbytes

    def _gone(self, key: int, block: StorageRecord) -> None:
        if self.live.get(key) is block:
            del self.live[key]
        block.died = self.clock
        self._has(block, 0)

    def mark(self, t: Tensor, category: str) -> None:
        """Sets the category of the storage of ``t``."""
        block = self.live.get(storage_id(t.untyped_storage()))
        if block is not None:
            block.marked = category

    def resizing(self) -> AbstractContextManager[Any]:
        """Records storages that are resized, as gathered parameters are when they are freed."""
        usual = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            out = usual(storage, size)
            block = self.live.get(storage_id(storage))
            if block is not None:
                self._has(block, storage.nbytes(), user_line())
            return out

        return mock.patch.object(torch.UntypedStorage, "resize_", resize_)

    def category(self, block: StorageRecord) -> str:
        """Returns the category of a storage at the end of the step. A storage that lives from a
        forward into a backward is an activation; a storage that a backward leaves is a gradient."""
        if block.marked or block.maker == "gathered parameters":
            return block.marked or block.maker
        if block.phase == "forward" and self._backwards_before(block.died) > (
            self._backwards_before(block.born)
        ):
            return "activations"
        if block.phase == "backward" and self._outlives_backward(block):
            return "gradients"
        return block.maker or "other"

    def _backwards_before(self, clock: int | None) -> int:
        """Returns the number of backwards that began up to ``clock``."""
        n = len(self.backwards) if clock is None else bisect_right(self.backwards, clock)
        return (n + 1) // 2

    def _outlives_backward(self, block: StorageRecord) -> bool:
        begun = bisect_right(self.backwards, block.born)
        end = self.backwards[begun] if begun < len(self.backwards) else self.clock
        return block.died is None or block.died > end

    def step(self, last: int) -> tuple[Held, list[Any]]:
        """Returns the bytes by category when the step begins, and the first ``last`` entries of the
        log, with MemoryChanges. Storages that are older than the step have negative numbers."""
        held: Held = dict.fromkeys(CATEGORIES, 0)
        for block, nbytes in self.held.items():
            held[self.category(block)] += nbytes
        numbers = {block: -1 - i for i, block in enumerate(self.held)}
        out: list[Any] = []
        for entry in self.log[:last]:
            if isinstance(entry, _Change):
                block, nbytes, where = entry
                number = numbers.setdefault(block, len(numbers))
                entry = MemoryChange(self.category(block), nbytes, where, number, block.where)
            out.append(entry)
        return held, out


def summary(held: Held, log: Sequence[Any]) -> Memory:
    """Returns the memory of a step that begins with the bytes ``held``. ``log``: its events and
    MemoryChanges."""
    now, total = dict(held), sum(held.values())
    peak, at_peak, where, until = total, dict(now), "the begin of the step", 0
    curve: list[tuple[int, Held]] = [(0, dict(now))]
    events, last = 0, -1
    for i, entry in enumerate(log):
        if not isinstance(entry, MemoryChange):
            events += not isinstance(entry, CommRecord)
            continue
        now[entry.category] += entry.nbytes
        total += entry.nbytes
        if total > peak:
            peak, at_peak, where, until = total, dict(now), entry.where, i + 1
        if last == events:  # several changes before one event are one point
            curve.pop()
        curve.append((events, dict(now)))
        last = events
    changes = [entry for entry in log[:until] if isinstance(entry, MemoryChange)]
    return Memory(max(peak, 0), where, at_peak, *_tensors(changes), curve)


def _tensors(changes: Sequence[MemoryChange]) -> tuple[dict[str, int], dict[str, tuple[int, str]]]:
    """Returns ``Memory.kept`` and ``Memory.largest`` after these changes."""
    sizes: Counter[tuple[Name, str, str]] = Counter()
    for change in changes:
        sizes[change.block, change.category, change.made] += change.nbytes
    kept: Counter[str] = Counter()
    largest: dict[str, tuple[int, str]] = {}
    for (_, category, made), nbytes in sizes.items():
        if category == "activations" and nbytes > 0:
            kept[made] += nbytes
        if nbytes > largest.get(category, (0, ""))[0]:
            largest[category] = nbytes, made
    return dict(kept), largest


def _maker() -> str:
    """Returns the category of the innermost file of the engine on the stack; "" for others."""
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
