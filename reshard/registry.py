"""The registry: the function that moves data between two placement types, and the bytes that it
sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from disttensor.cache import clear_decisions
from disttensor.comm.collectives import start_async
from disttensor.comm.work import Work, finished
from disttensor.core.placement import Partial, Placement, Replicate, Shard
from disttensor.core.spec import DistSpec

T = TypeVar("T")
Tensor = torch.Tensor
Axes = tuple[int, ...]
MoveFn = Callable[[Tensor, DistSpec, DistSpec, Axes], Tensor]
CostFn = Callable[[int, int, int], float]
Pair = tuple[type[Placement], type[Placement]]


@dataclass(frozen=True, slots=True)
class Mover:
    """A registered function, the name of its kind, and its cost.

    ``cost(src_bytes, dst_bytes, ranks)``: bytes that one rank sends, given the bytes of the largest
    local before and after, and the number of ranks on the axes. ``collective`` is False if the
    function does not communicate.
    """

    kind: str
    fn: MoveFn
    cost: CostFn
    collective: bool


moves: dict[Pair, Mover] = {}


class How(NamedTuple):
    """How a function runs that can run in the background.

    ``async_op``: it returns a Work. ``copies``: x may be written to meanwhile, so it is not read
    after the function returns.
    """

    async_op: bool = False
    copies: bool = False

    def run(self, collective: Callable[..., Any], *args: Any) -> Any:
        return start_async(collective, *args) if self.async_op else collective(*args)


NOW = How()


def no_bytes(src_bytes: int, dst_bytes: int, ranks: int) -> float:
    """Returns the cost of a local function: no bytes are sent."""
    return 0.0


def register(
    src: type[Placement],
    dst: type[Placement],
    *,
    kind: str | None = None,
    cost: CostFn = no_bytes,
) -> Callable[[MoveFn], MoveFn]:
    """Registers the decorated function for a transition: ``@register(Shard, Replicate)``.

    It is called as ``fn(x, src, dst, axes)``: ``x`` is this rank's local of the spec ``src``; the
    result is its local of ``dst``. The specs differ on ``axes`` only, which all go from a
    placement of the first type to a placement of the second. The function must not change ``x``.
    The planner compares ``cost`` (see Mover); a function without a cost counts as local.
    Raises ValueError if the pair is registered already, and TypeError for other types than
    placements.
    """
    for p in (src, dst):
        if not (isinstance(p, type) and issubclass(p, (Shard, Replicate, Partial))):
            raise TypeError(
                f"reshard.register: {p!r} is no placement type; use Shard, Replicate, Partial or a "
                "frozen dataclass that inherits from one of them"
            )

    def add(fn: MoveFn) -> MoveFn:
        taken = moves.get((src, dst))
        if taken is not None:
            raise ValueError(
                f"reshard from {src.__name__} to {dst.__name__} is registered by "
                f"{_name(taken.fn)} already, and by {_name(fn)} again; for another function, "
                "derive a placement type of your own from one of these, and register that"
            )
        moves[src, dst] = Mover(kind or fn.__name__, fn, cost, cost is not no_bytes)
        clear_decisions()
        return fn

    return add


def then(result: T | Work[T], finish: Callable[[T], Tensor], into: Tensor | None = None) -> Any:
    """Returns ``finish(result)``; of a Work, a Work that returns it. ``into``: the memory of the
    result of ``finish``; None: it returns a view."""
    if not isinstance(result, Work):
        return finish(result)
    if into is None and result.into is not None:
        into = finish(result.into)
    return Work(lambda: finish(result.wait()), result.done, into)


def dense(x: Tensor, shape: Sequence[int], out: Tensor | None) -> Tensor:
    """Returns x viewed as ``shape``, contiguous; in ``out`` if given."""
    if out is None:
        return x.reshape(shape).contiguous()
    out.view(x.shape).copy_(x)
    return out


def ready(x: Tensor, how: How) -> Any:
    """Returns x, as a Work if ``how.async_op``."""
    return finished(x) if how.async_op else x


def _name(fn: MoveFn) -> str:
    return f"{fn.__module__}.{fn.__qualname__}"
