"""local_map: runs the user's own code on locals, with declared placements."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from disttensor.api.from_local import from_pieces
from disttensor.autograd.grad_types import GradType, gradient_type, reshard_local
from disttensor.autograd.tie import tied
from disttensor.cache import Cache
from disttensor.checks import (
    argument_error,
    check_callable,
    check_dense,
    check_sequence,
    check_shape,
)
from disttensor.comm import objects, p2p
from disttensor.core.layout import layout_of
from disttensor.core.mesh import ProcessMesh, as_mesh
from disttensor.core.placement import as_placement
from disttensor.core.spec import DistSpec
from disttensor.dispatch.key import key_of
from disttensor.dispatch.resolve import one_mesh, plain_spec
from disttensor.meta import execute
from disttensor.pytree import Uncacheable, collect, find_tensors, rebuild, substitute
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.reshard import resharded_local
from disttensor.tensor.tensor_meta import described


def local_map(
    fn: Callable[..., Any],
    *positional: Any,
    in_placements: Any = None,
    out_placements: Any = None,
    in_grad_placements: Any = None,
    device_mesh: Any = None,
    out_shapes: Any = None,
) -> Callable[..., Any]:
    """Returns a function that calls ``fn`` with regular local tensors, differentiably. The
    placements are given by name, as torch's ``local_map`` has another order.

    Ranks off the mesh make the call too, and receive the metadata of results: in every call, or
    with ``out_shapes`` in the first of its kind (in a pipeline, of each micro-batch).

    Args:
        in_placements: placements of each tensor argument, which is resharded to them; None keeps
            its own.
        out_placements: placements of each result (one sequence for a single result); None for a
            result that is returned unchanged.
        in_grad_placements: placements of the local gradient of each tensor argument. They default
            to S -> S, P -> R, and R -> Partial if some argument or result varies over the axis,
            else R.
        device_mesh: the mesh of regular tensors among the arguments; None: the mesh of the
            DistTensors.
        out_shapes: the global shape of each result. Without it the shapes follow from the pieces,
            whose sizes are exchanged.

    >>> x = dt.ones(4, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()])
    >>> twice = dt.local_map(lambda piece: piece * 2, out_placements=[dt.Shard(0), dt.Replicate()])
    >>> twice(x).tolist()
    [2.0, 2.0, 2.0, 2.0]
    """
    check_callable("local_map: fn", fn)
    if positional:
        warnings.warn(
            "local_map: give in_placements and out_placements by name; torch's local_map has them "
            "in the other order, so positions are refused in 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
        if len(positional) > 3:
            raise TypeError(f"local_map: 4 positions at most, and {1 + len(positional)} were given")
        given = (*positional, None, None, None)
        in_placements, out_placements = in_placements or given[0], out_placements or given[1]
        in_grad_placements = in_grad_placements or given[2]
    if device_mesh is not None:
        device_mesh = as_mesh("local_map: device_mesh", device_mesh)
    if out_placements is None:
        raise ValueError(
            "local_map: out_placements says what the results are; give placements for each result"
        )

    for name, given in (
        ("in_placements", in_placements),
        ("out_placements", out_placements),
        ("in_grad_placements", in_grad_placements),
    ):
        if given is not None:
            check_sequence(f"local_map: {name}", given, "placements, or a list of them")
    if out_shapes is not None:
        who, nested = "local_map: out_shapes", _nested(out_placements)
        given = check_sequence(who, out_shapes if nested else [out_shapes], "a shape a result")
        for shape in given:
            if shape is not None:
                check_shape(who, shape)
        if len(given) != (len(out_placements) if nested else 1):
            raise argument_error(who, out_shapes, "one for each of out_placements", ValueError)

    # Kind of call -> metadata that ranks off the mesh have received.
    known: Cache[Any, Any] = Cache(1024, received=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = collect((args, kwargs), [])
        if _number(find_tensors((args, kwargs))) > _number(tensors):
            raise TypeError(
                "local_map: a DistTensor in a dataclass: fn gets the pieces of tensors in lists, "
                "tuples and dicts; give the fields as arguments of their own"
            )
        has_mesh = any(isinstance(t, DistTensor) for t in tensors)
        if not has_mesh and device_mesh is None:
            raise ValueError(
                "local_map: no argument is a DistTensor, so the mesh is not known: give device_mesh"
            )
        mesh = one_mesh(fn, tensors) if has_mesh else device_mesh
        if device_mesh not in (None, mesh):
            raise ValueError(f"local_map: device_mesh={device_mesh!r}; the tensors are on {mesh!r}")
        single = not _nested(out_placements)
        outs = [out_placements] if single else list(out_placements)
        shapes = [out_shapes] * len(outs) if single or out_shapes is None else list(out_shapes)
        wanted = list(in_placements) if _nested(in_placements) else [in_placements] * len(tensors)
        grads = in_grad_placements or [None] * len(tensors)
        for name, listed in (("in_placements", wanted), ("in_grad_placements", grads)):
            if len(listed) != len(tensors):
                raise ValueError(
                    f"local_map: {name} has {len(listed)} entries, the call has {len(tensors)} "
                    "tensors"
                )
        specs = []
        for t, w in zip(tensors, wanted, strict=True):
            spec = t.spec if isinstance(t, DistTensor) else plain_spec(t, mesh)
            specs.append(
                spec if w is None else spec.with_layout(layout_of(w, spec.ndim, mesh.ndim))
            )
        vary = {a for s in specs for a in s.layout.varies()}
        for o in outs:
            vary |= {a for a, p in enumerate(o or ()) if str(as_placement(p)) != "R"}
        key = None if out_shapes is None else _kind(args, kwargs, tensors)
        if key is not None:  # other ranks may run micro-batches in another order
            key = p2p.CHANNEL.get(), key
        if mesh.coordinate is None:  # the ranks of the mesh send the metadata
            is_known = key in known
            received = known[key] if is_known else objects.recv_object(mesh.root.ranks, mesh.device)
            if key is not None:
                known[key] = received
            return execute.wrap_received(received, mesh, args, kwargs)
        broadcasts = key not in known
        with objects.sends_error(mesh.root.ranks, mesh.device) if broadcasts else nullcontext():
            given = [
                _local_of(t if isinstance(t, DistTensor) else replicated_of(t, mesh), spec, vary, g)
                for t, spec, g in zip(tensors, specs, grads, strict=True)
            ]
            left = iter(given)
            call = substitute((args, kwargs), lambda _: next(left))
            result = fn(*call[0], **call[1])
            lone = isinstance(result, torch.Tensor) or not isinstance(result, (list, tuple))
            pieces = [result] if lone else list(result)
            if len(pieces) != len(outs):
                raise ValueError(
                    f"local_map: fn gave {len(pieces)} results, out_placements describes "
                    f"{len(outs)}"
                )
            for i, (p, o) in enumerate(zip(pieces, outs, strict=True)):
                if o is not None and not isinstance(p, torch.Tensor):
                    raise TypeError(
                        f"local_map: result {i} of fn is {type(p).__name__}, no tensor, but has "
                        f"placements {o}; give None for it"
                    )
                if o is not None:
                    check_dense(f"local_map: result {i} of fn", p)
            if torch.is_grad_enabled() and any(mesh.shape[a] > 1 for a in vary):
                pieces = tied(pieces, given)
            dressed = [
                p if o is None else from_pieces(p, mesh, layout_of(o, p.ndim, mesh.ndim), s)
                for p, o, s in zip(pieces, outs, shapes, strict=True)
            ]
            result = dressed[0] if lone else rebuild(result, dressed)
        if broadcasts:
            objects.send_object(described(result), mesh.root.ranks, mesh.device)
        if key is not None:
            known[key] = True
        return result

    return run


def _number(tensors: list[torch.Tensor]) -> int:
    return sum(isinstance(t, DistTensor) for t in tensors)


def _local_of(x: DistTensor, spec: DistSpec, vary: set[int], placements: Any) -> torch.Tensor:
    """Returns the local of x in ``spec`` for a use that varies over the axes ``vary``, or whose
    gradient has the given placements."""
    split_axes = spec.layout.varies()
    if placements is None:
        return resharded_local(x, spec, tuple(sorted(vary - split_axes)))
    grads = layout_of(placements, spec.ndim, spec.mesh.ndim)
    axes = tuple(sorted(grads.partial_axes - split_axes))
    if gradient_type(GradType(spec, axes))[0].spec.layout == grads:
        return resharded_local(x, spec, axes)
    return _regrad(resharded_local(x, spec, ()), spec, spec.with_layout(grads))


def _kind(args: Any, kwargs: Any, tensors: list[Any]) -> Any:
    """Returns a key of calls with equal metadata of results, given their shapes, or None."""
    try:
        return (
            key_of(args),
            key_of(kwargs),
            *[t.requires_grad for t in tensors],
            torch.is_grad_enabled(),
        )
    except Uncacheable:
        return None


def replicated_of(t: torch.Tensor, mesh: ProcessMesh) -> DistTensor:
    """Returns a replicated DistTensor of a regular tensor, by an alias with its own node: the
    gradient reaches the tensor."""
    return wrap(
        t.view_as(t) if t.requires_grad and torch.is_grad_enabled() else t, plain_spec(t, mesh)
    )


def _nested(placements: Any) -> bool:
    return (
        placements is not None
        and len(placements) > 0
        and (placements[0] is None or isinstance(placements[0], (list, tuple)))
    )


class _Regrad(torch.autograd.Function):
    """The identity. Its backward takes a gradient in the layout ``given`` and reshards it to the
    gradient's layout for ``spec``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, spec: DistSpec, given: DistSpec) -> torch.Tensor:
        ctx.ends = given, gradient_type(GradType(spec))[0].spec
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        given, wanted = ctx.ends
        return reshard_local(grad, GradType(given), GradType(wanted), None), None, None


def _regrad(x: torch.Tensor, spec: DistSpec, given: DistSpec) -> torch.Tensor:
    return _Regrad.apply(x, spec, given)
