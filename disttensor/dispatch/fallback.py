"""What happens to a function without a rule: its Python body is run, or everything is gathered and
it runs whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttensor import errors
from disttensor.cache import Cache
from disttensor.comm import objects
from disttensor.dispatch import strict
from disttensor.dispatch.decompose import body_of
from disttensor.dispatch.execute import written
from disttensor.dispatch.key import Uncacheable, key_of
from disttensor.dispatch.resolve import one_mesh, plain_spec
from disttensor.meta import execute, infer
from disttensor.random.state import forked
from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.reshard import moved_for
from disttensor.tensor.tensor_meta import described
from disttensor.torch_private import storage_id
from disttensor.tree import flat, substitute

Tensor = torch.Tensor
Function = Callable[..., Any]

_running = threading.local()


def decompose_or_gather(func: Function, why: str) -> Callable[[Sequence[Any], Any], Any]:
    """Run the Python body of ``func``; gather where it has none, or ends in a call of itself."""
    body, gather = body_of(func), run_replicated(func, why)
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


def run_replicated(
    func: Function, why: str, expected: bool = False
) -> Callable[[Sequence[Any], Any], Any]:
    """Gather the inputs to Replicate, run on full tensors, give Replicate. What the function writes
    goes back into the placement it had. ``expected``: no warning."""
    writing = writes(func)
    runners: Cache[Any, Callable[..., Any]] = Cache(256)  # outside the mesh, by kind of call

    def outside(mesh: Any, args: Sequence[Any], kwargs: Any) -> Any:
        try:
            key = key_of((tuple(args), kwargs), floats=True)
        except Uncacheable:
            return execute.runner_of(func, mesh, None, args, kwargs, writing)(args, kwargs)
        run = runners.get(key)
        if run is None:
            run = runners[key] = execute.runner_of(func, mesh, None, args, kwargs, writing)
        return run(args, kwargs)

    def run(args: Sequence[Any], kwargs: Any) -> Any:
        kwargs = kwargs or {}
        moved: list[tuple[DistTensor, Tensor, int]] = []
        dist: list[DistTensor] = []
        given: dict[int, DistTensor] = {}  # a function that gives its argument gives it here too

        def take(x: Tensor) -> Tensor:
            if type(x) is not DistTensor:
                return x
            dist.append(x)
            whole = x.spec.replicated()
            full = moved_for(x, whole, ())
            if x.spec is not whole:
                if writing and len(dist) == 1:
                    full = full.clone()
                moved.append((x, full, full._version))
            given[id(full)] = x
            return full

        mesh = one_mesh(func, flat((args, kwargs), []))
        if mesh.coordinate is None:
            return outside(mesh, args, kwargs)
        specs = [t.spec for t in flat((args, kwargs), []) if type(t) is DistTensor]
        if not expected:
            strict.fallback(func, specs, why)
        elif strict.depth():
            strict.check_moves(func, specs, [s.replicated() for s in specs])
        with forked(mesh):
            out = func(*substitute(tuple(args), take), **substitute(kwargs, take))
        for x, full, version in moved:
            # apply_ writes without a new version
            if full._version != version or (writing and x is dist[0]):
                views.refuse_copy(x, func)
                x.local.copy_(moved_for(wrap(full, x.spec.replicated()), x.spec, ()))
                written(x)
        if writing and type(args[0]) is DistTensor:
            args[0].forget_uses()
            return args[0] if isinstance(out, Tensor) else out
        result = wrap_full(out, mesh, given)
        sources = {storage_id(full.untyped_storage()): x for x, full, _ in moved}
        for t in flat(result, []):
            if type(t) is DistTensor and storage_id(t.local.untyped_storage()) in sources:
                source = sources[storage_id(t.local.untyped_storage())]  # a view, in one process
                views.enter(t, source, errors.name_of(func))
        if objects.others(mesh.ranks) and infer.dynamic(func, args, kwargs):
            objects.send_object(described(result), mesh.ranks, mesh.device)
        return result

    return run


def wrap_full(out: Any, mesh: Any, given: dict[int, DistTensor]) -> Any:
    """Full results as replicated DistTensors. A sparse tensor stays plain, the same on every
    rank."""

    def made(t: Tensor) -> Tensor:
        if id(t) in given:
            return given[id(t)]
        whole = t.layout is torch.strided and (
            type(t) is Tensor or isinstance(t, torch.nn.Parameter)
        )
        return wrap(t, plain_spec(t, mesh)) if whole else t

    return substitute(out, made)


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
