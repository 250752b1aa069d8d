"""A pending sum that one call reduces is reduced for the calls after it: ``x.relu() + x.sigmoid()``
sends x once.

The tensor keeps its placement and its local; beside it is kept what the reduction gave. A later
call that could use the pending value reads that instead, unless the tensor was written to since, or
is now in another region of activation checkpointing (a recomputation must make the calls that its
forward made). Ranks outside the mesh take the same decision, without values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from disttensor.autograd.activation_checkpoint import region
from disttensor.core.layout import Layout
from disttensor.core.spec import DistSpec
from disttensor.dispatch import strict
from disttensor.dispatch.resolve import Plan
from disttensor.pytree import collect, substitute
from disttensor.recipe import Runner, recipe_of, reducing, with_recipe
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.grad import is_gradient
from disttensor.tensor.reshard import moved_for, resharded
from disttensor.tensor.versions import INFERENCE, is_handed_out, version

Tensor = torch.Tensor


class Reduced(NamedTuple):
    """source, version: what was reduced; value: to what; grad: was a graph made; region: the region
    of activation checkpointing that it was made in."""

    source: Tensor
    version: int
    value: DistTensor
    grad: bool
    region: Any


def _grad(x: DistTensor) -> bool:
    return x.local.requires_grad and torch.is_grad_enabled()


def remember(x: DistTensor, dst: DistSpec) -> DistTensor:
    """Reduce ``x`` to ``dst``, and keep that beside it, unless writes to x may pass unseen."""
    local = x.local
    inside = dst.mesh.coordinate is not None
    # the local alone: what leads back to x would be a circle
    value = wrap(moved_for(x, dst, ()) if inside else resharded(x, dst).local, dst)
    if inside and is_handed_out(local):
        return value
    if local.is_inference():
        INFERENCE[:] = [True]
    x._reduced = Reduced(local, version(local), value, _grad(x), region())
    return value


def known(x: DistTensor) -> DistTensor | None:
    """The value of ``x`` as an earlier call has reduced it, or None."""
    kept = x._reduced
    if kept is None or kept.grad is not _grad(x) or kept.region != region():
        return None
    if not x.is_initialized:
        return resharded(x, kept.value.spec)
    local = x.local
    if is_handed_out(local):
        return None
    if kept.source is not local or kept.version != version(local):
        return remember(x, kept.value.spec)  # written to by way of what shares its memory
    value: DistTensor = kept.value
    return value


def reusing(plan: Plan, run: Runner) -> Runner:
    """``run``, such that pending arguments are reduced once; ``run`` itself where none is
    pending."""
    if not any(s.layout.partial for s in plan.specs):
        return run
    reuses, func = plan.reuses, plan.func
    if not any(reuses):
        return run
    wholes = [  # of what the call reduces: the spec then
        s.with_layout(Layout(s.layout.dims)) if now else None
        for s, now in zip(plan.specs, plan.reduces, strict=True)
    ]
    reduces = any(whole is not None for whole in wholes)

    def call(args: Sequence[Any], kwargs: Any) -> Any:
        few = not kwargs and len(args) < 3  # most calls, quickly
        for a in args if few else ():
            few = few and not isinstance(a, (list, tuple, dict))
        if few and not reduces:
            for a in args:
                if type(a) is DistTensor and a._reduced is not None:
                    break
            else:
                return run(args, kwargs)
        tensors = (
            [a for a in args if isinstance(a, Tensor)] if few else collect((args, kwargs or {}), [])
        )
        found: dict[int, DistTensor] = {}
        left = False  # adding pending values is free; with one of them reduced it would not be
        for t, reuse, whole in zip(tensors, reuses, wholes, strict=True):
            if not reuse or type(t) is not DistTensor or id(t) in found:
                continue
            if is_gradient(t):
                left = True
                continue
            value = None if t._reduced is None else known(t)
            if value is None and whole is not None and not strict.strict.current():
                value = remember(t, whole)
            if value is not None:
                found[id(t)] = value
            left = left or value is None
        if not found or (left and not reduces):
            return run(args, kwargs)

        def put(t: Tensor) -> Tensor:
            return found.get(id(t), t)

        if few:
            out = func(*[found.get(id(a), a) for a in args])
        else:
            out = func(*substitute(tuple(args), put), **substitute(kwargs or {}, put))
        for t in tensors:
            # outside the mesh it stands for a new tensor
            if found.get(id(t)) is out and type(t) is DistTensor and t.is_initialized:
                return t
        return out

    if reduces:
        inside = plan.mesh.coordinate is not None
        return with_recipe(call, reducing(wholes) if inside else None)
    recipe = recipe_of(run)
    return with_recipe(call, recipe._replace(pending=True) if recipe else None)
