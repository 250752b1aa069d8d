"""DistTensor: a global tensor of which this rank holds a piece.

The wrapper is never in an autograd graph: ``local`` is, and PyTorch's own autograd runs on it.
The spec provides the metadata, the locals provide the gradients, and every torch function goes
through ``disttensor.dispatch``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from disttensor.autograd import token
from disttensor.autograd.grad_types import scale_average_grad
from disttensor.checks import check_bool, check_dtype
from disttensor.comm.process_group import world
from disttensor.core.layout import Layout
from disttensor.core.mesh import ProcessMesh, as_mesh, sub_mesh
from disttensor.core.placement import Placement
from disttensor.core.spec import DistSpec
from disttensor.errors import refuse_collectives, warn_once
from disttensor.tensor.backward import Backward
from disttensor.tensor.base import as_parameter
from disttensor.tensor.checkpointable import Checkpointable
from disttensor.tensor.copies import Copies, reduce_regular
from disttensor.tensor.grad import Grad, is_gradient
from disttensor.tensor.hooks import Hooks
from disttensor.tensor.in_place import InPlace
from disttensor.tensor.metadata import Metadata
from disttensor.tensor.reshard import resharded, resharded_with_dtypes, target
from disttensor.tensor.user_facts import user_attributes
from disttensor.tensor.values import Values
from disttensor.torch_private import compile_id, make_subclass

Tensor = torch.Tensor


class _Tracers(threading.local):
    """Names of the tracers and transforms of torch that run on this thread, outermost first: see
    ``disttensor.patches.tracers``."""

    names: tuple[str, ...] = ()


TRACERS = _Tracers()
WAY_OUT = (
    "Give it x.full_tensor(), a regular tensor, made before it begins; or do without: "
    "torch.autograd.grad, also with create_graph=True, and torch.autograd.functional take "
    "DistTensors"
)

_NOT_TRACED = (
    "torch.compile ends its graph at each call of a DistTensor: results are right, but not "
    "computed faster. Call dt.compile(model) in place of torch.compile(model) or model.compile(): "
    "it compiles the local calls, with their communication"
)


def _no_dispatch(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    raise RuntimeError(f"{func} of a DistTensor: import disttensor, which defines how it runs")


class DistTensor(Metadata, Grad, Backward, Hooks, InPlace, Values, Checkpointable, Copies):
    """A tensor on a mesh, made by ``shard_tensor``, ``from_local``, factories as ``zeros``, and by
    torch's functions of DistTensors.

    ``process_mesh``, ``placements``, ``dims_mapping`` and ``partial_status`` describe its layout;
    everything else behaves as on the global tensor.

    >>> x = dt.shard_tensor(torch.arange(6.0), mesh, [dt.Shard(0), dt.Replicate()])
    >>> isinstance(x, torch.Tensor), x.shape, (x * 2).sum().item()
    (True, torch.Size([6]), 30.0)
    """

    __slots__ = ("local", "spec")

    def __new__(cls, *args: Any, **kwargs: Any) -> DistTensor:
        """Raises TypeError: ``like`` and ``wrap`` use ``make_subclass``."""
        raise TypeError(
            f"{cls.__name__}(...): a DistTensor is made by dt.shard_tensor(data, mesh, "
            "placements), dt.from_local(...) or a factory as dt.zeros(...)"
        )

    @property
    def __tensor_flatten__(self) -> Any:
        """Raises AttributeError: a DistTensor has no parts that a tracer may follow. If Dynamo
        looks for them, a warning names ``dt.compile``."""
        if compile_id() is not None:
            warn_once("torch.compile", lambda: _NOT_TRACED)
        raise AttributeError("__tensor_flatten__")

    # disttensor.dispatch, which imports this module, sets it at its import
    __torch_function__: ClassVar[Any] = classmethod(_no_dispatch)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs the few operators that reach the wrapper, which holds no data and is in no graph:
        a number (for ``torch.full(size, x)``), and copies without a graph (``torch.tensor(x)``)."""
        x: Any = args[0] if args else None
        if func is torch.ops.aten._local_scalar_dense.default:
            return x.item()
        if TRACERS.names:
            raise NotImplementedError(
                f"{func} of a DistTensor inside {TRACERS.names[-1]}, which follows regular tensors "
                f"only. {WAY_OUT}"
            )
        out: DistTensor | None = None
        if func is torch.ops.aten.detach.default:
            out = x.detach()
        elif func is torch.ops.aten.detach_.default:
            out = x.detach_()
        elif (
            func in _COPIES
            and isinstance(x, DistTensor)
            and not (x.requires_grad and torch.is_grad_enabled())
        ):
            local = func(x.local, *args[1:], **(kwargs or {}))
            out = wrap(local, x.spec.with_dtype(local.dtype))
        if out is not None:
            return out
        refuse_collectives(func)
        raise RuntimeError(
            f"{func} reached a DistTensor below __torch_function__, where only regular tensors may "
            "be: something called it with torch functions disabled, or from C++. Give it "
            "x.full_tensor(), a regular tensor, or run that code on the locals: local_map(fn, "
            "in_placements=..., out_placements=...)"
        )

    def redistribute(
        self, device_mesh: Any = None, placements: Sequence[Placement] | None = None, *,
        async_op: bool = False, forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DistTensor:  # fmt: skip
        """Returns the tensor in another layout, as ``dt.reshard``, and waits for it.

        Args:
            device_mesh: a ProcessMesh or torch's DeviceMesh; None: the mesh of the tensor.
            placements: one for each mesh axis; None: the placements of the tensor.
            async_op: changes nothing: this call waits, and ``dt.reshard`` does not.
            forward_dtype: of the result, and of what is sent; None: the dtype of the tensor.
            backward_dtype: of the gradient that is sent; None: the dtype of the tensor. The
                gradient of the tensor has the dtype of the tensor.

        Raises TypeError or ValueError for arguments that do not fit, and NotImplementedError for
        dtypes with another mesh.

        >>> x = dt.ones(4, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()])
        >>> x.redistribute(placements=[dt.Replicate(), dt.Shard(0)]).placements
        (Replicate(), Shard(0))
        """
        check_bool("redistribute: async_op", async_op)
        mesh = self.spec.mesh
        if device_mesh is not None:
            mesh = as_mesh("redistribute: device_mesh", device_mesh)
        how = self.placements if placements is None else placements
        to = target(self.spec, mesh, how, None, None)
        if forward_dtype is None and backward_dtype is None:
            return resharded(self, to, fresh=True)
        for name, dtype in (("forward", forward_dtype), ("backward", backward_dtype)):
            check_dtype(f"redistribute: {name}_dtype", dtype)
        if mesh is not self.spec.mesh:
            raise NotImplementedError(
                "redistribute: forward_dtype and backward_dtype are for a reshard within a mesh; "
                "cast before it, and after it, with x.to(dtype)"
            )
        return resharded_with_dtypes(
            self, to.with_dtype(forward_dtype or self.dtype), backward_dtype
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Returns ``rebuild`` and its arguments: this rank's piece, the spec, and this rank. In
        ``one_process`` a pickle holds the value, as a regular tensor."""
        if regular := reduce_regular(self, protocol):
            return regular
        spec = self.spec
        mesh = _mesh_parts(spec.mesh)
        if spec.mesh.root is not spec.mesh:
            mesh = *mesh, _mesh_parts(spec.mesh.root)
        local = self.local.detach()
        if is_gradient(self) and local.untyped_storage().nbytes() != local.nbytes:
            local = local.clone()  # its storage may be a bucket of many gradients
        flags = (self.local.requires_grad, self._is_param)
        layout = (spec.layout.dims, spec.layout.partial, spec.layout.custom)
        args = local, mesh, layout, tuple(spec.shape), spec.dtype, flags, world()[0]
        return rebuild, (*args, user_attributes(self))


# Operators that torch's functions call from C++ to copy a tensor.
_COPIES = (
    torch.ops.aten._to_copy.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default,
    torch.ops.aten.lift_fresh.default, torch.ops.aten.to.device,  # to: under inference_mode
)  # fmt: skip


def local_of(x: Tensor) -> Tensor:
    """Returns the piece of this rank, without a graph; a regular tensor is its own piece."""
    return (x.local if isinstance(x, DistTensor) else x).detach()


def wrap(local: Tensor, spec: DistSpec) -> DistTensor:
    """Returns a DistTensor with the local ``local``."""
    out: DistTensor = make_subclass(DistTensor, spec.meta_tensor)
    out.local = local
    out.spec = spec
    return out


def wait_for(x: DistTensor) -> DistTensor:
    """Waits for ``x`` if it is an ``Awaited`` (``disttensor.tensor.awaited``), and returns it."""
    _ = x.local
    return x


def _mesh_parts(mesh: ProcessMesh) -> tuple[Any, ...]:
    return mesh.mesh.tolist(), mesh.dim_names, mesh.device_type


def rebuild(
    local: Tensor, mesh: Any, layout: Any, shape: Any, dtype: torch.dtype,
    flags: tuple[bool, bool], saved_by: int, attributes: Any = None,
) -> DistTensor:  # fmt: skip
    """Returns a DistTensor from a pickle: the piece of the rank ``saved_by``, and the spec.

    A rank off the mesh needs no piece: it makes the metadata from any pickle. Raises RuntimeError
    on a rank of the mesh whose own piece is another one.
    """
    ranks, names, kind, *root = mesh
    on = sub_mesh(ranks, names, kind, ProcessMesh(*root[0])) if root else ProcessMesh(*mesh)
    spec = DistSpec(on, Layout(*layout), shape, dtype)
    here, there = spec.mesh.coordinate, spec.mesh.coordinate_of(saved_by)
    if here is None:
        device = spec.mesh.device
        local = token.leaf(device, spec.dtype) if flags[0] else token.no_grad_token(device)
    elif there is None or any(
        here[a] != there[a] for a in (*spec.varies, *(a for a, _ in spec.layout.custom))
    ):
        whose = "no piece: it was saved outside the mesh" if there is None else "another piece"
        raise RuntimeError(
            f"this pickle of {spec!r} on {spec.mesh!r} was made on rank {saved_by} and holds "
            f"{whose}; rank {world()[0]} needs its own. Every rank loads the pickle that it saved. "
            "To load it on other ranks, save the full tensor, which all ranks of the mesh compute: "
            "x.full_tensor(), or with ranks off the mesh x.full_tensor(everywhere=True)"
        )
    else:
        local = scale_average_grad(local.detach().requires_grad_(flags[0]), spec)
    x = wrap(local, spec)
    x.__dict__.update(attributes or {})
    return as_parameter(x) if flags[1] else x
