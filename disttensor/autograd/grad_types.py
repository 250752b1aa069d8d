"""Gradient types: the meaning of the gradient of a local follows from its placement, per mesh axis.

    placement of x                     its gradient
    S(d)                               S(d): the gradient of the same piece
    P(sum), P(avg)                     R, varying: the full gradient on each rank (avg: 1/n of it)
    R, read by uses that vary          P(sum): each rank has the contribution of its own piece
    R, read by uses that do not vary   R: the same full gradient on every rank

A use of a replicated value *varies* over a mesh axis if each rank combines the value with a
different piece; in JAX it goes through ``pvary``, whose transpose is ``psum``. A ``GradType`` is a
spec with the axes over which its use varies (the third row). ``gradient_type`` computes the table;
applied twice it returns the same type, except that P(avg) becomes P(sum). All reshards within a
mesh use one autograd function, ``ReshardFunction``: its backward is the reshard between the
gradient types, and so on for every order.
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
StartReduction = Callable[[Tensor], Work[Tensor]]
RunningReductions = dict[int, Work[Tensor]]  # by the number of the backward

RESERVED = 4  # numbers of nodes: for the weights of q, k and v, or gate and up, and one more


class GradType(NamedTuple):
    """A spec, and the axes over which the replicated value is read by uses that vary."""

    spec: DistSpec
    varying: Axes = ()


_gradient_types: Cache[GradType, tuple[GradType, float]] = Cache(8192)


def gradient_type(t: GradType) -> tuple[GradType, float]:
    """Returns the type of the gradient of ``t``, and its divisor for a pending average."""
    found = _gradient_types.get(t)
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
        own = tuple((a, p) for a, p in layout.custom if isinstance(p, Shard))
        spec = t.spec.with_layout(Layout(layout.dims, pending, own))
        flipped = GradType(spec, tuple(sorted(layout.partial_axes)))
        found = _gradient_types[t] = (flipped, scale)
    return found


_scaled = WeakTensorKeyDictionary()  # leaves whose gradient a hook scales


def scale_average_grad(leaf: Tensor, spec: DistSpec) -> Tensor:
    """Returns ``leaf``. If it is ``Partial("avg")``, registers a hook that scales its gradient by
    n: ``.grad`` is then the gradient of the average."""
    if leaf.requires_grad and all(op in ("sum", "avg") for _, op in spec.layout.partial):
        divided = gradient_type(GradType(spec))[1]
        if divided != 1.0 and leaf not in _scaled:
            leaf.register_hook(lambda g: g * divided)
            _scaled[leaf] = True
    return leaf


class GradTransition:
    """A transition between two gradient types. ``run``: reshards a local; None if the specs are
    equal. ``start``: starts the reduction of the backward; None unless it is one large collective.
    ``grad_dtype``: of the reshard of the gradient; None: the dtype of ``src``. ``cast``: the dtype
    to which a local is cast before ``run``, or None.
    """

    __slots__ = ("_back", "cast", "dst", "grad_dtype", "run", "src", "start")

    def __init__(self, src: GradType, dst: GradType, grad_dtype: torch.dtype | None = None) -> None:
        self.src, self.dst = src, dst
        dtype = dst.spec.dtype
        self.cast = None if dtype is src.spec.dtype else dtype
        grad_dtype = src.spec.dtype if grad_dtype is None else grad_dtype
        self.grad_dtype = None if dtype is grad_dtype else grad_dtype
        start = src.spec.with_dtype(dtype)
        self.run = None if start is dst.spec else planner.runner(start, dst.spec)
        self.start = reduction(src, dst) if dst.varying and not self.casts else None
        self._back: tuple[GradTransition, float] | None = None

    @property
    def casts(self) -> bool:
        return self.cast is not None or self.grad_dtype is not None

    def backward(self) -> tuple[GradTransition, float]:
        """Returns the transition of the gradient, and the factor to apply before it."""
        if self._back is None:
            (grad_src, divide_src), (grad_dst, divide_dst) = (
                gradient_type(self.src),
                gradient_type(self.dst),
            )
            if self.casts:
                dtype = self.grad_dtype or grad_dst.spec.dtype
                grad_dst, grad_src = (
                    GradType(t.spec.with_dtype(dtype), t.varying) for t in (grad_dst, grad_src)
                )
            self._back = transition_between(*grad_dst, *grad_src), divide_dst / divide_src
        return self._back


@cached(8192)
def transition_between(
    src: DistSpec, read: Axes, dst: DistSpec, axes: Axes, grad_dtype: torch.dtype | None = None
) -> GradTransition:
    """Returns the transition from ``GradType(src, read)`` to ``GradType(dst, axes)``."""
    return GradTransition(GradType(src, read), GradType(dst, axes), grad_dtype)


def reduction(src: GradType, dst: GradType) -> StartReduction | None:
    """Returns a function that starts a reshard's backward, if that is one reduction, or None."""
    if src.spec.layout.partial:
        return None
    return planner.background(gradient_type(dst)[0].spec, gradient_type(src)[0].spec)


