"""Compares regular tensors that count as one global value, where they enter the program.

A batch of a rank's own (a loader with a DistributedSampler), or parameters of another seed, would
train replicas apart without a word. The ranks compare shapes, dtypes and a few elements, at the
calls 1, 2, 4, 8, ... of each line: the numbers of calls are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from disttensor.comm.groups import Group
from disttensor.comm.objects import gather_results
from disttensor.comm.process_group import is_fake
from disttensor.errors import MismatchError, user_line

Tensor = torch.Tensor
_SAMPLE = 64  # elements of a tensor that are compared
_TOLERANCE = 1e-2  # relative: ranks may compute one value with other roundings


def is_due(calls: int) -> bool:
    """Returns True for the calls 1, 2, 4, 8, ..."""
    return not calls & (calls - 1)


def compare_values(who: str, values: Sequence[Tensor], group: Group) -> None:
    """Raises MismatchError on all members if ``values``, regular tensors that count as global
    values, differ between them by shape, by dtype, or clearly by elements. Sends one message."""
    if is_fake():
        return
    mine = [_described(x) for x in values]
    everyone = gather_results(who, group, lambda: mine)
    first = everyone[0]
    for rank, theirs in zip(group.ranks, everyone, strict=True):
        if len(theirs) != len(first):
            _raise(who, group.ranks[0], f"{len(first)} tensors", rank, f"{len(theirs)} tensors")
        for (kind, a), (other, b) in zip(first, theirs, strict=True):
            if kind != other or not _are_close(a, b):
                same = kind == other
                _raise(who, group.ranks[0], _text(kind, a, same), rank, _text(other, b, same))


def _described(x: Tensor) -> tuple[str, list[float]]:
    """Returns shape and dtype, and some elements from the first to the last."""
    kind, count = f"{list(x.shape)} {x.dtype}", min(x.numel(), _SAMPLE)
    if not count or x.is_meta:
        return kind, []
    x = x.detach()
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    flat = x.reshape(-1)
    places = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64).long()
    return kind, flat[places.to(flat.device)].double().tolist()


def _are_close(one: Sequence[float], other: Sequence[float]) -> bool:
    a, b = torch.tensor([*one]), torch.tensor([*other])
    bound = a.abs().nan_to_num(0.0, 0.0, 0.0).amax().item() if len(one) else 0.0
    return torch.allclose(a, b, _TOLERANCE, _TOLERANCE * bound, equal_nan=True)


def _text(kind: str, values: Sequence[float], same: bool) -> str:
    shown = ", ".join(f"{v:.4g}" for v in values[:3])
    return f"[{shown}, ...] in {kind}" if same and values else kind


def _raise(who: str, first: int, one: str, rank: int, other: str) -> Any:
    raise MismatchError(
        f"{who} at {user_line()}: a regular tensor is one global value, the same on every rank, "
        f"but it is {one} on rank {first}, and {other} on rank {rank}. If each rank has a batch of "
        "its own, give all ranks one batch: dt.shard_loader(loader, mesh) takes the place of a "
        "DistributedSampler and splits it; dt.DistTensor.from_local makes one tensor of pieces. If "
        "it is drawn or initialized, seed all ranks alike; src_rank=0 of dt.shard_tensor takes the "
        "value of one rank"
    )
