"""Runs functions without a rule: by their Python body, or on gathered inputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from disttensor.comm import objects
from disttensor.dispatch import strict
from disttensor.dispatch.call_plan import PythonCall
from disttensor.dispatch.function_body import body_of
from disttensor.dispatch.pending_grads import reduce_pending
from disttensor.dispatch.plan_call import plan_off_mesh
from disttensor.dispatch.resolve import mesh_of_call, regular_spec
from disttensor.dispatch.run import run_off_mesh
from disttensor.dispatch.writes import mark_written
from disttensor.errors import name_of
from disttensor.off_mesh import execute
from disttensor.pytree import collect, rebuild, substitute
from disttensor.random.draws import fork_generators, generator_for_one, generator_in
from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.reshard import resharded_local
from disttensor.tensor.tensor_meta import describe_tensors
from disttensor.tensor.versions import count, version
from disttensor.torch_private import schemas_of, storage_id
from ops.answer import is_dynamic

Tensor = torch.Tensor
Function = Callable[..., Any]

_running = threading.local()


def run_body(planned: PythonCall, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs the Python body of a function, which draws numbers of regular tensors alike on all
    ranks; gathers if there is none, or in a recursive call."""
    func = planned.func
    body, running = body_of(func), _running.__dict__.setdefault("functions", set())
    if body is None or func in running:
        return gather_and_run(planned, args, kwargs)
    running.add(func)
    try:
        with fork_generators(_a_mesh((args, kwargs))):
            return body(*args, **kwargs)
    finally:
        running.discard(func)


def _a_mesh(value: Any) -> Any:
    """Returns the mesh of the first DistTensor."""
    return collect(value, [], DistTensor)[0].spec.mesh


def writes(func: Function) -> bool:
    """Returns True if the function changes its first argument, by torch's naming convention."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i")
            and name not in ("__invert__", "__int__", "__index__", "__iter__")
        )
    return name.endswith("_") and func is not torch.Tensor.requires_grad_


# Arguments that torch functions write without a sign in the name or in a version counter
UNDECLARED_WRITES: dict[Function, dict[str, int]] = {
    **{
        getattr(torch, name): {"running_mean": 3, "running_var": 4} for name in (
            "batch_norm", "instance_norm", "native_batch_norm",
            "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_gather_stats",
            "batch_norm_gather_stats_with_counts",
        )
    },
    torch.batch_norm_update_stats: {"running_mean": 1, "running_var": 2},
    torch.fused_moving_avg_obs_fake_quant: {
        "running_min": 3, "running_max": 4, "scale": 5, "zero_point": 6,
    },
}  # fmt: skip


def written_by(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors that a call changes: its first argument by torch's naming convention, and
    the arguments that the schema of a custom op marks as written."""
    found = collect([*args, *kwargs.values()][:1], []) if writes(func) else []
    places = dict(UNDECLARED_WRITES.get(func, {}))
    for schema in schemas_of(func):
        for i, one in enumerate(schema.arguments):
            if one.alias_info is not None and one.alias_info.is_write:
                places[one.name] = i
    for name, i in places.items():
        collect(args[i] if i < len(args) else kwargs.get(name), found)
    return found