class ReshardFunction(torch.autograd.Function):
    """Reshards a local by a transition. The backward reshards from the gradient type of the target
    to the gradient type of the source."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        transition: GradTransition,
        held: list[Tensor] | None,
        running: RunningReductions | None,
        own: bool,
    ) -> Tensor:
        """Applies ``transition``. ``held``: the result, if it was already communicated; ``own``:
        nothing else refers to its memory. ``running``: reductions of the backward that
        ``EarlyReduce`` started."""
        ctx.transition, ctx.running = transition, running
        activation_checkpoint.join_region(ctx)
        if held is not None:
            return held[0].data if own else held[0].view_as(held[0])
        x = x if transition.cast is None else x.to(transition.cast)
        if transition.run is None:
            return x.view_as(x)
        out = transition.run(x)
        if out is x:
            return x.view_as(x)
        if is_view(out) and storage_id(out.untyped_storage()) != storage_id(x.untyped_storage()):
            out = out.data  # a view of a buffer of its own: no longer a view, so writes are allowed
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        work = ctx.running.pop(current_backward(), None) if ctx.running else None
        if work is not None:
            return work.wait(), None, None, None, None
        activation_checkpoint.recompute_region(ctx)
        backward, scale = ctx.transition.backward()
        if scale != 1.0:
            grad = grad * scale
        if ctx.transition.grad_dtype is not None:  # autograd casts the result to the dtype of x
            grad = grad.to(ctx.transition.grad_dtype)
        if torch.is_grad_enabled():
            return apply_transition(grad, backward, None), None, None, None, None
        return grad if backward.run is None else backward.run(grad), None, None, None, None


class EarlyReduce(torch.autograd.Function):
    """The identity after a ReshardFunction. Its backward starts the reduction, and the backward of
    the ReshardFunction waits for it. If the gradient will be differentiated again, only the
    ReshardFunction reduces. See ``ops.linalg.overlapped_linear``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, start: StartReduction, running: RunningReductions, first: int
    ) -> Tensor:
        ctx.start, ctx.running = start, running
        ctx.reserved_nodes = list(range(first + RESERVED - 1, first - 1, -1))
        activation_checkpoint.join_region(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not torch.is_grad_enabled():
            activation_checkpoint.recompute_region(ctx)
            ctx.running[current_backward()] = ctx.start(grad)
        return grad, None, None, None


# Calls C++ directly: the Python layer of Function.apply serves functorch, which is not used here.
_reshard_function: Any = direct_apply(ReshardFunction)
_early_reduce: Any = direct_apply(EarlyReduce)


def reshard_local(
    x: Tensor, src: GradType, dst: GradType, held: list[Tensor] | None, own: bool = False
) -> Tensor:
    """Returns the local of ``dst`` for ``x``, the local of ``src``."""
    return apply_transition(x, transition_between(*src, *dst), held, own)


def apply_transition(
    x: Tensor, transition: GradTransition, held: list[Tensor] | None, own: bool = False
) -> Tensor:
    """Applies ``ReshardFunction``, and ``EarlyReduce`` after it if ``transition.start`` is set."""
    if observers:
        return observe.run_step(_apply_transition, x, transition, held, own)
    return _apply_transition(x, transition, held, own)


def _apply_transition(
    x: Tensor, transition: GradTransition, held: list[Tensor] | None, own: bool
) -> Tensor:
    running: RunningReductions | None = None if transition.start is None else {}
    out: Tensor = _reshard_function(x, transition, held, running, own)
    if running is None or out.grad_fn is None:
        return out
    first = node_number(out.grad_fn) + 1
    for _ in range(RESERVED):
        out.view_as(out)  # uses up a number
    return _early_reduce(out, transition.start, running, first)
