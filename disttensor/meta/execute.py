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
from disttensor.core.layout import Layout, replicated
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec
from disttensor.errors import name_of
from disttensor.meta import infer
from disttensor.pytree import collect, substitute
from disttensor.random import state
from disttensor.recipe import Recipe, Runner, outputs_of, with_recipe
from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.tensor_meta import TensorMeta
from disttensor.torch_private import autocast_is_on, make_subclass

Tensor = torch.Tensor
Function = Callable[..., Any]
Reader = Callable[[Any, Any], Sequence[Any]]

_grad: Callable[[], bool] = torch.is_grad_enabled


def stand_in(spec: DistSpec, requires_grad: bool = False) -> DistTensor:
    """A leaf of ``spec`` on a rank outside its mesh."""
    device = spec.mesh.device
    return wrap(token.leaf(device, spec.dtype) if requires_grad else token.detached(device), spec)


def runner_of(
    func: Function, mesh: ProcessMesh, layouts: Sequence[Layout] | None, args: Sequence[Any],
    kwargs: Any, writes: bool,
) -> Runner:  # fmt: skip
    """The runner for calls like this one. ``layouts``: of the results in order; None: all are
    replicated. ``writes``: the first argument is changed in place."""
    kept: dict[torch.dtype | None, Runner] = {}

    def cast(args: Sequence[Any], kwargs: Any) -> Any:
        """Under autocast: then dtypes are others."""
        kind = mesh.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if dtype not in kept:
            kept[dtype] = _runner_of(func, mesh, layouts, args, kwargs or {}, writes, None)
        return kept[dtype](args, kwargs)

    on = autocast_is_on()  # then dtypes may be mixed: an error without
    run = cast if on else _runner_of(func, mesh, layouts, args, kwargs, writes, cast)
    idle = _idle(func)
    if idle is None or (_by_key(args, kwargs) and idle(*args, **(kwargs or {}))):
        return run
    return counted(run, mesh, idle)


def _runner_of(
    func: Function, mesh: ProcessMesh, layouts: Any, args: Any, kwargs: Any, writes: bool,
    cast: Runner | None,
) -> Runner:  # fmt: skip
    found = found_for(func, mesh, args, kwargs)
    if found is None:
        return lambda args, kwargs: wrap_told(
            objects.recv_object(mesh.root.ranks, mesh.device), mesh, args, kwargs
        )
    specs = [
        DistSpec(
            mesh, replicated(len(o.shape)) if layouts is None else layouts[i], o.shape, o.dtype
        )
        for i, o in enumerate(found.outs)
    ]
    outs = [found.result] if isinstance(found.result, infer.Out) else found.result
    if (
        writes
        or type(outs) not in (list, tuple)
        or not outs
        or any(type(t) is not DistTensor for t in collect((args, kwargs), []))
        or any(type(o) is not infer.Out or o.same is not None for o in outs)
        or any(o.sources != outs[0].sources for o in outs)
    ):
        return general(func, mesh, specs, found, writes, cast)
    return quick(mesh, specs, found, args, kwargs, cast)


def counted(run: Runner, mesh: ProcessMesh, idle: Callable[..., bool]) -> Runner:
    """A runner of calls that draw random numbers unless they are ``idle``, which depends on values
    of each."""

    def count(args: Sequence[Any], kwargs: Any) -> Any:
        if not idle(*args, **(kwargs or {})):
            state.draw(mesh, "fast")
        return run(args, kwargs)

    return count


def _by_key(args: Sequence[Any], kwargs: Any) -> bool:
    """Do calls of this key have equal values? Floats and plain tensors are told apart by type."""
    values = (*args, *(kwargs or {}).values())
    return all(type(v) in (DistTensor, int, bool, str, type(None)) for v in values)


def found_for(
    func: Function, mesh: ProcessMesh, args: Sequence[Any], kwargs: Any
) -> infer.Found | None:
    """What the call gives; None where the ranks inside have to tell. Where ``counted`` counts
    draws, this does not."""
    try:
        found = infer.found(func, args, kwargs or {})
    except infer.Dynamic:
        return None
    except infer.DataDependent:
        raise RuntimeError(
            f"{name_of(func)} gives a Python value that depends on the data of a tensor on "
            f"{mesh!r}, which this rank is not in. Write with dt.values_everywhere(): around it, "
            "or give it dt.broadcast_value(x)"
        ) from None
    return found if _idle(func) is None else found._replace(draws=False)


