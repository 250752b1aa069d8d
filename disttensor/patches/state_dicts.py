"""torch.distributed.checkpoint: full values, copies in memory, and broadcasts of rank 0.

torch's functions check for ``DTensor``, and treat any other tensor as a regular tensor. They are
replaced when torch's modules are imported, which takes longer than the import of disttensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from disttensor.api.shard import shard_tensor
from disttensor.comm import objects
from disttensor.core.mesh import ProcessMesh
from disttensor.off_mesh import execute
from disttensor.optim.owners import like_state
from disttensor.pytree import substitute
from disttensor.tensor.checkpointable import spec_of_boxes
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.reshard import resharded
from disttensor.tensor.tensor_meta import describe_tensors
from disttensor.tensor.values import broadcast_value


def wrap_iterate_state_dict(original: Any) -> Any:
    """Wraps torch's iteration over a state dict, which calls this function for each value.

    If it gathers DTensors, a DistTensor becomes a full regular tensor, on every rank of the
    world. If it makes new tensors, it makes a tensor for the local.
    """

    def iterate(x: Any, sharded: Any, dtensor: Any, plain: Any, **options: Any) -> Any:
        if isinstance(x, DistTensor):
            if plain.__name__ == "_identity_func" != dtensor.__name__:
                x = broadcast_value(x)
            elif "_create_cpu_state_dict" in plain.__qualname__:
                return copy_local(x, lambda local: plain(local, options["pg"], None, None))
        return original(x, sharded, dtensor, plain, **options)

    return iterate


def copy_local(x: DistTensor, copied: Any) -> DistTensor:
    """Returns x with ``copied`` of its local. A pending value is reduced first: the copy is written
    in another thread, which cannot communicate."""
    with torch.no_grad():
        x = resharded(x.detach(), spec_of_boxes(x.spec))
        return wrap(copied(x.local) if x.is_initialized else x.local, x.spec)


def wrap_offload_tensor(original: Any) -> Any:
    """Wraps torch's copy of one tensor to memory that it reuses."""

    def offload(self: Any, x: Any, memo: Any, non_blocking: bool = False) -> Any:
        if not isinstance(x, DistTensor):
            return original(self, x, memo, non_blocking)
        memo[id(x)] = y = copy_local(
            x, lambda t: self.deepcopy_with_tensor_offload(t, memo, non_blocking=non_blocking)
        )
        return y

    return offload


def wrap_broadcast_tensors(original: Any) -> Any:
    """Wraps the broadcast of rank 0: writes each tensor to this rank's piece, and then frees it."""

    def broadcast(full: Any, local: Any, keys: Any, *args: Any, **kwargs: Any) -> None:
        ours = {k: x for k in keys if isinstance(x := local.get(k), DistTensor)}
        original(full, local, keys, *args, **kwargs)
        for key, x in ours.items():
            local[key] = x.copy_(local[key])

    return broadcast


def wrap_load_own(original: Any) -> Any:
    """Wraps the loading of a module's own tensors. With ``assign=True``, a DistTensor is replaced
    by the loaded value in its layout. A parameter of ``shard_data_parallel`` stays, and gets the
    value."""

    def load(  # libraries that override the method pass arguments by torch's names
        self: Any, state_dict: Any, prefix: str, local_metadata: Any, *args: Any, **named: Any
    ) -> None:
        if local_metadata.get("assign_to_params_buffers", False):
            for name, now in (*self._parameters.items(), *self._buffers.items()):
                value = state_dict.get(prefix + name)
                if not isinstance(now, DistTensor) or not isinstance(value, torch.Tensor):
                    continue
                if value.shape == now.shape:  # else torch raises its error
                    new = _assigned(prefix + name, now, value)
                    state_dict = {**state_dict, prefix + name: new}
        original(self, state_dict, prefix, local_metadata, *args, **named)

    return load


def _assigned(name: str, now: DistTensor, value: torch.Tensor) -> Any:
    """Returns the tensor to assign in the place of ``now``."""
    slot = now._grad_slot
    if slot is None or not slot.fixed_by:
        if isinstance(value, DistTensor):
            return value
        return shard_tensor(value.detach(), now.spec.mesh, now.placements, check=False)
    if value.dtype is not now.dtype:
        raise RuntimeError(
            f"load_state_dict(assign=True): {name} is {now.spec!r}, and the value is "
            f"{value.dtype}: under {slot.fixed_by} the dtype stays. Load without assign, which "
            "converts the value, or before the module is sharded"
        )
    with torch.no_grad():
        return now.copy_(value)


# The state of an optimizer whose parameters lie on several meshes ---------------------------------


def wrap_state_dict_fn(original: Any) -> Any:
    """Wraps ``state_dict`` and ``load_state_dict`` of an object, as torch's functions for
    distributed state dicts call them.

    An optimizer has no state for a parameter of another stage. Here it gets the state of the ranks
    of that stage, with pieces as metadata, so that all ranks have the same names. After loading
    this state is removed, because it would not be updated any more.
    """

    def bound(of: Any, api: str) -> Any:
        call = original(of, api)
        if not isinstance(of, torch.optim.Optimizer):
            return call

        def saved() -> Any:
            state_dict = call()
            state = state_dict["state"]
            for mesh, numbers in _by_mesh(of):
                if mesh.coordinate is None:
                    theirs = objects.recv_object(mesh.root.ranks, mesh.device, any_class=True)
                    state.update(execute.wrap_received(theirs, mesh, (), None))
                else:
                    ours = {
                        i: substitute(state[i], describe_tensors) for i in numbers if i in state
                    }
                    objects.send_object(ours, mesh.root.ranks, mesh.device, any_class=True)
            state_dict["state"] = dict(sorted(state.items()))
            return state_dict

        def loaded(state_dict: Any) -> None:
            call(state_dict)
            kept = list(of.state)
            for p, held in zip(kept, map(like_state(of), kept), strict=True):
                if isinstance(held, DistTensor) and not held.is_initialized:
                    del of.state[p]

        return saved if api == "state_dict" else loaded

    return bound


def _by_mesh(optimizer: torch.optim.Optimizer) -> Iterator[tuple[ProcessMesh, list[int]]]:
    """Returns the meshes that are not the whole world, with the numbers of their parameters, in the
    same order on all ranks."""
    found: dict[ProcessMesh, list[int]] = {}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, held in enumerate(map(like_state(optimizer), params)):
        if isinstance(held, DistTensor) and objects.other_ranks(held.spec.mesh.root.ranks):
            found.setdefault(held.spec.mesh, []).append(i)
    return iter(found.items())
