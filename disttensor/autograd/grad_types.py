"""Gradient types: the meaning of the gradient of a local follows from its placement, per mesh axis.

    placement of x                     its gradient
    S(d)                               S(d): the gradient of the same piece
    P(sum), P(avg)                     R, varying: the full gradient on each rank (avg: 1/n of it)
    R, read by uses that vary          P(sum): each rank has the contribution of its own piece
    R, read by uses that do not vary   R: the same full gradient on every rank

A use of a replicated value *varies* over a mesh axis if each rank combines the value with a
different piece; in JAX it goes through ``pvary``, whose transpose is ``psum``. A ``GradType`` is a
spec with the axes of the third row. ``dual`` computes the table; applied twice it returns the same
type, except that P(avg) becomes P(sum). All reshards within a mesh use one autograd function,
``ReshardFunction``: its backward is the reshard between the duals, and so on for every order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from disttensor import observe
from disttensor.autograd import activation_checkpoint
from disttensor.cache import Cache, cached
from disttensor.comm.work import Work
from disttensor.core.layout import Axes, Layout
from disttensor.core.placement import Shard
from disttensor.core.spec import DistSpec
from disttensor.observe import observers
from disttensor.torch_private import (
    current_backward,
    direct_apply,
    is_view,
    node_number,
    storage_id,
)
from reshard import planner

Tensor = torch.Tensor
Begin = Callable[[Tensor], Work[Tensor]]
Begun = dict[int, Work[Tensor]]  # by the number of the backward

RESERVED = 4  # numbers of nodes: for the weights of q, k and v, or gate and up, and one more


class GradType(NamedTuple):
    """A spec, and the axes over which the replicated value is read by uses that vary."""

    spec: DistSpec
    varying: Axes = ()


_duals: Cache[GradType, tuple[GradType, float]] = Cache(8192)


def dual(t: GradType) -> tuple[GradType, float]:
    """Returns the type of the gradient of ``t``, and its divisor for a pending average."""
    found = _duals.get(t)
    if found is None:
        layout, mesh = t.spec.layout, t.spec.mesh
        scale = 1.0
        for a, op in layout.partial:
            if op not in ("sum", "avg"):
                raise RuntimeError(
                    f"{t.spec!r} requires grad, but a pending {op!r} has no gradient: reduce it "
                    "first (reshard it to Replicate), or detach it"
                )
            scale *= mesh.shape[a] if op == "avg" else 1
        pending = tuple((a, "sum") for a in sorted(t.varying))
        # users' types that split
        own = tuple((a, p) for a, p in layout.own if isinstance(p, Shard))
        spec = t.spec.with_layout(Layout(layout.dims, pending, own))
        flipped = GradType(spec, tuple(sorted(layout.partial_axes)))
        found = _duals[t] = (flipped, scale)
    return found


_scaled = WeakTensorKeyDictionary()  # leaves whose gradient a hook scales


def whole_grad(leaf: Tensor, spec: DistSpec) -> Tensor:
    """Returns ``leaf``. If it is ``Partial("avg")``, registers a hook that scales its gradient by
    n: ``.grad`` is then the gradient of the average."""
    if leaf.requires_grad and all(op in ("sum", "avg") for _, op in spec.layout.partial):
        divided = dual(GradType(spec))[1]
        if divided != 1.0 and leaf not in _scaled:
            leaf.register_hook(lambda g: g * divided)
            _scaled[leaf] = True
    return leaf


class GradTransition:
    """A transition between two gradient types. ``run``: reshards a local; None if the specs are
    equal. ``begin``: starts the reduction of the backward; None unless it is one large collective.
    """

    __slots__ = ("_back", "begin", "dst", "run", "src")

    def __init__(self, src: GradType, dst: GradType) -> None:
        self.src, self.dst = src, dst
        self.run = None if src.spec is dst.spec else planner.runner(src.spec, dst.spec)
        self.begin = reduction(src, dst) if dst.varying else None
        self._back: tuple[GradTransition, float] | None = None

    def back(self) -> tuple[GradTransition, float]:
        """Returns the transition of the gradient, and the factor to apply before it."""
        if self._back is None:
            (grad_src, divide_src), (grad_dst, divide_dst) = dual(self.src), dual(self.dst)
            self._back = way(*grad_dst, *grad_src), divide_dst / divide_src
        return self._back


@cached(8192)
def way(src: DistSpec, read: Axes, dst: DistSpec, axes: Axes) -> GradTransition:
    """Returns the transition from ``GradType(src, read)`` to ``GradType(dst, axes)``."""
    return GradTransition(GradType(src, read), GradType(dst, axes))


def reduction(src: GradType, dst: GradType) -> Begin | None:
    """Returns a function that starts a reshard's backward, if that is one reduction, or None."""
    if src.spec.layout.partial:
        return None
    return planner.background(dual(dst)[0].spec, dual(src)[0].spec)


