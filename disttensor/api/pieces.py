"""The pieces of all ranks."""

from __future__ import annotations

import torch

from disttensor.checks import check_type
from disttensor.comm.groups import world_group
from disttensor.comm.objects import gather_objects
from disttensor.tensor.dist_tensor import DistTensor


def pieces(x: DistTensor) -> list[torch.Tensor | None]:
    """Returns the local tensors of all ranks, on every rank, for inspection. All ranks call it.

    Args:
        x: a DistTensor. If it is pending, its pieces are the contributions.

    Returns:
        A copy of the piece of rank 0, 1, ...; None for a rank outside the mesh of ``x``.

    Raises:
        TypeError: ``x`` is no DistTensor.

    >>> dt.debugging.pieces(dt.arange(3, mesh=mesh))
    [tensor([0, 1, 2])]
    """
    check_type("pieces: x", x, DistTensor, "a DistTensor")
    piece = x.local.detach().cpu() if x.spec.mesh.coordinate is not None else None
    return gather_objects(piece, world_group())
