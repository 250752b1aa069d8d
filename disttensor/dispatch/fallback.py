"""What happens to a function without a rule: its Python body is run, or everything is gathered and
it runs whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

import reshard
from disttensor import errors
from disttensor.cache import Cache
from disttensor.comm import objects
from disttensor.dispatch import strict
from disttensor.dispatch.decompose import body_of
from disttensor.dispatch.plan import Uncacheable, key_of
from disttensor.layout import replicated
from disttensor.meta import execute, infer
from disttensor.random.state import forked
from disttensor.spec import DistSpec
from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.reshard import moved_for
from disttensor.tensor.tensor_meta import described
from disttensor.torch_private import storage_id
from disttensor.tree import flat, rebuilt

Tensor = torch.Tensor
Function = Callable[..., Any]

_running = threading.local()


def through(func: Function, why: str) -> Callable[[Sequence[Any], Any], Any]:
    """Run the Python body of ``func``; gather where it has none, or ends in a call of itself."""
    body, gather = body_of(func), gathered(func, why)
    if body is None:
        return gather

    def run(args: Sequence[Any], kwargs: Any) -> Any:
        running = _running.__dict__.setdefault("functions", set())
        if func in running:
            return gather(args, kwargs)
        running.add(func)
        try:
            return body(*args, **(kwargs or {}))
        finally:
            running.discard(func)

    return run


def writes(func: Function) -> bool:
    """Does the function change its first argument, by torch's convention of names?"""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i")
            and name not in ("__invert__", "__int__", "__index__", "__iter__")
        )
    return name.endswith("_") and func is not torch.Tensor.requires_grad_


def gathered(func: Function, why: str, quiet: bool = False) -> Callable[[Sequence[Any], Any], Any]:
    """Gather the inputs to Replicate, run on full tensors, give Replicate. What the function writes
    goes back into the placement it had. ``quiet``: no warning (an in-place function that had to go
    this way)."""
    writing = writes(func)
    runners: Cache[Any, Callable[..., Any]] = Cache(
        256
    )  # on ranks outside the mesh, by kind of call

    def elsewhere(mesh: Any, args: Sequence[Any], kwargs: Any) -> Callable[..., Any]:
        try:
            key = key_of((tuple(args), kwargs), floats=True)
        except Uncacheable:
            return execute.runner_of(func, mesh, None, args, kwargs, writing)
        if key not in runners:
            runners[key] = execute.runner_of(func, mesh, None, args, kwargs, writing)
        return runners[key]

    def run(args: Sequence[Any], kwargs: Any) -> Any:
        kwargs = kwargs or {}
        seen: list[tuple[DistTensor, Tensor, int]] = []
        dist: list[DistTensor] = []
        itself: dict[int, DistTensor] = {}  # a function that gives its argument gives it here too

        def take(value: Any) -> Any:
            if type(value) is DistTensor:
                dist.append(value)
                full = moved_for(value, value.spec.replicated(), ())
                if value.spec is not value.spec.replicated():
                    if writing and len(dist) == 1:
                        full = full.clone()
                    seen.append((value, full, full._version))
                itself[id(full)] = value
                return full
            if isinstance(value, (list, tuple)):
                return rebuilt(value, [take(v) for v in value])
            return {k: take(v) for k, v in value.items()} if isinstance(value, dict) else value

        found = [t for t in flat((args, kwargs), []) if type(t) is DistTensor]
        mesh = found[0].spec.mesh
        if any(t.spec.mesh is not mesh for t in found):
            raise ValueError(
                f"{errors.name_of(func)}: tensors on two meshes: "
                + " and ".join(sorted({f"{t.spec!r} on {t.spec.mesh!r}" for t in found}))
                + ". Bring one over first: reshard(x, mesh, placements)"
            )
        if mesh.coordinate is None:
            return elsewhere(mesh, args, kwargs)(args, kwargs)
        if not quiet:
            strict.fallback(func, [t.spec for t in found], why)
        elif strict.level:
            strict.check_moves(func, [t.spec for t in found], [t.spec.replicated() for t in found])
        with forked(mesh):
            out = func(*take(tuple(args)), **take(kwargs))
        for tensor, full, version in seen:
            if full._version != version or (
                writing and tensor is dist[0]
            ):  # apply_ writes without a new version
                views.refuse_copy(tensor, errors.name_of(func))
                back = moved_for(wrap(full, tensor.spec.replicated()), tensor.spec, ())
                tensor.local.copy_(back)
                tensor.forget_uses()
                views.write_back(tensor)
        if writing and type(args[0]) is DistTensor:
            args[0].forget_uses()
            return args[0] if isinstance(out, Tensor) else out
        result = dress(out, mesh, itself)
        sources = {storage_id(full.untyped_storage()): tensor for tensor, full, _ in seen}
        for t in flat(result, []):
            if (
                type(t) is DistTensor and storage_id(t.local.untyped_storage()) in sources
            ):  # a view, in one process
                views.enter(t, sources[storage_id(t.local.untyped_storage())], errors.name_of(func))
        if objects.others(mesh.ranks) and infer.dynamic(func, args, kwargs):
            objects.send_object(described(result), mesh.ranks, mesh.device)
        return result

    return run


def dress(value: Any, mesh: Any, itself: dict[int, DistTensor]) -> Any:
    """Full results as replicated DistTensors."""
    if id(value) in itself:
        return itself[id(value)]
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        return value  # a sparse tensor stays a plain one, the same on every rank
    if type(value) is Tensor or isinstance(value, torch.nn.Parameter):
        return wrap(value, DistSpec(mesh, replicated(value.ndim), value.shape, value.dtype))
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return rebuilt(value, [dress(v, mesh, itself) for v in value])
    return value


def into_out(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``out=``: compute, then copy into what was given (which keeps its placement)."""
    rest = {k: v for k, v in kwargs.items() if k != "out"}
    out = kwargs["out"]
    result = func(*args, **rest)
    targets = out if isinstance(out, (list, tuple)) else (out,)
    results = result if isinstance(result, (list, tuple)) else (result,)
    for target, value in zip(targets, results, strict=True):
        if type(target) is not DistTensor:
            raise TypeError(
                f"{errors.name_of(func)}: out= must be a DistTensor where an argument is one, not "
                "a plain tensor"
            )
        if tuple(target.shape) != tuple(value.shape):
            raise RuntimeError(
                f"{errors.name_of(func)}: out= has shape {list(target.shape)}, the result "
                f"{list(value.shape)}; a DistTensor is not resized"
            )
        target.copy_(value)
    return out


def plain_to(value: Tensor, spec: DistSpec) -> Tensor:
    """The local of ``spec`` of a value that every rank holds whole."""
    return reshard.run(value, spec.replicated(), spec)
