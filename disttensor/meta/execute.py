"""Calls on a rank outside the mesh: metadata and tokens, no memory, no kernel.

The layout of a result is the rule's, as on the ranks inside; shape, dtype and what depends on what
come from ``disttensor.meta.infer``, once per kind of call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttensor.autograd import token
from disttensor.comm import objects
from disttensor.errors import name_of
from disttensor.layout import replicated
from disttensor.mesh import ProcessMesh
from disttensor.meta import infer
from disttensor.meta.quick import quick
from disttensor.random import state
from disttensor.spec import DistSpec
from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.tensor_meta import TensorMeta, described
from disttensor.torch_private import autocast_is_on
from disttensor.tree import flat, rebuilt

Tensor = torch.Tensor
Function = Callable[..., Any]
Runner = Callable[[Sequence[Any], Any], Any]


def stand_in(spec: DistSpec, requires_grad: bool = False) -> DistTensor:
    """A leaf of ``spec`` on a rank outside its mesh."""
    device = spec.mesh.device
    return wrap(token.leaf(device, spec.dtype) if requires_grad else token.detached(device), spec)


def runner_of(
    func: Function, mesh: ProcessMesh, layouts: Any, args: Sequence[Any], kwargs: Any, writes: bool
) -> Runner:
    """The runner for calls like this one. ``layouts``: of the results in order; None: all are
    replicated. ``writes``: the first argument is changed in place."""
    found = found_for(func, mesh, args, kwargs)
    if found is None:
        return lambda args, kwargs: learned(mesh, args, kwargs)
    under = torch.is_autocast_enabled(mesh.device.type)
    run = general(func, mesh, layouts, found, writes)
    if not writes and not under:
        run = quick(run, mesh, dressed(mesh, layouts, found), found, args, kwargs)
    idle = idle_of(func)
    if idle is not None:
        run = counted(run, mesh, idle)
    if not under:
        return run
    return until_autocast_ends(
        run, mesh, lambda args, kwargs: runner_of(func, mesh, layouts, args, kwargs, writes)
    )


def idle_of(func: Function) -> Callable[..., bool] | None:
    """What says whether a call draws nothing, for functions where that depends on values of each
    call."""
    return state.IDLE.get(getattr(func, "__name__", "").rstrip("_"))


def counted(run: Runner, mesh: ProcessMesh, idle: Callable[..., bool]) -> Runner:
    """A runner of calls that draw random numbers unless they are ``idle``, which depends on values
    of each."""

    def count(args: Sequence[Any], kwargs: Any) -> Any:
        if not idle(*args, **(kwargs or {})):
            state.draw(mesh, "fast")
        return run(args, kwargs)

    return count


def until_autocast_ends(
    run: Runner, mesh: ProcessMesh, make: Callable[[Sequence[Any], Any], Runner]
) -> Runner:
    """``run``, which was made under autocast and holds there only: without it the dtypes are
    others."""
    bare: list[Runner] = []

    def either(args: Sequence[Any], kwargs: Any) -> Any:
        if torch.is_autocast_enabled(mesh.device.type):
            return run(args, kwargs)
        if not bare:
            bare.append(make(args, kwargs))
        return bare[0](args, kwargs)

    return either


def found_for(
    func: Function, mesh: ProcessMesh, args: Sequence[Any], kwargs: Any
) -> infer.Found | None:
    """What the call gives; None where the ranks inside have to tell. Where ``counted`` counts
    draws, this does not."""
    try:
        found = infer.found(func, args, kwargs or {})
        return found if idle_of(func) is None else found._replace(draws=False)
    except infer.Dynamic:
        return None
    except infer.DataDependent:
        raise RuntimeError(
            f"{name_of(func)} gives a Python value that depends on the data of a tensor on "
            f"{mesh!r}, which this rank is not in. Write with dt.values_everywhere(): around it, "
            "or give it dt.broadcast_value(x)"
        ) from None


def dressed(mesh: ProcessMesh, layouts: Any, found: infer.Found) -> list[DistSpec]:
    """The specs of the results."""
    return [
        DistSpec(
            mesh, replicated(len(o.shape)) if layouts is None else layouts[i], o.shape, o.dtype
        )
        for i, o in enumerate(found.outs)
    ]


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    on = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if on else None


def general(
    func: Function, mesh: ProcessMesh, layouts: Any, found: infer.Found, writes: bool
) -> Runner:
    device = mesh.device
    first = found, dressed(mesh, layouts, found)
    cases: dict[Any, tuple[infer.Found, list[DistSpec]]] = {autocast_dtype(device): first}

    def case(args: Sequence[Any], kwargs: Any) -> tuple[infer.Found, list[DistSpec]]:
        """Under autocast dtypes are others."""
        key = autocast_dtype(device)
        if key not in cases:
            again = found_for(func, mesh, args, kwargs)
            assert again is not None  # shapes that depend on data do so under autocast too
            cases[key] = again, dressed(mesh, layouts, again)
        return cases[key]

    def run(args: Sequence[Any], kwargs: Any) -> Any:
        kwargs = kwargs or {}
        now, specs = case(args, kwargs) if autocast_is_on() else first
        tensors = flat((args, kwargs), [])
        refuse_plain(func, mesh, tensors)
        if now.draws:
            state.draw(mesh, "fast", kwargs.get("generator"))
        if writes:
            return written(func, args[0], tensors, now, mesh)
        locals_ = [t.local if type(t) is DistTensor else t for t in tensors]

        def dress(value: Any) -> Any:
            if isinstance(value, infer.Out):
                if value.same is not None:
                    given: Any = tensors[value.same]
                    if type(given) is not DistTensor or given.spec is specs[value.number]:
                        return given  # else it was moved first, and what came back is another
                new = wrap(
                    token.join([locals_[i] for i in value.sources], device), specs[value.number]
                )
                if value.viewed is not None and type(tensors[value.viewed]) is DistTensor:
                    views.share(new, tensors[value.viewed])
                return new
            if isinstance(value, (list, tuple)):
                return rebuilt(value, [dress(v) for v in value])
            return value

        return dress(now.result)

    return run


def refuse_plain(func: Function, mesh: ProcessMesh, tensors: list[Tensor]) -> None:
    if torch.is_grad_enabled() and any(
        t.requires_grad for t in tensors if type(t) is not DistTensor
    ):
        raise RuntimeError(
            f"{name_of(func)}: a plain tensor that requires grad beside a DistTensor on {mesh!r}: "
            "its gradient is computed on the ranks of that mesh and would not reach this rank. "
            "Make it a DistTensor: shard_tensor(x, mesh)"
        )


def written(
    func: Function, target: Any, tensors: list[Tensor], found: infer.Found, mesh: ProcessMesh
) -> Any:
    """In place: the target depends on all that was written into it; so do its views, and what it is
    one of."""
    targets: list[Any] = flat(target, [])
    for t in targets:
        if type(t) is DistTensor:
            t.forget_uses()
    if torch.is_grad_enabled():
        for t in targets:
            if t.local.is_leaf and t.local.requires_grad:
                raise RuntimeError(
                    f"{name_of(func)}: a leaf Variable that requires grad is being used in an "
                    f"in-place operation: {t!r}"
                )
        into = token.join([t.local for t in tensors if type(t) is DistTensor], mesh.device)
        if into.requires_grad:
            token.replaced[0] += 1
            for t in targets:
                for one in views.family(t):
                    if one.spec.dtype.is_floating_point or one.spec.dtype.is_complex:
                        one.local = into
    return None if found.result is None else target


def learned(mesh: ProcessMesh, args: Sequence[Any], kwargs: Any) -> Any:
    """The result of a call whose shapes depend on data: the ranks inside say what they got."""
    return dressed_as(objects.recv_object(mesh.ranks, mesh.device), mesh, args, kwargs)


def dressed_as(told: Any, mesh: ProcessMesh, args: Sequence[Any], kwargs: Any) -> Any:
    """The result that the ranks inside described (``described``), with tokens."""
    tensors = flat((args, kwargs or {}), [])
    device = mesh.device

    def dress(value: Any) -> Any:
        if isinstance(value, TensorMeta):
            sources = (
                [t.local for t in tensors if type(t) is DistTensor] if value.requires_grad else []
            )
            spec = DistSpec(mesh, value.layout, value.shape, value.dtype)
            return wrap(token.join(sources, device), spec)
        if isinstance(value, (list, tuple)):
            return rebuilt(value, [dress(v) for v in value])
        return value

    return dress(told)


def telling(
    run: Runner, func: Function, mesh: ProcessMesh, args: Sequence[Any], kwargs: Any
) -> Runner:
    """On a rank inside: the same runner, which tells ranks outside the shapes that depend on
    data."""
    if not objects.others(mesh.ranks) or not infer.dynamic(func, args, kwargs):
        return run

    def told(args: Sequence[Any], kwargs: Any) -> Any:
        result = run(args, kwargs)
        objects.send_object(described(result), mesh.ranks, mesh.device)
        return result

    return told
