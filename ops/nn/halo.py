"""Halo: a dim that a window slides over stays split, and each rank fetches the elements of other
ranks that its windows read.

Input and output are both split like torch.chunk, each by its own size. The windows of a piece of
the output read one range of the input; the part of it that other ranks hold is the halo. With a
large window, or if the pieces of input and output do not lie over each other, it comes from several
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from disttensor.core.layout import Axes, Range, box_at, chunk
from ops.local import LocalCall


@dataclass(frozen=True, slots=True)
class Window:
    """Output i of ``made`` reads the inputs from ``i * stride - before`` on, ``reach`` positions
    (holes included); the input has ``before`` and ``after`` zeros around its ``size``."""

    size: int
    made: int
    stride: int
    reach: int
    before: int
    after: int

    def reads(self, start: int, length: int) -> Range:
        """Returns the inputs that outputs ``start`` to ``start + length`` read, with padding."""
        if not length:
            return (0, 0)
        first = start * self.stride - self.before
        return first, first + (length - 1) * self.stride + self.reach

    def within(self, reads: Range) -> Range:
        """Returns the positions of ``reads`` inside the input."""
        return min(max(reads[0], 0), self.size), min(max(reads[1], 0), self.size)

    def padding(self, reads: Range) -> tuple[int, int]:
        """Returns how many zeros ``reads`` has before and after the positions inside the input."""
        start, stop = reads
        return max(0, min(stop, 0) - start), max(0, stop - max(start, self.size))

    def halo_share(self, parts: int) -> float:
        """Returns the largest share of the input that a rank has to fetch when it is cut into
        ``parts``."""
        most = 0
        for i in range(parts):
            start, stop = self.within(self.reads(*chunk(self.made, parts, i)))
            offset, length = chunk(self.size, parts, i)
            held = max(0, min(stop, offset + length) - max(start, offset))
            most = max(most, stop - start - held)
        return most / max(1, self.size)


@dataclass(frozen=True, slots=True)
class Halo:
    """How this rank extends its piece of a dim: by elements of other ranks, then by ``zeros``."""

    fetch: Callable[[Any], Any]
    zeros: tuple[int, int]


def ranges_of(call: LocalCall, size: int, axes: Axes) -> tuple[Range, ...]:
    """Returns the range of each member of ``axes`` (major first) in a dim that they split."""

    boxes = [box_at((size,), (axes,), call.mesh_shape, at) for at in call.members(axes)]
    return tuple((box.offset[0], box.offset[0] + box.shape[0]) for box in boxes)


def halo(call: LocalCall, dim: int, axes: Axes, window: Window) -> Halo:
    """Returns the plan for ``dim`` (of the first input and the first result) that ``axes``
    split."""
    have = ranges_of(call, window.size, axes)
    reads = [window.reads(a, b - a) for a, b in ranges_of(call, window.made, axes)]
    want = tuple(window.within(r) for r in reads)
    mine = reads[call.member(axes)]
    return Halo(lambda x: call.collectives.fetch(x, dim, have, want, axes), window.padding(mine))
