"""Call: what a local function may know of its call, and the communication it may do.

``ops`` itself never communicates: the dispatcher hands in a ``Reach`` bound to the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from disttensor.layout import Axes
from ops.factors import Letter


class Piece(Protocol):
    """A tensor of the call on this rank: global shape and layout, and this rank's box."""

    shape: Any
    layout: Any
    local_shape: tuple[int, ...]
    local_offset: tuple[int, ...]


class Reach(Protocol):
    """Collectives for local functions, over mesh axes, differentiable where it says so."""

    def all_reduce(self, x: Any, op: str, axes: Axes) -> Any:
        """The reduction on every rank. "sum" is differentiable (the gradient of x is that of the result)."""

    def all_gather(self, x: Any, axes: Axes) -> Any:
        """[n, *x.shape], members in order of the axes (major first). Not differentiable."""


@dataclass(slots=True)
class Call:
    """inputs, outputs: the pieces as wanted and given (dtype of outputs is not known yet); split: letter -> axes."""

    func: Callable[..., Any]
    inputs: Sequence[Piece]
    outputs: Sequence[Piece]
    split: dict[Letter, Axes]
    mesh_shape: Axes
    coordinate: Axes
    reach: Reach

    def axes(self, *split_letters: Letter) -> Axes:
        """The mesh axes that split these letters."""
        return tuple(a for letter in split_letters for a in self.split.get(letter, ()))

    def count(self, axes: Axes) -> int:
        n = 1
        for a in axes:
            n *= self.mesh_shape[a]
        return n

    def first(self, axes: Axes) -> bool:
        """Is this rank the first one of the axes?"""
        return all(self.coordinate[a] == 0 for a in axes)
