"""Sums of many tensors over a group: large ones where they lie, all others in one flat tensor.

What is large follows from sizes that all ranks know. A large tensor is summed in its own memory if
nobody else can see that; where somebody holds it, or a view of it, a copy is summed in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from disttensor.comm import collectives
from disttensor.comm.groups import Group
from disttensor.comm.wire import NATIVE
from disttensor.comm.work import Work
from disttensor.torch_private import storage_users, tensor_users

Tensor = torch.Tensor

LARGE = 2**20  # bytes of a tensor from which on a collective of its own costs less than copies


class Slot(NamedTuple):
    """What all ranks know of a tensor: how many elements the largest piece of any of them has, and
    whether all have as many."""

    numel: int
    is_even: bool


def sums(
    pieces: list[Tensor], slots: Sequence[Slot], group: Group, dtype: torch.dtype, *,
    held: int = 0, is_grad: bool = False,
) -> list[Work[Any]]:  # fmt: skip
    """Start to sum: ``pieces`` hold the sums when all of what this gives has been waited for.

    Replicas get the same bits: uneven pieces, too, have one place in the flat tensor on all ranks.
    ``held``: how many references the caller knows of, ``pieces`` not counted. ``is_grad``: each is
    the ``grad`` of a leaf.
    """
    large = [s.is_even and s.numel * dtype.itemsize >= LARGE and dtype in NATIVE for s in slots]
    works = []
    for i in range(len(pieces)):
        if large[i]:
            if not _is_free(pieces, i, dtype, held, is_grad):
                pieces[i] = _copy(pieces[i], dtype)
            works.append(
                collectives.all_reduce(pieces[i], "sum", group, inplace=True, async_op=True)
            )
    rest = [i for i in range(len(pieces)) if not large[i]]
    if rest:
        sizes = [slots[i].numel for i in rest]
        flat = torch.empty(sum(sizes), dtype=dtype, device=pieces[rest[0]].device)
        views = []
        for i, place in zip(rest, flat.split(sizes), strict=True):
            place[pieces[i].numel() :].zero_()
            views.append(place[: pieces[i].numel()].view(pieces[i].shape))
        torch._foreach_copy_(views, [pieces[i].detach() for i in rest])
        works.append(collectives.all_reduce(flat, "sum", group, inplace=True, async_op=True))
        for i, view in zip(rest, views, strict=True):
            pieces[i] = view
    return works


def _copy(piece: Tensor, dtype: torch.dtype) -> Tensor:
    """One that nobody else has, dense."""
    return piece.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def _is_free(pieces: list[Tensor], i: int, dtype: torch.dtype, held: int, is_grad: bool) -> bool:
    """May ``pieces[i]`` be written to, unseen?"""
    references, owners, storage = _ALONE[is_grad]
    return (
        _counts(pieces, i) == (references + held, owners, storage)
        and pieces[i].dtype is dtype
        and not pieces[i].requires_grad
        and pieces[i].is_contiguous()
    )


def _counts(pieces: list[Tensor], i: int) -> tuple[int, int, int]:
    """How many references of Python, holders in C++, and users of its memory ``pieces[i]`` has."""
    return sys.getrefcount(pieces[i]), tensor_users(pieces[i]), storage_users(pieces[i])


def _alone(is_grad: bool) -> tuple[int, int, int]:
    """What is counted of a tensor that a list alone holds, and a leaf as its gradient."""
    leaf = torch.zeros(1, requires_grad=True)
    pieces = [torch.zeros(1)]
    if is_grad:
        leaf.grad = pieces[0]
    return _counts(pieces, 0)


_ALONE = {is_grad: _alone(is_grad) for is_grad in (False, True)}
