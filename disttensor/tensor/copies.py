"""Copies of a DistTensor: ``copy.copy``, ``copy.deepcopy``, and what a pickle adds to the piece.

They keep what the copies of torch keep: attributes that the user set, the gradient, and memory that
the tensors of one deepcopy share.
"""

from __future__ import annotations

import copy
import sys
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch.utils.hooks import warn_if_has_hooks

from disttensor.autograd.grad_types import scale_average_grad
from disttensor.comm.groups import world_group
from disttensor.comm.objects import run_on_all_ranks
from disttensor.comm.process_group import world
from disttensor.errors import PieceWarning, show_place, user_place, warn_once
from disttensor.tensor import views
from disttensor.tensor.base import MeshTensor, as_parameter
from disttensor.tensor.grad import get_grad, is_gradient, set_grad
from disttensor.tensor.user_facts import hooks_of, pass_attributes, user_attributes
from disttensor.tensor.values import broadcast_value
from disttensor.tensor.versions import mark_shared
from disttensor.torch_private import copied_storages, storage_id

Tensor = torch.Tensor


# What a pickle holds. "piece": the piece of this rank. "full": the full value, and a piece alone is
# refused. "gather": the full value, which all ranks gather; they make the same pickles.
PICKLES: ContextVar[str] = ContextVar("PICKLES", default="piece")


def reduce_regular(x: MeshTensor, protocol: Any) -> Any:
    """Returns ``__reduce_ex__`` of the value of x as a regular tensor, or None: a pickle holds the
    piece. Warns, as torch does, that a pickle of x lacks its hooks. Warns once for each line of the
    user if the pickle holds a part of the value only. A pickle is made by one rank: it sends
    nothing, so it cannot hold the pieces of the others."""
    _warn_about_hooks(x)
    spec, kind = x.spec, PICKLES.get()
    axes = (*spec.varies, *(a for a, _ in spec.layout.custom))
    is_full = x.is_initialized and all(spec.mesh.shape[a] == 1 for a in axes)
    if kind == "gather":
        full = gathered_value(x)
        return _as_regular(x, full).__reduce_ex__(protocol) if world()[0] == 0 else (type(None), ())
    if is_full:
        return None if kind == "piece" else _as_regular(x, x.local).__reduce_ex__(protocol)
    place = user_place(sys._getframe(1))
    holds = "only the piece of this rank" if x.is_initialized else "no piece: it is off the mesh"
    what = (
        f"rank {world()[0]} pickles {spec!r} on {spec.mesh!r} at {show_place(place)}: the pickle "
    )
    if kind == "full":
        raise RuntimeError(
            f"{what}would hold {holds}, and other ranks could not load it. In one_process(), save "
            "on all ranks, in `with process.saving(folder) as folder:`. Accelerator.save_state "
            "saves the objects of register_for_checkpointing whole, and Lightning the states of "
            "its callbacks"
        )
    warn_once(
        ("pickle", place),
        lambda: (
            f"{what}holds {holds}, and other ranks cannot load it. To save the whole value, call "
            "on all ranks dt.Checkpointer(folder).save(step, name=...) or "
            "torch.distributed.checkpoint.save, or pickle x.full_tensor(), a regular tensor. If "
            "every rank pickles its own piece and loads it again, ignore this warning: "
            'warnings.simplefilter("ignore", disttensor.errors.PieceWarning)'
        ),
        PieceWarning,
    )
    return None


def gathered_value(x: MeshTensor) -> Tensor:
    """Returns the full value for a file that all ranks make, and the first rank keeps. Raises
    MismatchError on all ranks if another rank is at another tensor."""
    run_on_all_ranks(f"the saving of {x.spec!r} on {x.spec.mesh!r}", world_group(), lambda: None)
    return broadcast_value(x).cpu()


def _as_regular(x: MeshTensor, value: Tensor) -> Tensor:
    value = value.detach()
    if value.untyped_storage().nbytes() != value.nbytes:
        value = value.clone()
    value.requires_grad_(x.local.requires_grad)
    return torch.nn.Parameter(value, x.local.requires_grad) if x._is_param else value


def _warn_about_hooks(x: MeshTensor) -> None:
    if not x._is_param:
        warn_if_has_hooks(SimpleNamespace(_backward_hooks=hooks_of(x)[0]))


class Copies(MeshTensor):
    def __copy__(self: Any) -> Any:
        """Returns a leaf in the same memory, as copy.copy of a regular tensor does."""
        _warn_about_hooks(self)
        out = self.detach()
        if self.local.requires_grad:
            out.requires_grad_()
        pass_attributes(self, out)
        return as_parameter(out) if self._is_param else out

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns a leaf in new memory. As in torch, a Parameter gets memory of its own, and loses
        its gradient and the user's attributes; copies of other tensors share the memory that the
        tensors of the same call share."""
        if id(self) in memo:
            return memo[id(self)]
        if not self.local.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol"
            )
        if self._view_state is not None:
            views.check(self)
        local = _copied_local(self, memo).requires_grad_(self.local.requires_grad)
        new = memo[id(self)] = self.like(scale_average_grad(local, self.spec), self.spec)
        views.copy_state(new, self, memo)
        if self._is_param:
            return as_parameter(new)
        grad = get_grad(self)
        if grad is not None:  # copy.deepcopy keeps it, so that no other tensor gets its id
            set_grad(new, copy.deepcopy(grad, memo))
        new.__dict__.update(copy.deepcopy(user_attributes(self), memo))
        return new


def _copied_local(x: MeshTensor, memo: dict[Any, Any]) -> Tensor:
    """Returns a copy of the local of x. The storage of a local is copied whole, once for each
    ``memo``, as torch does. A gradient is copied alone: its storage may be a bucket of many."""
    local = x.local.detach()
    storage, copied = local.untyped_storage(), copied_storages(memo)
    is_copied = storage_id(storage) in copied
    is_alone = is_gradient(x) and storage.nbytes() != local.nbytes and not is_copied
    has_no_data = local.is_meta or type(local) is not Tensor  # such as a fake tensor
    if x._is_param or not x.is_initialized or is_alone or has_no_data:
        return local.clone(memory_format=torch.preserve_format)
    new: Tensor = copy.deepcopy(local, memo)
    if is_copied:
        mark_shared(new)
    return new
