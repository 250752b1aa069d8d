"""Runners: how a plan is carried out on the locals, call after call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from disttensor import errors
from disttensor.autograd.grad_types import Typed, move
from disttensor.dispatch import strict
from disttensor.dispatch.plan import Plan
from disttensor.layout import Axes
from disttensor.spec import DistSpec
from disttensor.tensor import views
from disttensor.tensor.base import from_origin, origin_of, set_origin
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.grad import is_gradient, owner_of
from disttensor.tensor.grad_sync import sync_gradients
from disttensor.tensor.reshard import moved_for, relabels
from disttensor.torch_private import make_subclass
from disttensor.tree import flat, rebuilt, substitute

Tensor = torch.Tensor
Function = Callable[..., Any]
Runner = Callable[[Sequence[Any], Any], Any]

_setitem: Callable[..., Any] = Tensor.__setitem__


def runner_of(
    func: Function, plan: Plan, args: Sequence[Any], kwargs: dict[str, Any], specs: list[DistSpec]
) -> Runner:
    """``direct`` where every tensor is a DistTensor that stays as it lies and one tensor comes out,
    else ``general``."""
    nested = any(flat(a, []) for a in (*args, *kwargs.values()) if not isinstance(a, Tensor))
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    plain = any(type(t) is not DistTensor for t in tensors)
    several = plan.view and (len(tensors) != 1 or tensors[0] is not args[0])
    if (
        several
        or plan.moves
        or nested
        or plain
        or len(plan.gives) != 1
        or (plan.inplace and not args)
    ):
        run = general(func, plan, specs, None if nested else (args, kwargs))
    else:
        run = direct(func, plan, args, kwargs)
    taken = plan.gives[0].varies if plan.gives else frozenset()
    again = plan.again and not (nested or plan.moves or plan.any_varying)
    if again and any(n > 1 and a not in taken for a, n in enumerate(plan.mesh.shape)):
        return repeating(plan.local, run)
    return run


def repeating(local: Function, run: Runner) -> Runner:
    """``run``, whose result is computed once more for each set of axes over which uses of it vary;
    unless somebody has written to it, or to what it was made of, by then."""

    def call(args: Sequence[Any], kwargs: Any) -> Any:
        out = run(args, kwargs)
        if out.local.requires_grad and torch.is_grad_enabled() and origin_of(out) is None:
            words = kwargs or {}
            made = [t for t in (*args, *words.values()) if isinstance(t, Tensor)]
            versions = [_version(t) for t in made]
            value, version, spec = out.local, out.local._version, out.spec

            def varying(a: Any, axes: Axes) -> Any:
                return a.local_for(axes) if type(a) is DistTensor else a

            def again(axes: Axes) -> Tensor:
                if value._version != version or versions != [_version(t) for t in made]:
                    return move(value, Typed(spec), Typed(spec, axes), None)
                return local(
                    *[varying(a, axes) for a in args],
                    **{k: varying(v, axes) for k, v in words.items()},
                )

            set_origin(out, again)
        return out

    return call


def _version(t: Tensor) -> int:
    return (t.local if type(t) is DistTensor else t)._version


def direct(func: Function, plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Runner:
    """The warm path: what is common is at the top of ``run``, what is rare in ``call`` and
    ``finish``."""
    local, spec, inplace = plan.local, plan.gives[0], plan.inplace
    axes_of = iter(plan.varying)
    uses = [
        next(axes_of) if isinstance(a, Tensor) else None for a in args
    ]  # None: no tensor; (): as it is;
    named = [
        next(axes_of) if isinstance(v, Tensor) else None for v in kwargs.values()
    ]  # axes: varying over them
    as_it_is = not (inplace or plan.view or plan.any_varying or kwargs)
    one, two = as_it_is and uses == [()], as_it_is and uses == [(), ()]
    viewing = plan.view and not inplace and not kwargs
    taken = spec.varies
    replays = plan.view and any(n > 1 and a not in taken for a, n in enumerate(plan.mesh.shape))
    itself = plan.view  # may give its argument, as x.contiguous() does
    dtype: Any = None  # unknown until the first result
    meta_tensor = spec.meta_tensor

    def run(args: Sequence[Any], kwargs: Any) -> Any:
        if two:
            out = local(args[0].local, args[1].local)
        elif one:
            out = local(args[0].local)
        elif viewing:
            x = args[0]
            out = local(x.local, *args[1:])
            if (
                out is not x.local
                and type(out) is Tensor
                and out.dtype is dtype
                and x._view_state is None
            ):
                new = make_subclass(DistTensor, meta_tensor)
                new.local = out
                new.spec = spec
                if replays and out.requires_grad and torch.is_grad_enabled():
                    new._grad_state = from_origin(partial(replay, local, x, args[1:], {}))
                return new
        else:
            out = call(args, kwargs)
            if inplace:
                return written(args[0], out)
        if itself or type(out) is not Tensor or out.dtype is not dtype:
            return finish(args, kwargs, out)
        new = make_subclass(DistTensor, meta_tensor)
        new.local = out
        new.spec = spec
        return new

    def call(args: Sequence[Any], kwargs: Any) -> Any:
        if inplace and args[0]._view_state is not None:
            refuse_copies(func, args[0])
        # spelled out, not used(): a call or a keyword for each argument costs in the warm path
        locals_: list[Any] = [
            a if u is None else a.local_for(u) if u else a.local
            for a, u in zip(args, uses)  # noqa: B905
        ]
        if not kwargs:
            return local(*locals_)
        return local(
            *locals_, **{k: used(v, u) for (k, v), u in zip(kwargs.items(), named, strict=True)}
        )

    def finish(args: Sequence[Any], kwargs: Any, out: Any) -> Any:
        nonlocal spec, dtype, meta_tensor
        x: Any = args[0] if args else None
        if type(x) is DistTensor and out is x.local:
            return x
        if type(out) is not Tensor:  # None of x[i] = y; one piece in a tuple, of a split
            return give(out, [spec], plan)
        if out.dtype is not dtype:
            spec = checked(plan, out, spec)
            dtype, meta_tensor = spec.dtype, spec.meta_tensor
        new = wrap(out, spec)
        if itself and type(x) is DistTensor and x._view_state is not None:
            views.inherit(new, x)
        if replays and out.requires_grad and torch.is_grad_enabled():
            new._grad_state = from_origin(partial(replay, local, x, args[1:], kwargs or {}))
        return new

    return run


def replay(local: Function, x: DistTensor, rest: Sequence[Any], kwargs: Any, axes: Axes) -> Tensor:
    """The origin of a view: a varying use of the view is the view of a varying use."""
    out: Tensor = local(x.local_for(axes), *rest, **kwargs)
    return out


def used(a: Any, axes: Axes | None) -> Any:
    """An argument as its use wants it: a constant, the local, or the local of a use that varies
    over ``axes``."""
    return a if axes is None else a.local_for(axes) if axes else a.local


def general(func: Function, plan: Plan, specs: list[DistSpec], shallow: Any) -> Runner:
    """Reshards, in-place targets, lists, several results, views, plain tensors among the arguments.

    ``shallow``: args and kwargs of a call in which no tensor is inside a list.
    """
    numbers = iter(range(len(plan.wants)))
    given = (shallow[0], shallow[1].values()) if shallow else ((), ())
    slots, named = (
        [next(numbers) if isinstance(a, Tensor) else -1 for a in part] for part in given
    )
    local, wants, axes_of = plan.local, plan.wants, plan.varying
    gives = list(plan.gives)
    untouched = not plan.moves and not plan.any_varying
    replays = plan.view and not plan.moves
    moved = any(w is not None and not relabels(s, w) for s, w in zip(specs, wants, strict=True))
    settles = [
        bool(w is not None and s.layout.partial and not w.layout.partial)
        for w, s in zip(wants, specs, strict=True)
    ]
    pending = any(settles)

    def at(t: Tensor, i: int) -> Tensor:
        return local_as(t, wants[i], axes_of[i], specs[i])

    def run(args: Sequence[Any], kwargs: Any) -> Any:
        if pending and not strict.level and settle(args, kwargs, settles):
            return func(
                *args, **(kwargs or {})
            )  # the gradients among the arguments are reduced now, once for all
        if plan.moves and strict.level:
            strict.check_moves(func, specs, wants)
        kwargs = kwargs or {}
        if untouched:
            local_args = [_local_of(a, plan) for a in args]
            local_kwargs = {k: _local_of(v, plan) for k, v in kwargs.items()} if kwargs else kwargs
        elif shallow:
            local_args = [a if i < 0 else at(a, i) for a, i in zip(args, slots, strict=True)]
            local_kwargs = {
                k: v if i < 0 else at(v, i) for (k, v), i in zip(kwargs.items(), named, strict=True)
            }
        else:
            count = itertools.count()
            local_args = substitute(args, lambda t: at(t, next(count)))
            local_kwargs = substitute(kwargs, lambda t: at(t, next(count)))
        if plan.inplace:
            refuse_copies(func, args[0])
        out = local(*local_args, **local_kwargs)
        if plan.inplace:
            return written(args[0], out)
        x: Any = args[0] if args else None
        if type(x) is DistTensor and out is x.local:
            return x
        result = give(out, gives, plan)
        if (
            replays
            and type(x) is DistTensor
            and x.local.requires_grad
            and torch.is_grad_enabled()
            and type(result) is DistTensor
        ):
            rest = tuple(local_args[1:])
            set_origin(result, partial(replay, local, x, rest, local_kwargs))
        if plan.view and not moved and type(x) is DistTensor and x._view_state is not None:
            for r in flat(result, []):
                views.inherit(r, x)
        elif plan.view and moved:
            for r in result if isinstance(result, (list, tuple)) else (result,):
                if isinstance(r, DistTensor) and type(x) is DistTensor:
                    indexed = func is Tensor.__getitem__
                    back = partial(_setitem, x, args[1]) if indexed else None
                    views.enter(r, x, errors.name_of(func), back)
        return result

    return run


def settle(args: Sequence[Any], kwargs: Any, settles: Sequence[bool]) -> bool:
    """Where pending gradients of parameters are wanted whole, reduce them for good: as an optimizer
    step would."""
    if not kwargs and not any(
        type(a) is list or type(a) is tuple or (type(a) is DistTensor and is_gradient(a))
        for a in args
    ):
        return False
    tensors = flat((args, kwargs or {}), [])
    owners = [
        owner_of(t)
        for t, now in zip(tensors, settles, strict=True)
        if now and type(t) is DistTensor
    ]
    found = [p for p in owners if p is not None]
    if found:
        sync_gradients(found)
    return bool(found)


def local_as(t: Tensor, want: DistSpec | None, axes: Axes, spec: DistSpec) -> Tensor:
    """The local of an argument in the layout and for the use that the plan says."""
    if type(t) is not DistTensor:
        if want is None and not axes:
            return t
        # Not t itself: the alias of a leaf would be a leaf that nobody reads.
        t = wrap(t.view_as(t) if t.requires_grad and torch.is_grad_enabled() else t, spec)
    if want is None:
        return t.local_for(axes) if axes else t.local
    return moved_for(t, want, axes)


def _local_of(a: Any, plan: Plan) -> Any:
    if type(a) is DistTensor:
        return a.local
    if (type(a) is list or type(a) is tuple) and a and type(a[0]) is not float:
        try:
            found = [t.local for t in a]
            return found if type(a) is list else tuple(found)  # x[i, j] is not x[[i, j]]
        except AttributeError:
            return type(a)([_local_of(v, plan) for v in a])
    return a


def checked(plan: Plan, out: Tensor, spec: DistSpec) -> DistSpec:
    """The spec of a result with its real dtype; a rule that lies about the local shape is caught
    here, once."""
    if plan.mesh.coordinate is not None and tuple(out.shape) != tuple(spec.local_shape):
        raise RuntimeError(
            f"the rule {plan.rule.name} says that this rank's piece of {spec!r} is "
            f"{list(spec.local_shape)}, but the local function gave {list(out.shape)}: the rule is "
            "wrong"
        )
    return spec if out.dtype is spec.dtype else spec.with_dtype(out.dtype)


def give(out: Any, gives: list[DistSpec], plan: Plan) -> Any:
    """Local results as DistTensors, in the structure they came in."""
    if isinstance(out, Tensor):
        gives[0] = checked(plan, out, gives[0])
        return wrap(out, gives[0])
    if (type(out) is tuple or type(out) is list) and len(out) == len(gives):
        pairs = list(zip(out, gives, strict=True))
        if all(
            type(o) is Tensor and o.dtype is g.dtype and o.shape == g.local_shape for o, g in pairs
        ):
            return type(out)([wrap(o, g) for o, g in pairs])
    numbers = iter(range(len(gives)))

    def dress(value: Any) -> Any:
        if isinstance(value, Tensor):
            i = next(numbers)
            if value.dtype is not gives[i].dtype or tuple(value.shape) != tuple(
                gives[i].local_shape
            ):
                gives[i] = checked(plan, value, gives[i])
            return wrap(value, gives[i])
        if isinstance(value, (list, tuple)):
            items = [dress(v) for v in value]
            return rebuilt(value, items)
        return value

    return dress(out)


def refuse_copies(func: Function, target: Any) -> None:
    """Before a write: raise where it would be lost."""
    for t in target if isinstance(target, (list, tuple)) else (target,):
        if type(t) is DistTensor:
            views.refuse_copy(t, errors.name_of(func))


def written(target: Any, out: Any) -> Any:
    """The result of an in-place function: its target(s), whose uses before this are of the old
    value."""
    if type(target) is DistTensor:
        if target._grad_state is not None or target._reduced is not None or views.LIVE:
            target.forget_uses()
        if target._view_state is not None:
            views.write_back(target)
        return None if out is None else target
    if isinstance(target, Tensor):  # a plain tensor that took DistTensors in
        return None if out is None else target
    for t in target:
        if type(t) is DistTensor:
            written(t, None)
    return None if out is None else target
