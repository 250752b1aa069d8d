"""Persistent memory of gradients: gradients that are summed together lie in one flat buffer, which
is kept from step to step.

    flat      a a a a b b c c c     summed by one collective
    tensors   a       b   c         one each, with a storage of its own

A gradient that the user holds, or a view of it, must never change its value. The reference counts
of its storage show such a holder. If a tensor is still held when the buffer is needed, the holder
keeps the old memory, all tensors move to a new buffer, and this tensor gets a copy of its sum from
then on. So a user who keeps a gradient of each step keeps a whole buffer alive for one step only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from disttensor.tensor.grad_slot import grad_slot
from disttensor.torch_private import tensor_users, users_of_storage

Tensor = torch.Tensor


class GradBucket:
    """shapes   of the tensors
    sizes    elements reserved for each tensor, at least its own
    copied   indices of the tensors that get copies
    """

    def __init__(
        self, shapes: Sequence[torch.Size], sizes: Sequence[int], like: Tensor, dtype: torch.dtype
    ) -> None:
        self.shapes, self.sizes, self.dtype, self.device = shapes, sizes, dtype, like.device
        self.copied: set[int] = set()
        self.allocate()

    def allocate(self) -> None:
        """Allocates new memory for all tensors."""
        self.flat = torch.zeros(sum(self.sizes), dtype=self.dtype, device=self.device)
        memory, at, of = self.flat.untyped_storage(), 0, self.dtype.itemsize
        self.tensors: list[Tensor] = []
        for shape, size in zip(self.shapes, self.sizes, strict=True):
            tensor = torch.empty(0, dtype=self.dtype, device=self.device)
            end = at + shape.numel()
            self.tensors.append(tensor.set_(memory[at * of : end * of], 0, shape))  # type: ignore[call-overload]
            at += size

    def release(self, seen: Iterable[int]) -> None:
        """Leaves the memory to the holders of the tensors ``seen``, and moves to new memory."""
        self.copied.update(seen)
        self.allocate()

    def is_free(self, i: int) -> bool:
        """Returns True if only the bucket holds tensor i."""
        return users(self.tensors, i) == FREE


class GradMemory:
    """Tensor ``index`` of ``bucket``; None: the tensor has no place, or none yet."""

    __slots__ = ("__weakref__", "bucket", "index")

    def __init__(self) -> None:
        self.bucket: GradBucket | None = None
        self.index = 0

    def adopt_grad(self, leaf: Tensor) -> None:
        """Moves the new gradient of ``leaf`` into its place, which frees the gradient's own memory.
        Does nothing if another holder would see the write."""
        bucket, i, grad = self.bucket, self.index, leaf.grad
        if bucket is None or grad is None or type(grad) is not Tensor or i in bucket.copied:
            return
        place = bucket.tensors
        if (
            users(place, i) == FREE
            and grad.dtype is bucket.dtype
            and grad.shape == bucket.shapes[i]
            and grad.layout is torch.strided
            and not grad.requires_grad
        ):
            place[i].copy_(grad)
            leaf.grad = place[i]


def grad_memory_of(x: Any) -> GradMemory:
    """Returns the memory of the gradient of the DistTensor x."""
    slot = grad_slot(x)
    if slot.memory is None:
        slot.memory = GradMemory()
    memory: GradMemory = slot.memory
    return memory


def grad_bucket_of(
    places: Sequence[GradMemory],
    shapes: Sequence[torch.Size],
    sizes: Sequence[int],
    like: Tensor,
    dtype: torch.dtype,
) -> GradBucket:
    """Returns the bucket with the places of these tensors, in this order; a new bucket if they have
    other places. Tensors without a GradMemory, at the end, have a place in this bucket only."""
    bucket = places[0].bucket
    if (
        bucket is None
        or (bucket.shapes, bucket.sizes, bucket.dtype) != (shapes, sizes, dtype)
        or any(place.bucket is not bucket or place.index != i for i, place in enumerate(places))
    ):
        bucket = GradBucket(shapes, sizes, like, dtype)
        for i, place in enumerate(places):
            place.bucket, place.index = bucket, i
    return bucket


def users(tensors: list[Tensor], i: int) -> tuple[int, int, int]:
    """Returns how many Python references, C++ holders and users of its memory ``tensors[i]``
    has."""
    memory = [tensors[i].untyped_storage()]
    return sys.getrefcount(tensors[i]), tensor_users(tensors[i]), users_of_storage(memory, 0)


def _counts() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns the users of a tensor in a list only, and of the same tensor as a leaf's ``grad``."""
    leaf = torch.zeros(1, requires_grad=True)
    pieces = [torch.zeros(1)]
    free = users(pieces, 0)
    leaf.grad = pieces[0]
    return free, users(pieces, 0)


FREE, LENT = _counts()
