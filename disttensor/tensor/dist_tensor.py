"""DistTensor: a global tensor of which this rank holds a piece.

The wrapper is never in an autograd graph: ``local`` is, and PyTorch's own autograd runs on it.
Metadata is answered from the spec, gradients from the locals, and every torch function goes through
``disttensor.dispatch``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from disttensor.autograd.grad_types import whole_grad
from disttensor.layout import Layout
from disttensor.mesh import ProcessMesh
from disttensor.spec import DistSpec
from disttensor.tensor.backward import Backward
from disttensor.tensor.base import as_parameter
from disttensor.tensor.checkpointable import Checkpointable
from disttensor.tensor.grad import Grad
from disttensor.tensor.hooks import Hooks
from disttensor.tensor.in_place import InPlace
from disttensor.tensor.metadata import Metadata
from disttensor.tensor.values import Values
from disttensor.torch_private import make_subclass

Tensor = torch.Tensor


def _no_dispatch(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    raise RuntimeError(
        f"{func} of a DistTensor: import disttensor, which says how it is carried out"
    )


class DistTensor(Metadata, Grad, Backward, Hooks, InPlace, Values, Checkpointable):
    """A tensor on a mesh. Made by ``shard_tensor``, ``from_local``, ``from_fn`` and by functions of
    DistTensors.

    ``process_mesh``, ``placements``, ``dims_mapping`` and ``partial_status`` say how it lies;
    everything else is answered as for the global tensor.

    >>> x = dt.shard_tensor(torch.arange(6.0), mesh, [dt.Shard(0), dt.Replicate()])
    >>> isinstance(x, torch.Tensor), x.shape, (x * 2).sum().item()
    (True, torch.Size([6]), 30.0)
    """

    __slots__ = ("local", "spec")

    __torch_function__: ClassVar[Any] = classmethod(_no_dispatch)  # until ``carry_out_with``

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The wrapper holds no data and is in no graph, so only one question is answered:
        ``torch.full(size, x)`` asks for a number."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].item()
        raise RuntimeError(
            f"{func} reached a DistTensor below __torch_function__, where only plain tensors may "
            "be: something called it with torch functions disabled, or from C++. Give it "
            "x.full_tensor(), a plain tensor, or run that code on the locals: local_map(fn, "
            "in_placements, out_placements)"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        spec = self.spec
        mesh = (spec.mesh.mesh.tolist(), spec.mesh.dim_names, spec.mesh.device_type)
        local = self.local.detach()
        if local.untyped_storage().nbytes() != local.nbytes:
            local = local.clone()
        flags = (self.local.requires_grad, self._is_param)
        return rebuild, (
            local,
            mesh,
            spec.layout.dims,
            spec.layout.partial,
            tuple(spec.shape),
            flags,
        )


def carry_out_with(dispatch: Callable[..., Any]) -> None:
    """Every torch function of a DistTensor is ``dispatch(cls, func, types, args, kwargs)``: the one
    write to the class, by ``disttensor.dispatch``, which is built on it. A slot to look up would
    cost each call."""
    DistTensor.__torch_function__ = classmethod(dispatch)


def wrap(local: Tensor, spec: DistSpec) -> DistTensor:
    """A DistTensor of what this rank computed."""
    out: DistTensor = make_subclass(DistTensor, spec.meta_tensor)
    out.local = local
    out.spec = spec
    return out


def rebuild(
    local: Tensor, mesh: Any, dims: Any, partial: Any, shape: Any, flags: tuple[bool, bool]
) -> DistTensor:
    """A DistTensor from what a pickle holds: this rank's piece and the spec."""
    layout = Layout(tuple(tuple(d) for d in dims), tuple((a, op) for a, op in partial))
    spec = DistSpec(ProcessMesh(*mesh), layout, shape, local.dtype)
    if tuple(local.shape) != tuple(spec.local_shape):
        raise RuntimeError(
            f"this pickle holds a piece of shape {list(local.shape)}, but rank's place in {spec!r} "
            f"is {list(spec.local_shape)}: every rank loads what that rank has saved"
        )
    x = wrap(whole_grad(local.detach().requires_grad_(flags[0]), spec), spec)
    return as_parameter(x) if flags[1] else x