class ReshardFunction(torch.autograd.Function):
    """Reshards a local by a transition. Backward: from dual(dst) to dual(src)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        way: GradTransition,
        held: list[Tensor] | None,
        begun: Begun | None,
        own: bool,
    ) -> Tensor:
        """Applies ``way``. ``held``: the result, if it was already communicated; ``own``: nothing
        else refers to its memory. ``begun``: reductions of the backward that ``EarlyReduce``
        started."""
        ctx.way, ctx.begun = way, begun
        activation_checkpoint.join_region(ctx)
        if held is not None:
            return held[0].data if own else held[0].view_as(held[0])
        if way.run is None:
            return x.view_as(x)
        out = way.run(x)
        if out is x:
            return x.view_as(x)
        if is_view(out) and storage_id(out.untyped_storage()) != storage_id(x.untyped_storage()):
            out = out.data  # a view of a buffer of its own: no longer a view, so writes are allowed
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        work = ctx.begun.pop(current_backward(), None) if ctx.begun else None
        if work is not None:
            return work.wait(), None, None, None, None
        activation_checkpoint.recompute_region(ctx)
        back, scale = ctx.way.back()
        if scale != 1.0:
            grad = grad * scale
        if torch.is_grad_enabled():
            return along(grad, back, None), None, None, None, None
        return grad if back.run is None else back.run(grad), None, None, None, None


class EarlyReduce(torch.autograd.Function):
    """The identity after a ReshardFunction. Its backward starts the reduction for which that one
    waits; if the gradient will be differentiated again, only that one reduces. See
    ``ops.linalg.overlapped_linear``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, begin: Begin, begun: Begun, first: int) -> Tensor:
        ctx.begin, ctx.begun = begin, begun
        ctx.reserved_nodes = list(range(first + RESERVED - 1, first - 1, -1))
        activation_checkpoint.join_region(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not torch.is_grad_enabled():
            activation_checkpoint.recompute_region(ctx)
            ctx.begun[current_backward()] = ctx.begin(grad)
        return grad, None, None, None


# Calls C++ directly: the Python layer of Function.apply serves functorch, which is not used here.
_move: Any = direct_apply(ReshardFunction)
_early_reduce: Any = direct_apply(EarlyReduce)


def move(
    x: Tensor, src: GradType, dst: GradType, held: list[Tensor] | None, own: bool = False
) -> Tensor:
    """Returns the local of ``dst`` for ``x``, the local of ``src``."""
    return along(x, way(*src, *dst), held, own)


def along(x: Tensor, way: GradTransition, held: list[Tensor] | None, own: bool = False) -> Tensor:
    """Applies ``ReshardFunction``, and ``EarlyReduce`` after it if ``way.begin`` is set."""
    if observers:
        return observe.run_step(_along, x, way, held, own)
    return _along(x, way, held, own)


def _along(x: Tensor, way: GradTransition, held: list[Tensor] | None, own: bool) -> Tensor:
    begun: Begun | None = None if way.begin is None else {}
    out: Tensor = _move(x, way, held, begun, own)
    if begun is None or out.grad_fn is None:
        return out
    first = node_number(out.grad_fn) + 1
    for _ in range(RESERVED):
        out.view_as(out)  # uses up a number
    early: Tensor = _early_reduce(out, way.begin, begun, first)
    return early
