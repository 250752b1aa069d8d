"""LocalCall: the information about a call that a local function receives, and its communication.

``ops`` itself never communicates: the dispatcher passes ``Collectives`` bound to the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from disttensor.core.layout import Axes, Box, Layout, members
from ops.factors import Letter


class LocalShardInfo(Protocol):
    """A tensor of the call on this rank: global shape and layout, and this rank's box."""

    @property
    def shape(self) -> Any: ...
    @property
    def layout(self) -> Any: ...
    @property
    def local_shape(self) -> tuple[int, ...]: ...
    @property
    def local_box(self) -> Box: ...


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """This rank's box of a tensor that is neither an argument nor a result of the call; with a
    layout, a ``LocalShardInfo``."""

    shape: tuple[int, ...]
    local_box: Box
    layout: Layout | None = None
    dtype: Any = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.local_box.shape


class DrawProtocol(Protocol):
    """The random numbers of one call. Replicas get equal numbers, shards different ones, and each
    call new ones."""

    invariant: bool  # by global position (``numbers``); else by torch's own generator (``seeded``)

    def numbers(self, kind: str, piece: Any, dtype: Any, device: Any, **options: Any) -> Any:
        """Returns this rank's piece of a tensor of random numbers. ``piece``: a LocalShardInfo or
        a LocalPiece; ``kind``: "uniform", "normal", "bernoulli", ...: a function of
        disttensor.random.distributions, with its options."""

    def seeded(self, axes: Axes, device: Any) -> AbstractContextManager[Any]:
        """Makes torch's generator draw alike, within the block, on ranks that have one place on
        ``axes``."""


class Collectives(Protocol):
    """Collectives for local functions, over mesh axes; differentiable, but for ``all_reduce``.

    A value that all ranks of the axes have is *shared* if all ranks use it in the same way: its
    gradient is the full gradient on each rank. Call ``pvary`` before a rank uses it together with
    its own piece: each rank then has a contribution to the gradient, and the backward sums them.
    """

    def psum(self, x: Any, axes: Axes) -> Any:
        """Returns the sum over the ranks, shared. Backward: ``pvary``."""

    def pvary(self, x: Any, axes: Axes) -> Any:
        """Returns a shared value, for a use that varies from rank to rank. Backward: ``psum``."""

    def all_gather(self, x: Any, axes: Axes) -> Any:
        """Returns [n, *x.shape], shared: every rank's x, of one shape, in order of the axes (major
        first). Backward: takes this rank's row."""

    def all_reduce(self, x: Any, op: str, axes: Axes) -> Any:
        """Returns the reduction on every rank. Raises RuntimeError if x needs a gradient."""

    def fetch(
        self,
        x: Any,
        dim: int,
        have: tuple[tuple[int, int], ...],
        want: tuple[tuple[int, int], ...],
        axes: Axes,
    ) -> Any:
        """Returns the range (start, stop) ``want[i]`` of ``dim`` on member i of the axes (major
        first). Member i holds its ``have[i]``; together they hold each wanted element once.
        Differentiable to every order."""

    def exchange(self, pieces: Sequence[Any], numels: Sequence[int], axes: Axes) -> Any:
        """Starts an exchange: sends ``pieces[i]`` to member i and receives ``numels[i]`` elements
        from it, all of one dtype. ``wait()`` of the result returns the received elements, flat, in
        the order of members. Not differentiable."""

    def exchange_rows(
        self, rows: Any, sent: Sequence[int], received: Sequence[int], axes: Axes
    ) -> Any:
        """Sends the first ``sent[0]`` rows to member 0, the next ``sent[1]`` to member 1, and so
        on, and returns ``received[i]`` rows from each member i, in order. Not differentiable."""

    def once(self, make: Callable[[], Any]) -> Any:
        """Returns the result of ``make``; in the recomputation of a checkpointed region, the result
        of the forward."""

    def reshard(self, x: Any, shape: Sequence[int], have: Layout, want: Layout, axes: Axes) -> Any:
        """Reshards a piece of a tensor of the global shape from layout ``have`` to ``want``. On
        ``axes`` over which it is replicated, its uses vary. Differentiable to every order."""

    def draw(self, default: str, generator: Any = None) -> DrawProtocol:
        """Starts the random numbers of the present call: once in each, on all ranks. ``default``:
        "invariant" or "fast"."""


@dataclass(slots=True)
class LocalCall:
    """inputs: the pieces as the rule requires them. outputs: the pieces of the results, whose dtype
    is not known yet. split: letter -> axes of several ranks."""

    func: Callable[..., Any]
    inputs: Sequence[LocalShardInfo]
    outputs: Sequence[LocalShardInfo]
    split: dict[Letter, Axes]
    mesh_shape: Axes
    coordinate: Axes
    collectives: Collectives

    def axes(self, *split_letters: Letter) -> Axes:
        """Returns the mesh axes that split these letters."""
        return tuple(a for letter in split_letters for a in self.split.get(letter, ()))

    def count(self, axes: Axes) -> int:
        return math.prod(self.mesh_shape[a] for a in axes)

    def member(self, axes: Axes) -> int:
        """This rank's number among the members of the axes (major first)."""
        number = 0
        for a in axes:
            number = number * self.mesh_shape[a] + self.coordinate[a]
        return number

    def members(self, axes: Axes) -> list[Axes]:
        """Returns the coordinates of the members of the axes (major first)."""
        return members(self.mesh_shape, axes, self.coordinate)

    def first(self, axes: Axes) -> bool:
        """Returns True if this rank is the first rank of the axes."""
        return all(self.coordinate[a] == 0 for a in axes)
