"""The warm path of calls on a rank outside the mesh: a new wrapper, and the token that it gets.

Most calls take DistTensors as positional arguments and give tensors that depend on all of them.
What such a call gives is known when its plan is made; ``disttensor.meta.execute`` keeps the way for
all others, and for calls under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttensor.autograd import token
from disttensor.mesh import ProcessMesh
from disttensor.meta import infer
from disttensor.random import state
from disttensor.spec import DistSpec
from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.torch_private import autocast_is_on, make_subclass
from disttensor.tree import flat

Tensor = torch.Tensor
Runner = Callable[[Sequence[Any], Any], Any]

_grad: Callable[[], bool] = torch.is_grad_enabled


def quick(
    run: Runner,
    mesh: ProcessMesh,
    specs: list[DistSpec],
    found: infer.Found,
    args: Sequence[Any],
    kwargs: Any,
) -> Runner:
    """A faster way for calls like this one; ``run``, which is right for all, where there is none,
    and under autocast.

    It takes DistTensors that are arguments, or all in a list that comes first, and gives tensors
    that depend on the same of them.
    """
    tensors: list[Any] = flat((args, kwargs), [])
    outs = [found.result] if isinstance(found.result, infer.Out) else found.result
    if (
        type(outs) not in (list, tuple)
        or not outs
        or any(type(t) is not DistTensor for t in tensors)
        or any(not isinstance(o, infer.Out) or o.same is not None for o in outs)
        or any(o.sources != outs[0].sources for o in outs)
        or (found.draws and "generator" in kwargs)
    ):
        return run
    spread = _spread(args, kwargs, tensors)
    if spread is None:
        return run
    taken = spread(args, kwargs)
    places = [i for i, a in enumerate(taken) if type(a) is DistTensor]
    sources = tuple(places[i] for i in outs[0].sources)
    viewed = [None if o.viewed is None else places[o.viewed] for o in outs]
    draws = mesh if found.draws else None
    if not isinstance(found.result, infer.Out):
        kind = list if type(found.result) is list else tuple
        return _several(run, spread, sources, specs, viewed, draws, kind)
    if spread is _positional and viewed[0] is None and draws is None and 0 < len(sources) < 3:
        return (_of_one if len(sources) == 1 else _of_two)(run, sources, specs[0])
    return _one(run, spread, sources, specs[0], viewed[0], draws)


def _spread(
    args: Sequence[Any], kwargs: Any, tensors: list[Any]
) -> Callable[[Any, Any], Sequence[Any]] | None:
    """What finds the tensors of such a call, in a sequence; None where they lie deeper."""
    n = len(tensors)
    if sum(type(a) is DistTensor for a in args) == n:
        return _positional
    if sum(type(a) is DistTensor for a in (*args, *kwargs.values())) == n:
        return _with_named
    listed = args and isinstance(args[0], (list, tuple)) and len(args[0]) == n
    return _listed if listed and all(type(a) is DistTensor for a in args[0]) else None


def _positional(args: Sequence[Any], kwargs: Any) -> Sequence[Any]:
    return args


def _with_named(args: Sequence[Any], kwargs: Any) -> Sequence[Any]:
    return (*args, *kwargs.values())


def _listed(args: Sequence[Any], kwargs: Any) -> Sequence[Any]:
    return args[0]


def _token(args: Sequence[Any], sources: tuple[int, ...], nothing: Tensor, bare: Tensor) -> Tensor:
    """``token.join``, faster."""
    joined = nothing
    for i in sources:
        local = args[i].local
        if local is joined or local is nothing:
            continue
        if local is bare or local.grad_fn is None:
            if joined is nothing and local.requires_grad:
                joined = bare
        else:
            joined = local if joined is nothing or joined is bare else torch.cat((joined, local))
    return joined if joined is nothing or _grad() else nothing


def _of_one(run: Runner, sources: tuple[int, ...], spec: DistSpec) -> Runner:
    (source,) = sources
    device, meta_tensor = spec.mesh.device, spec.meta_tensor
    nothing, bare = token.detached(device), token.orphan(device)

    def call(args: Sequence[Any], kwargs: Any) -> Any:
        if autocast_is_on():
            return run(args, kwargs)
        local = args[source].local
        if local is not nothing:
            if not local.requires_grad or not _grad():
                local = nothing
            elif local.grad_fn is None:
                local = bare
        new = make_subclass(DistTensor, meta_tensor)
        new.local = local
        new.spec = spec
        return new

    return call


def _of_two(run: Runner, sources: tuple[int, ...], spec: DistSpec) -> Runner:
    first, second = sources
    device, meta_tensor = spec.mesh.device, spec.meta_tensor
    nothing, bare = token.detached(device), token.orphan(device)

    def call(args: Sequence[Any], kwargs: Any) -> Any:
        if autocast_is_on():
            return run(args, kwargs)
        local = args[first].local
        if local is not args[second].local:
            local = _token(args, sources, nothing, bare)
        elif local is not nothing and local is not bare:
            local = _token(args, sources[:1], nothing, bare)
        elif local is bare and not _grad():
            local = nothing
        new = make_subclass(DistTensor, meta_tensor)
        new.local = local
        new.spec = spec
        return new

    return call


def _one(
    run: Runner,
    spread: Callable[[Any, Any], Sequence[Any]],
    sources: tuple[int, ...],
    spec: DistSpec,
    viewed: int | None,
    draws: ProcessMesh | None,
) -> Runner:
    device, meta_tensor = spec.mesh.device, spec.meta_tensor
    nothing, bare = token.detached(device), token.orphan(device)

    def call(args: Sequence[Any], kwargs: Any) -> Any:
        if autocast_is_on():
            return run(args, kwargs)
        if spread is not _positional:
            args = spread(args, kwargs)
        if draws is not None:
            state.draw(draws, "fast")
        new = make_subclass(DistTensor, meta_tensor)
        new.local = _token(args, sources, nothing, bare) if sources else nothing
        new.spec = spec
        if viewed is not None:
            views.share(new, args[viewed])
        return new

    return call


def _several(
    run: Runner,
    spread: Callable[[Any, Any], Sequence[Any]],
    sources: tuple[int, ...],
    specs: list[DistSpec],
    viewed: list[int | None],
    draws: ProcessMesh | None,
    kind: type,
) -> Runner:
    device = specs[0].mesh.device
    nothing, bare = token.detached(device), token.orphan(device)
    made = list(zip(specs, viewed, strict=True))

    def call(args: Sequence[Any], kwargs: Any) -> Any:
        if autocast_is_on():
            return run(args, kwargs)
        args = spread(args, kwargs)
        if draws is not None:
            state.draw(draws, "fast")
        local = _token(args, sources, nothing, bare)
        results = []
        for spec, of in made:
            new = make_subclass(DistTensor, spec.meta_tensor)
            new.local = local
            new.spec = spec
            if of is not None:
                views.share(new, args[of])
            results.append(new)
        return results if kind is list else tuple(results)

    return call
