"""torch.distributed.checkpoint: whole values, copies in memory, and what rank 0 sends to all.

torch's functions look at ``DTensor`` by name, and take any other tensor for a plain one. They are
replaced when torch's modules are imported, which takes longer than the import of disttensor.
"""

from __future__ import annotations

from typing import Any

import torch

from disttensor.tensor.checkpointable import settled
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.reshard import resharded
from disttensor.tensor.values import broadcast_value


def iterating(original: Any) -> Any:
    """torch's walk over a state dict, which asks this function for each of its values.

    Where it gathers DTensors, a DistTensor becomes a plain whole tensor, on every rank of the
    world. Where it makes new tensors, one for the local is made.
    """

    def iterate(x: Any, sharded: Any, dtensor: Any, plain: Any, **options: Any) -> Any:
        if isinstance(x, DistTensor):
            if plain.__name__ == "_identity_func" != dtensor.__name__:
                x = broadcast_value(x)
            elif "_create_cpu_state_dict" in plain.__qualname__:
                return staged(x, lambda local: plain(local, options["pg"], None, None))
        return original(x, sharded, dtensor, plain, **options)

    return iterate


def staged(x: DistTensor, copied: Any) -> DistTensor:
    """x with ``copied`` of its local. What is pending is reduced: a copy is written beside the
    program, where nothing can be sent."""
    with torch.no_grad():
        x = resharded(x.detach(), settled(x.spec))
        return wrap(copied(x.local) if x.is_initialized else x.local, x.spec)


def staging(original: Any) -> Any:
    """torch's copy of one tensor to memory that it reuses."""

    def offload(self: Any, x: Any, memo: Any, non_blocking: bool = False) -> Any:
        if not isinstance(x, DistTensor):
            return original(self, x, memo, non_blocking)
        memo[id(x)] = y = staged(
            x, lambda t: self.deepcopy_with_tensor_offload(t, memo, non_blocking=non_blocking)
        )
        return y

    return offload


def broadcasting(original: Any) -> Any:
    """What rank 0 sends, one tensor at a time, is written to this rank's piece and let go."""

    def broadcast(full: Any, local: Any, keys: Any, *args: Any, **kwargs: Any) -> None:
        ours = {k: x for k in keys if isinstance(x := local.get(k), DistTensor)}
        original(full, local, keys, *args, **kwargs)
        for key, x in ours.items():
            local[key] = x.copy_(local[key])

    return broadcast
