"""local_map: runs the user's own code on locals, with declared placements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from disttensor.api.from_local import from_pieces
from disttensor.autograd.grad_types import GradType, gradient_type, reshard_local
from disttensor.autograd.tie import tie_outputs
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
from disttensor.dispatch.resolve import mesh_of_call, refuse_torch_dtensors, regular_spec
from disttensor.dispatch.run import as_replicated
from disttensor.off_mesh import execute
from disttensor.pytree import Uncacheable, collect, find_tensors, rebuild, substitute
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.reshard import resharded_local
from disttensor.tensor.tensor_meta import describe_tensors
from ops.answer import surroundings


def local_map(
    fn: Callable[..., Any],
    *,
    out_placements: Any,
    in_placements: Any = None,
    in_grad_placements: Any = None,
    device_mesh: Any = None,
    out_shapes: Any = None,
) -> Callable[..., Any]:
    """Returns a function that calls ``fn`` with regular local tensors, differentiably. Give the
    placements by name: torch's ``local_map`` takes ``out_placements`` first.

    Ranks off the mesh make the call too, and receive the metadata of results: in every call, or
    with ``out_shapes`` in the first of its kind (in a pipeline, of each micro-batch).

    Random numbers that ``fn`` draws come from torch's generator of each rank: equal ones on all
    ranks, also for different pieces, if the ranks have drawn alike before, and else different ones,
    also on replicas. Draw them outside, and pass them as an argument: ``torch.rand_like(x)`` of a
    DistTensor has numbers by global index.

    Args:
        fn: a function of tensors and other values. Tensors in lists, tuples and dicts count.
        in_placements: placements of each tensor argument, which is resharded to them; None keeps
            its own.
        out_placements: placements of each result (one sequence for a single result); None for a
            result that is returned unchanged, such as a number.
        in_grad_placements: placements of the local gradient of each tensor argument. They default
            to S -> S, P -> R, and R -> Partial if some argument or result varies over the axis,
            else R.
        device_mesh: the mesh of the results, and of regular tensors among the arguments. None: the
            mesh of the DistTensors. DistTensors may be on other meshes of the same ranks.
        out_shapes: the global shape of each result. Without it the shapes follow from the pieces,
            whose sizes are exchanged.

    Raises:
        ValueError: if placements, shapes or meshes do not fit the tensors or the results.
        TypeError: for a result that is no tensor and has placements.

    >>> x = dt.ones(4, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()])
    >>> twice = dt.local_map(lambda piece: piece * 2, out_placements=[dt.Shard(0), dt.Replicate()])
    >>> twice(x).tolist()
    [2.0, 2.0, 2.0, 2.0]
    """
    check_callable("local_map: fn", fn)
    if device_mesh is not None:
        device_mesh = as_mesh("local_map: device_mesh", device_mesh)
    for name, given in (
        ("in_placements", in_placements),
        ("out_placements", out_placements),
        ("in_grad_placements", in_grad_placements),
    ):
        if given is not None:
            check_sequence(f"local_map: {name}", given, "placements, or a list of them")
    outs = list(out_placements) if _nested(out_placements) else [out_placements]
    shapes = _checked_shapes(out_shapes, len(outs), _nested(out_placements))

    # Kind of call -> metadata that ranks off the mesh have received. A result without placements
    # may be another value in each call.
    known: Cache[Any, Any] = Cache(1024, received=True)
    always_sends = out_shapes is None or any(o is None for o in outs)

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = collect((args, kwargs), [])
        mesh = _mesh_of(fn, args, kwargs, device_mesh)
        wanted = list(in_placements) if _nested(in_placements) else [in_placements] * len(tensors)
        grads = in_grad_placements or [None] * len(tensors)
        for name, listed in (("in_placements", wanted), ("in_grad_placements", grads)):
            if len(listed) != len(tensors):
                raise ValueError(
                    f"local_map: {name} has {len(listed)} entries, the call has {len(tensors)} "
                    "tensors"
                )
        inputs = [
            t if isinstance(t, DistTensor) else as_replicated(t, regular_spec(t, mesh))
            for t in tensors
        ]
        specs = [
            x.spec if w is None else x.spec.with_layout(layout_of(w, x.ndim, x.spec.mesh.ndim))
            for x, w in zip(inputs, wanted, strict=True)
        ]
        vary = _varying(mesh, specs, outs, all(g is not None for g in grads))
        key = None if always_sends else _kind(args, kwargs, tensors)
        if key is not None:  # other ranks may run micro-batches in another order
            key = p2p.CHANNEL.get(), key
        if mesh.coordinate is None:  # the ranks of the mesh send the metadata
            is_known = key in known
            received = (
                known[key]
                if is_known
                else objects.recv_object(mesh.root.ranks, mesh.device, any_class=True)
            )
            if key is not None:
                known[key] = received
            return execute.wrap_received(received, mesh, args, kwargs)
        broadcasts = key is None or key not in known
        with objects.send_errors(mesh.root.ranks, mesh.device) if broadcasts else nullcontext():
            locals_ = [
                _local_of(x, s, vary[s.mesh], g)
                for x, s, g in zip(inputs, specs, grads, strict=True)
            ]
            left = iter(locals_)
            call = substitute((args, kwargs), lambda _: next(left))
            result = fn(*call[0], **call[1])
            pieces, rebuilt = _checked_pieces(result, outs)
            if in_grad_placements is None:
                _refuse_whole(pieces, outs, mesh, vary[mesh])
            if torch.is_grad_enabled() and any(mesh.shape[a] > 1 for a in vary[mesh]):
                pieces = tie_outputs(pieces, locals_)
            result = rebuilt([
                p if o is None else from_pieces(p, mesh, layout_of(o, p.ndim, mesh.ndim), s)
                for p, o, s in zip(pieces, outs, shapes, strict=True)
            ])  # fmt: skip
        described = describe_tensors(result)
        if broadcasts:
            objects.send_object(described, mesh.root.ranks, mesh.device, any_class=True)
        elif known[key] != described:
            raise RuntimeError(
                f"local_map: the results are {described}, and were {known[key]} in the first call "
                "with such arguments. Ranks off the mesh have received the first description only. "
                "Leave out out_shapes, so that each call sends it"
            )
        if key is not None:
            known[key] = described
        return result

    return run


def _checked_shapes(shapes: Any, count: int, nested: bool) -> Sequence[Any]:
    """Checks ``out_shapes``, and returns the shape of each of ``count`` results, or None."""
    if shapes is None:
        return [None] * count
    who = "local_map: out_shapes"
    given = check_sequence(who, shapes if nested else [shapes], "one shape for each result")
    for shape in given:
        if shape is not None:
            check_shape(who, shape)
    if len(given) != count:
        raise argument_error(who, shapes, "one shape for each entry of out_placements", ValueError)
    return given


def _mesh_of(fn: Any, args: Any, kwargs: Any, device_mesh: ProcessMesh | None) -> ProcessMesh:
    """Returns the mesh of a call: of its DistTensors, or ``device_mesh``."""
    tensors = collect((args, kwargs), [])
    if _number(find_tensors((args, kwargs))) > _number(tensors):
        raise TypeError(
            "local_map: an argument has a DistTensor in a dataclass, and fn gets the pieces of "
            "tensors in lists, tuples and dicts only; give the fields as arguments of their own"
        )
    refuse_torch_dtensors(fn, tensors)
    if _number(tensors):
        if device_mesh is None:
            return mesh_of_call(fn, tensors)
        for t in tensors:
            if isinstance(t, DistTensor) and set(t.spec.mesh.ranks) != set(device_mesh.ranks):
                raise ValueError(
                    f"local_map: device_mesh={device_mesh!r}, and an argument is on other ranks, "
                    f"those of {t.spec.mesh!r}: reshard it first"
                )
    if device_mesh is None:
        raise ValueError(
            "local_map: no argument is a DistTensor, so the mesh is not known: give device_mesh"
        )
    return device_mesh


def _varying(
    mesh: ProcessMesh, specs: Sequence[DistSpec], outs: Sequence[Any], grads_given: bool
) -> dict[ProcessMesh, set[int]]:
    """Returns, for each mesh, the axes over which arguments or results vary. With several meshes,
    the axes of one say nothing about the axes of another, unless a tensor varies over all of its
    mesh: then the locals differ on all ranks."""
    vary = {mesh: {a for o in outs for a, p in enumerate(o or ()) if str(as_placement(p)) != "R"}}
    for s in specs:
        vary.setdefault(s.mesh, set()).update(s.layout.varies())
    if len(vary) == 1 or not any(vary.values()):
        return vary
    every = {m: {a for a, n in enumerate(m.shape) if n > 1} for m in vary}
    if not (grads_given or any(vary[m] >= every[m] for m in vary)):
        raise ValueError(
            f"local_map: the tensors are on {' and '.join(map(repr, vary))}, and none is split or "
            "pending over all axes of its mesh, so the placements of the gradients are not known: "
            "give in_grad_placements for each tensor"
        )
    return every


def _checked_pieces(result: Any, outs: Sequence[Any]) -> tuple[list[Any], Callable[..., Any]]:
    """Checks the results of ``fn``. Returns them, and the function that puts others in their
    place."""
    single = isinstance(result, torch.Tensor) or not isinstance(result, (list, tuple))
    pieces = [result] if single else list(result)
    if len(pieces) != len(outs):
        raise ValueError(
            f"local_map: fn gave {len(pieces)} results, out_placements describes {len(outs)}"
        )
    for i, (p, o) in enumerate(zip(pieces, outs, strict=True)):
        if o is not None and not isinstance(p, torch.Tensor):
            raise TypeError(
                f"local_map: result {i} of fn is {type(p).__name__}, no tensor, but has "
                f"placements {o}; give None for it"
            )
        if o is not None:
            check_dense(f"local_map: result {i} of fn", p)
    return pieces, (lambda made: made[0]) if single else partial(rebuild, result)


def _refuse_whole(pieces: list[Any], outs: list[Any], mesh: ProcessMesh, vary: set[int]) -> None:
    """Raises ValueError for a result that is Replicate over an axis over which others vary, if it
    needs a gradient: does each rank get the whole one, or all together?"""
    for i, (p, o) in enumerate(zip(pieces, outs, strict=True)):
        if o is None or not (torch.is_grad_enabled() and p.requires_grad):
            continue
        whole = [a for a in vary if mesh.shape[a] > 1 and str(as_placement(list(o)[a])) == "R"]
        if whole:
            name = mesh.dim_names[min(whole)]
            raise ValueError(
                f"local_map: result {i} is Replicate over {name!r}, and an argument or another "
                "result is not, so it is not known whether its gradient counts once or on each "
                "rank. If each rank computes a summand, return it as Partial() without an "
                "all-reduce; if it follows from replicated arguments alone, make it by a call of "
                "its own; if the function's backward expects the whole gradient on each rank, give "
                "in_grad_placements"
            )


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
    return _Regrad.apply(resharded_local(x, spec, ()), spec, spec.with_layout(grads))


def _kind(args: Any, kwargs: Any, tensors: list[Any]) -> Any:
    """Returns a key of calls with equal metadata of results, given their shapes, or None."""
    try:
        return (
            key_of(args),
            key_of(kwargs),
            *[t.requires_grad for t in tensors],
            torch.is_grad_enabled(),
            *surroundings(),
        )
    except Uncacheable:
        return None


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
