"""Debug mode: the ranks compare the regular tensors that calls combine with DistTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from disttensor.comm import objects
from disttensor.comm.agree import agree
from disttensor.errors import name_of, user_line
from disttensor.pytree import collect
from disttensor.tensor.dist_tensor import DistTensor


class compare_regular(TorchFunctionMode):
    """``with compare_regular():`` compares the regular tensors among the arguments of each call
    that has a DistTensor, bit for bit. They count as the same value on all ranks.

    Enter and leave the block on all ranks alike. A call sends a digest, on the ranks of its mesh.
    Raises MismatchError, naming the call, its line and the ranks, if a tensor differs.

    >>> with dt.debugging.compare_regular():
    ...     y = dt.ones(4, mesh=mesh) + torch.arange(4.0)
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = collect((args, kwargs), [])
        meshes = {t.spec.mesh.root for t in tensors if isinstance(t, DistTensor)}
        if len(meshes) == 1 and (mesh := meshes.pop()).coordinate is not None:
            # a target that is only written may hold anything
            written = [args[0]] if func is torch.Tensor.copy_ else []
            collect(kwargs.get("out"), written)
            facts = {
                f"regular tensor {i}": objects.digest(t.detach())
                for i, t in enumerate(tensors)
                if not isinstance(t, DistTensor)
                and not t.is_meta
                and not any(t is w for w in written)
            }
            if facts and mesh.size > 1:
                agree(
                    f"{name_of(func)} at {user_line()}",
                    mesh.group(tuple(range(mesh.ndim))),
                    **facts,
                )
        return func(*args, **kwargs)