def _idle(func: Function) -> Callable[..., bool] | None:
    """What says whether a call draws nothing, for functions where that depends on values of each
    call."""
    return state.IDLE.get(getattr(func, "__name__", "").rstrip("_"))


def quick(
    mesh: ProcessMesh,
    specs: Sequence[DistSpec],
    found: infer.Found,
    args: Sequence[Any],
    kwargs: Any,
    cast: Runner | None,
) -> Runner:
    """The warm path: DistTensors in, new DistTensors out that depend on the same of them."""
    read = _reader(args, kwargs)
    places = [i for i, a in enumerate(read(args, kwargs)) if isinstance(a, Tensor)]
    sources = tuple([places[i] for i in found.outs[0].sources])
    viewed = [None if o.viewed is None else places[o.viewed] for o in found.outs]
    spec, base, shallow = specs[0], viewed[0], read is _positional
    single = isinstance(found.result, infer.Out)
    several = None if single else list(zip(specs, viewed, strict=True))
    meta_tensor, draws, kind = spec.meta_tensor, found.draws, type(found.result)
    nothing, orphan = token.detached(mesh.device), token.orphan(mesh.device)
    recipe = None
    if not draws and kind in (infer.Out, tuple, list) and (shallow or read is _with_keywords):
        uses = [() if isinstance(a, Tensor) else None for a in (*args, *(kwargs or {}).values())]
        recipe = Recipe(
            None, tuple(uses), tuple(kwargs or ()), outputs_of(specs[: len(viewed)]),
            sources=sources, nothing=nothing, orphan=orphan, shared=tuple(viewed),
            kind=None if single else kind,
        )  # fmt: skip

    def simple(args: Sequence[Any], kwargs: Any) -> Any:
        if autocast_is_on() and cast is not None:
            return cast(args, kwargs)
        joined = args[first].local
        if joined is not nothing or args[last].local is not nothing:
            if joined is not orphan or args[last].local is not orphan:
                joined = _join(args, sources, nothing, orphan)
            if not _grad():
                joined = nothing
        new = make_subclass(DistTensor, meta_tensor)
        new.local = joined
        new.spec = spec
        return new

    if single and shallow and not draws and base is None and 0 < len(sources) < 3:
        first, last = sources[0], sources[-1]
        return with_recipe(simple, recipe)

    def run(args: Sequence[Any], kwargs: Any) -> Any:
        if autocast_is_on() and cast is not None:
            return cast(args, kwargs)
        if not shallow:
            args = read(args, kwargs)
        if draws:
            state.draw(mesh, "fast", state.generator_in(args, kwargs))
        joined = _join(args, sources, nothing, orphan)
        if joined is not nothing and not _grad():
            joined = nothing
        if several:
            results = []
            for one, of in several:
                new = make_subclass(DistTensor, one.meta_tensor)
                new.local = joined
                new.spec = one
                if of is not None:
                    views.share(new, args[of])
                results.append(new)
            return kind(results)
        new = make_subclass(DistTensor, meta_tensor)
        new.local = joined
        new.spec = spec
        if base is not None:
            views.share(new, args[base])
        return new

    return with_recipe(run, recipe)


def _join(args: Sequence[Any], sources: tuple[int, ...], nothing: Tensor, orphan: Tensor) -> Tensor:
    """``token.join`` of the locals of these arguments, faster."""
    joined = nothing
    for i in sources:
        local = args[i].local
        if local is joined or local is nothing:
            continue
        if local is orphan or local.grad_fn is None:
            if joined is nothing and local.requires_grad:
                joined = orphan
        elif joined is nothing or joined is orphan:
            joined = local
        else:
            joined = torch.cat((joined, local))
    return joined


