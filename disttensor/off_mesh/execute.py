"""Makes and updates the results of calls off the mesh: metadata and tokens, no memory, no kernel.
``disttensor.dispatch.run.run_off_mesh`` calls it.

The layout of a result comes from the rule, as on ranks of the mesh. Shapes, dtypes and dependencies
come from ``ops.answer``, once per kind of call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttensor.autograd import token
from disttensor.comm import objects
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec
from disttensor.errors import name_of
from disttensor.pytree import collect, substitute
from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.tensor_meta import TensorMeta
from disttensor.tensor.uses import invalidate
from disttensor.tensor.values import values_everywhere
from disttensor.torch_private import DataDependentOutput
from ops.answer import CallMetadata, Dynamic, TensorResult, answer

Tensor = torch.Tensor
Function = Callable[..., Any]

_grad: Callable[[], bool] = torch.is_grad_enabled


def off_mesh_leaf(spec: DistSpec, requires_grad: bool = False) -> DistTensor:
    """Returns a leaf of ``spec`` on a rank off its mesh."""
    device = spec.mesh.device
    return wrap(
        token.leaf(device, spec.dtype) if requires_grad else token.no_grad_token(device), spec
    )


def metadata_of_results(
    func: Function, mesh: ProcessMesh, args: Sequence[Any], kwargs: Any
) -> CallMetadata | None:
    """Returns the metadata of the results; None if the ranks of the mesh send it."""
    try:
        return answer(func, args, kwargs or {})
    except Dynamic:
        return None
    except DataDependentOutput:
        raise RuntimeError(
            f"{name_of(func)} returns a Python value that depends on the data of a tensor on "
            f"{mesh!r}, which this rank is not in. Call it inside `with dt.values_everywhere():`, "
            "or with dt.broadcast_value(x)"
        ) from None


def fill_results(
    result: Any, specs: Sequence[DistSpec], tensors: Sequence[Any], device: torch.device
) -> Any:
    """Returns ``result`` with a new tensor of its spec for each TensorResult, made from
    ``tensors``."""
    joined: dict[Any, Tensor] = {}
    results: dict[int, DistTensor] = {}  # a module may return a tensor more than once

    def made(out: TensorResult) -> Any:
        if out.number in results:
            return results[out.number]
        spec = specs[out.number]
        if out.same is not None:
            given = tensors[out.same]
            if type(given) is not DistTensor or given.spec is spec:
                return given  # else a reshard came first: the result is another tensor
        local = joined.get(out.sources)
        if local is None:
            locals_ = [getattr(tensors[i], "local", tensors[i]) for i in out.sources]
            local = joined[out.sources] = token.join(locals_, device)
        new = results[out.number] = wrap(local, spec)
        if out.viewed is not None and type(tensors[out.viewed]) is DistTensor:
            views.register_view(new, tensors[out.viewed], out.strides)
        elif out.strides is not None:
            views.view_state(new).strides = out.strides
        return new

    return made(result) if type(result) is TensorResult else substitute(result, made, TensorResult)


def refuse_regular(func: Function, mesh: ProcessMesh, tensors: list[Tensor]) -> None:
    for t in tensors:
        if type(t) is not DistTensor and t.requires_grad and _grad():
            raise RuntimeError(
                f"{name_of(func)}: a regular tensor that requires grad in a call on {mesh!r}: its "
                "gradient is computed on the ranks of that mesh and would not reach this rank. "
                "Make it a DistTensor: shard_tensor(x, mesh)"
            )


def mark_written(func: Function, targets: list[Any], mesh: ProcessMesh) -> None:
    """Updates state after a write to ``targets`` on the ranks of the mesh."""
    for t in targets:
        if type(t) is DistTensor:
            views.refuse_copy(t, func)
            views.outdate_input(t)
            invalidate(t)
        elif not values_everywhere.current():
            raise RuntimeError(
                f"{name_of(func)}: it writes a value on {mesh!r}, which this rank is not in, into "
                "a regular tensor. Make the call inside `with dt.values_everywhere():` on all "
                "ranks, give it dt.broadcast_value(x), or make the target a DistTensor"
            )
    broadcast_written(targets, mesh)


def update_written(func: Function, target: Any, tensors: list[Any], mesh: ProcessMesh) -> None:
    """Makes the target of an in-place call, its views and its base depend on all inputs."""
    targets: list[Any] = collect(target, [])
    mark_written(func, targets, mesh)
    targets = [t for t in targets if type(t) is DistTensor]
    if not _grad():
        return
    for t in targets:
        if t.local.is_leaf and t.local.requires_grad:
            raise RuntimeError(  # torch's text
                "a leaf Variable that requires grad is being used in an in-place operation."
            )
    into = token.join([t.local for t in tensors if type(t) is DistTensor], mesh.device)
    if into.requires_grad:
        token.replacements[0] += 1  # guards of recorded forwards compare tensors again
        for t in targets:
            for member in views.aliases_of(t):
                if member.spec.dtype.is_floating_point or member.spec.dtype.is_complex:
                    member.local = into


def broadcast_written(target: Any, mesh: ProcessMesh) -> None:
    """Gives the regular tensors in ``target`` the values that the ranks of ``mesh`` have written,
    on the other ranks, inside of ``values_everywhere``. Each way in which a call in place runs on
    the mesh makes this call, as ``update_written`` does off the mesh, with the same target."""
    if not values_everywhere.current() or not objects.other_ranks(mesh.root.ranks):
        return
    for t in [t.detach() for t in collect(target, []) if type(t) is not DistTensor]:
        own = None if mesh.coordinate is None else t.to(mesh.device)
        value = objects.broadcast_value(own, mesh.root.ranks, mesh.device, t.shape, t.dtype)
        if own is None:
            t.copy_(value)


def wrap_received(received: Any, mesh: ProcessMesh, args: Sequence[Any], kwargs: Any) -> Any:
    """Returns the result of a call with data-dependent shapes, from its received description."""
    locals_ = [t.local for t in collect((args, kwargs or {}), []) if type(t) is DistTensor]

    def made(out: TensorMeta) -> DistTensor:
        sources = locals_ if out.requires_grad else ()
        spec = DistSpec(mesh, out.layout, out.shape, out.dtype)
        return wrap(token.join(sources, mesh.device), spec)

    return substitute(received, made, TensorMeta)
