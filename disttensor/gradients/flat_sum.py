"""Sums many tensors over a group: large tensors in their own memory, all others in one flat buffer
that is kept from step to step (``disttensor.gradients.memory``).

All ranks know the sizes that decide this. A large tensor is summed in place if only the caller
holds it. If other code holds the tensor or a view of it, a copy is summed instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from disttensor.comm import collectives
from disttensor.comm.groups import Group
from disttensor.comm.wire import NATIVE
from disttensor.comm.work import Work
from disttensor.gradients.memory import FREE, LENT, GradMemory, grad_bucket_of, users
from disttensor.torch_private import dispatch_modes

Tensor = torch.Tensor

# From this many bytes per other rank of the group, a tensor gets its own collective instead of a
# copy into the flat buffer. A collective costs messages to and from each rank, a copy costs memory
# traffic: the break-even point depends on the machine.
LARGE = 2 * 2**20


class BucketSlot(NamedTuple):
    """The size of a tensor, as known to all ranks: the largest number of elements that a rank has,
    and whether all ranks have this number."""

    numel: int
    is_even: bool


def start_sums(
    pieces: list[Tensor], slots: Sequence[BucketSlot], group: Group, dtype: torch.dtype, *,
    places: Sequence[GradMemory], held: int = 0, is_grad: bool = False,
) -> list[Work[Any]]:  # fmt: skip
    """Starts to sum; ``pieces`` hold the sums when all returned Works have been waited for.

    Replicas get the same bits: uneven pieces, too, have the same place in the flat buffer on all
    ranks. ``places``: of the first pieces; pieces that are not large may lie there. ``held``:
    number of references that the caller holds, ``pieces`` not counted. ``is_grad``: each piece is
    the ``grad`` of a leaf.
    """
    bound = LARGE * (group.size - 1)
    large = [s.is_even and s.numel * dtype.itemsize >= bound and dtype in NATIVE for s in slots]
    works = []
    for i in range(len(pieces)):
        if large[i]:
            if not _is_free(pieces, i, dtype, held, is_grad):
                pieces[i] = (
                    pieces[i].detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
                )
            works.append(
                collectives.start_async(
                    collectives.all_reduce, pieces[i], "sum", group, inplace=True
                )
            )
    rest = [i for i in range(len(pieces)) if not large[i]]
    if rest and (not places or rest[0] >= len(places) or dispatch_modes()):
        works.append(_sum_in_new_memory(pieces, rest, [slots[i].numel for i in rest], group, dtype))
    elif rest:
        alone = _known_users(held + 1, is_grad)
        works.append(_sum_in_places(pieces, rest, slots, places, alone, group, dtype))
    return works


def _sum_in_places(
    pieces: list[Tensor], rest: list[int], slots: Sequence[BucketSlot],
    places: Sequence[GradMemory], alone: tuple[int, int, int], group: Group, dtype: torch.dtype,
) -> Work[Any]:  # fmt: skip
    """Sums the pieces with the indices ``rest`` in the persistent buffer. ``alone``: the users of a
    piece that lies in its place, if no other code holds it."""
    bucket = grad_bucket_of(
        [places[i] for i in rest if i < len(places)], [pieces[i].shape for i in rest],
        [slots[i].numel for i in rest], pieces[rest[0]], dtype,
    )  # fmt: skip
    away, seen = [], []
    for k, i in enumerate(rest):
        if pieces[i] is not bucket.tensors[k]:
            away.append(k)
            if not bucket.is_free(k):
                seen.append(k)
        elif users(pieces, i) != alone:
            seen.append(k)
    if seen:
        bucket.release(seen)
        away = list(range(len(rest)))
    if away:
        torch._foreach_copy_(
            [bucket.tensors[k] for k in away], [pieces[rest[k]].detach() for k in away]
        )
    work = collectives.start_async(collectives.all_reduce, bucket.flat, "sum", group, inplace=True)
    for i, tensor in zip(rest, bucket.tensors, strict=True):
        pieces[i] = tensor
    if not bucket.copied:
        return work
    return Work(partial(_copy_out, work, pieces, [rest[k] for k in bucket.copied]), work.done)


def _copy_out(work: Work[Any], pieces: list[Tensor], copied: list[int]) -> None:
    work.wait()
    for i in copied:
        pieces[i] = pieces[i].clone()


def _sum_in_new_memory(
    pieces: list[Tensor], rest: list[int], sizes: list[int], group: Group, dtype: torch.dtype
) -> Work[Any]:
    """Sums the pieces with the indices ``rest`` in a new flat buffer."""
    flat = torch.empty(sum(sizes), dtype=dtype, device=pieces[rest[0]].device)
    views = []
    for i, place in zip(rest, flat.split(sizes), strict=True):
        place[pieces[i].numel() :].zero_()
        views.append(place[: pieces[i].numel()].view(pieces[i].shape))
    torch._foreach_copy_(views, [pieces[i].detach() for i in rest])
    for i, view in zip(rest, views, strict=True):
        pieces[i] = view
    return collectives.start_async(collectives.all_reduce, flat, "sum", group, inplace=True)


def _is_free(pieces: list[Tensor], i: int, dtype: torch.dtype, held: int, is_grad: bool) -> bool:
    """Returns True if a write to ``pieces[i]`` cannot be seen by other code."""
    return (
        users(pieces, i) == _known_users(held, is_grad)
        and pieces[i].dtype is dtype
        and not pieces[i].requires_grad
        and pieces[i].is_contiguous()
        and not pieces[i]._is_zerotensor()
    )


def _known_users(held: int, is_grad: bool) -> tuple[int, int, int]:
    """Returns the users of a piece if only the ``held`` known references to it exist."""
    references, owners, storage = LENT if is_grad else FREE
    return references + held, owners, storage