def _reader(args: Sequence[Any], kwargs: Any) -> Reader:
    """What finds the tensors of such a call, in a sequence."""
    n = len(collect((args, kwargs), []))
    if sum(isinstance(a, Tensor) for a in args) == n:
        return _positional
    if sum(isinstance(a, Tensor) for a in (*args, *kwargs.values())) == n:
        return _with_keywords
    if isinstance(args[0], (list, tuple)) and sum(isinstance(a, Tensor) for a in args[0]) == n:
        return lambda args, kwargs: args[0]
    return lambda args, kwargs: collect((args, kwargs), [])


def _positional(args: Sequence[Any], kwargs: Any) -> Sequence[Any]:
    return args


def _with_keywords(args: Sequence[Any], kwargs: Any) -> Sequence[Any]:
    return (*args, *kwargs.values())


def general(
    func: Function,
    mesh: ProcessMesh,
    specs: Sequence[DistSpec],
    found: infer.Found,
    writes: bool,
    cast: Runner | None,
) -> Runner:
    """Any call: several results, plain tensors among the arguments, writes."""
    draws, result = found.draws, found.result

    def run(args: Sequence[Any], kwargs: Any) -> Any:
        if autocast_is_on() and cast is not None:
            return cast(args, kwargs)
        kwargs = kwargs or {}
        tensors: list[Any] = collect((args, kwargs), [])
        refuse_plain(func, mesh, tensors)
        if draws:
            state.draw(mesh, "fast", state.generator_in(args, kwargs))
        if writes:
            target = args[0] if args else next(iter(kwargs.values()))
            written(func, target, tensors, mesh)
            return None if result is None else target
        return filled(result, specs, tensors, mesh.device)

    return run


def filled(
    result: Any, specs: Sequence[DistSpec], tensors: Sequence[Any], device: torch.device
) -> Any:
    """``result`` with a new tensor of its spec for each Out, made of ``tensors``."""
    joined: dict[Any, Tensor] = {}

    def made(out: infer.Out) -> Any:
        spec = specs[out.number]
        if out.same is not None:
            given = tensors[out.same]
            if type(given) is not DistTensor or given.spec is spec:
                return given  # else it was moved first, and what came back is another
        local = joined.get(out.sources)
        if local is None:
            locals_ = [getattr(tensors[i], "local", tensors[i]) for i in out.sources]
            local = joined[out.sources] = token.join(locals_, device)
        new = wrap(local, spec)
        if out.viewed is not None and type(tensors[out.viewed]) is DistTensor:
            views.share(new, tensors[out.viewed])
        return new

    return made(result) if type(result) is infer.Out else substitute(result, made, infer.Out)


def refuse_plain(func: Function, mesh: ProcessMesh, tensors: list[Tensor]) -> None:
    for t in tensors:
        if type(t) is not DistTensor and t.requires_grad and _grad():
            raise RuntimeError(
                f"{name_of(func)}: a plain tensor that requires grad beside a DistTensor on "
                f"{mesh!r}: its gradient is computed on the ranks of that mesh and would not reach "
                "this rank. Make it a DistTensor: shard_tensor(x, mesh)"
            )


def written(func: Function, target: Any, tensors: list[Any], mesh: ProcessMesh) -> None:
    """In place: the target depends on all that was written into it; so do its views, and what it is
    one of."""
    targets: list[Any] = collect(target, [])
    for t in targets:
        if type(t) is not DistTensor:
            raise RuntimeError(
                f"{name_of(func)}: it writes a value on {mesh!r}, which this rank is not in, into "
                "a plain tensor. Give it dt.broadcast_value(x), or make the target a DistTensor"
            )
        t.forget_uses()
    if not _grad():
        return
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
            for member in views.family(t):
                if member.spec.dtype.is_floating_point or member.spec.dtype.is_complex:
                    member.local = into


def wrap_told(told: Any, mesh: ProcessMesh, args: Sequence[Any], kwargs: Any) -> Any:
    """The result of a call whose shapes depend on data, as the ranks inside described it."""
    locals_ = [t.local for t in collect((args, kwargs or {}), []) if type(t) is DistTensor]

    def made(out: TensorMeta) -> DistTensor:
        sources = locals_ if out.requires_grad else ()
        spec = DistSpec(mesh, out.layout, out.shape, out.dtype)
        return wrap(token.join(sources, mesh.device), spec)

    return substitute(told, made, TensorMeta)