def _gather_off_mesh(func: Function, mesh: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs ``gather_and_run`` on a rank off the mesh."""
    writing = writes(func)
    result = run_off_mesh(plan_off_mesh(func, mesh, None, args, kwargs, writing), args, kwargs)
    changed = [] if writing else written_by(func, args, kwargs)
    if changed:
        execute.mark_written(func, changed, mesh)
    return result


def gather_and_run(planned: PythonCall, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Gathers the inputs to Replicate, runs the function on full tensors, and returns Replicate.
    Arguments that the function writes keep their placements."""
    func, writing = planned.func, writes(planned.func)
    taken: dict[int, tuple[DistTensor, Tensor, int]] = {}  # an argument given twice is one tensor
    given: dict[int, DistTensor] = {}  # for functions that return their argument
    changed = {id(t) for t in written_by(func, args, kwargs)}

    def take(x: Tensor) -> Tensor:
        if type(x) is not DistTensor:
            return x
        if id(x) in taken:
            return taken[id(x)][1]
        full = resharded_local(x, x.spec.replicated(), ())
        if x.spec is not x.spec.replicated() and id(x) in changed:
            full = full.clone()
        taken[id(x)] = x, full, version(full)
        given[id(full)] = x
        return full

    tensors = collect((args, kwargs), [])
    mesh = mesh_of_call(func, tensors)
    if mesh.coordinate is None:
        return _gather_off_mesh(func, mesh, args, kwargs)
    specs = [t.spec for t in tensors if type(t) is DistTensor]
    pending = [type(t) is DistTensor and bool(t.spec.layout.partial) for t in tensors]
    if not strict.strict.current() and reduce_pending(args, kwargs, pending):
        return gather_and_run(planned, args, kwargs)
    if not planned.is_expected:
        strict.fallback(func, specs, planned.why)
    elif strict.strict.current():
        strict.check_moves(func, specs, [s.replicated() for s in specs])
    generator = generator_in(args, kwargs)
    if generator is not None:
        own = generator_for_one(mesh, generator)
        args = [own if a is generator else a for a in args]
        kwargs = {k: own if a is generator else a for k, a in kwargs.items()}
    broadcasts = bool(objects.other_ranks(mesh.root.ranks)) and is_dynamic(func, args, kwargs)
    sending = objects.send_errors(mesh.root.ranks, mesh.device) if broadcasts else nullcontext()
    try:
        with sending, fork_generators(mesh):
            out = func(*substitute(tuple(args), take), **substitute(kwargs, take))
    finally:  # a recomputation for a backward may stop after a write
        for x, full, before in taken.values():
            # apply_ and some custom ops write without a new version
            if version(full) != before or id(x) in changed:
                _give_back(x, full, func, before)
    first: Any = next(iter((*args, *kwargs.values())), None)
    written = first if writing else written_by(func, args, kwargs)
    if not broadcasts:
        execute.broadcast_written(written, mesh)
    if writing and any(type(t) is DistTensor for t in collect(first, [])):
        return first if isinstance(out, (Tensor, list, tuple)) else out
    if any(t.layout is torch.strided and _memory(t) is None for t in collect(out, [])):
        return out  # inside a transform, which supports regular tensors only
    result = wrap_full(out, mesh, given)
    moved = [(x, full) for x, full, _ in taken.values() if x.spec is not x.spec.replicated()]
    sources = {memory: x for x, full in moved if (memory := _memory(full)) is not None}
    for t in collect(result, []) if sources else ():
        source = sources.get(_memory(t.local)) if type(t) is DistTensor else None
        if source is not None:  # a view, if run in one process
            views.register_copy(t, source, func)
    if broadcasts:
        objects.send_object(describe_tensors(result), mesh.root.ranks, mesh.device)
        execute.broadcast_written([] if writing else written, mesh)  # as ``_gather_off_mesh``
    return result


def _memory(x: Tensor) -> Any:
    """Returns an identifier of the memory of x; None inside a transform (vmap) without memory."""
    try:
        return storage_id(x.untyped_storage())
    except NotImplementedError:
        return None


def _give_back(x: DistTensor, full: Tensor, func: Function, before: int) -> None:
    """Copies the full value, which ``func`` has written, into ``x``. ``before``: its version."""
    views.refuse_copy(x, func)
    tracked = True
    if x.spec is not x.spec.replicated():
        x.local.copy_(resharded_local(wrap(full, x.spec.replicated()), x.spec, ()))
    elif version(full) == before:
        count(full)
        tracked = False
    mark_written(x, tracked)


def wrap_full(out: Any, mesh: Any, given: dict[int, DistTensor]) -> Any:
    """Wraps full results as replicated DistTensors. A sparse or quantized tensor stays a regular
    tensor, the same on every rank."""

    def made(t: Tensor) -> Tensor:
        if id(t) in given:
            return given[id(t)]
        whole = t.layout is torch.strided and not t.is_quantized
        whole = whole and (type(t) is Tensor or isinstance(t, torch.nn.Parameter))
        return wrap(t, regular_spec(t, mesh)) if whole else t

    return substitute(out, made)


def run_into_out(planned: PythonCall, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs the call, then copies the result into ``out=``, which keeps its placement; a regular
    tensor receives the full value. Raises RuntimeError where torch does: for a dtype that cannot
    hold the result, and for a call that autograd would record.

    If no argument is a DistTensor, torch writes full tensors of the dtypes of ``out=``, with the
    same random numbers on all ranks.
    """
    rest = {k: v for k, v in kwargs.items() if k != "out"}
    func, out = planned.func, kwargs["out"]

    def whole(x: Tensor) -> Tensor:
        s = getattr(x, "spec", None)
        return x if s is None else torch.empty(s.shape, dtype=s.dtype, device=s.mesh.device)

    if collect((args, rest), [], DistTensor):
        result = func(*args, **rest)
    else:
        with fork_generators(_a_mesh(out)):
            result = func(*args, **rest, out=substitute(out, whole))
    targets = out if isinstance(out, (list, tuple)) else (out,)
    results = result if isinstance(result, (list, tuple)) else (result,)
    for target, value in zip(targets, results, strict=True):
        if type(target) is not DistTensor and not target.numel():  # such as torch.empty(0)
            target.resize_(tuple(value.shape))
        if tuple(target.shape) != tuple(value.shape):
            raise RuntimeError(
                f"{name_of(func)}: out= has shape {list(target.shape)}, the result "
                f"{list(value.shape)}; it is not resized"
            )
        if not torch.can_cast(value.dtype, target.dtype):
            raise RuntimeError(
                f"{name_of(func)}: result type {value.dtype} can't be cast to {target.dtype}, the "
                "dtype of out="
            )
        if torch.is_grad_enabled() and (value.requires_grad or target.requires_grad):
            raise RuntimeError(
                f"{name_of(func)}: functions with out=... arguments don't support automatic "
                "differentiation, but one of the arguments requires grad. Call it without out=, or "
                "inside torch.no_grad()"
            )
    for target, value in zip(targets, results, strict=True):
        target.copy_(value)
    return rebuild(result, list(targets)) if isinstance(result, tuple) else out
