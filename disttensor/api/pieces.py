"""The pieces of all ranks."""

from __future__ import annotations

import torch

from disttensor.checks import check_type
from disttensor.comm.groups import world_group
from disttensor.comm.objects import bytes_of, gather_objects
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
    mine = None
    if x.is_initialized:
        mine = tuple(x.local.shape), bytes_of(x.local).numpy().tobytes()
    return [_piece(x, theirs) for theirs in gather_objects(mine, world_group())]


def _piece(x: DistTensor, sent: tuple[tuple[int, ...], bytes] | None) -> torch.Tensor | None:
    """Returns the piece of a rank that has sent its shape and its bytes."""
    if sent is None:
        return None
    shape, data = sent
    out = torch.empty(shape, dtype=x.dtype, device="cpu")
    if data:
        out.copy_(torch.frombuffer(bytearray(data), dtype=x.dtype).view(shape))
    return out
