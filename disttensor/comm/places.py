"""Places of gradients: those that are summed together lie in one memory, which stays from one step
to the next.

    flat      a a a a b b c c c     what one collective sums
    tensors   a       b   c         one each, with a storage of its own

Whoever holds a gradient that lies in its place, or a view of it, is seen by the users of its
storage, and must never see another value there. Where somebody is seen as the place is needed, the
memory is left to him, all move to a new one, and what he holds has no place from then on: it gets a
copy of its sum. So a tensor that is kept in each step keeps the memory of one step alive, not of
all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch

from disttensor.torch_private import storage_users, tensor_users

Tensor = torch.Tensor


class Bucket:
    """shapes   of the tensors
    sizes    elements of their places, which may be larger
    copied   those that get copies
    """

    def __init__(
        self, shapes: Sequence[torch.Size], sizes: Sequence[int], like: Tensor, dtype: torch.dtype
    ) -> None:
        self.shapes, self.sizes, self.dtype, self.device = shapes, sizes, dtype, like.device
        self.copied: set[int] = set()
        self.move()

    def move(self) -> None:
        """To memory of its own."""
        self.flat = torch.zeros(sum(self.sizes), dtype=self.dtype, device=self.device)
        memory, at, of = self.flat.untyped_storage(), 0, self.dtype.itemsize
        self.tensors: list[Tensor] = []
        for shape, size in zip(self.shapes, self.sizes, strict=True):
            tensor = torch.empty(0, dtype=self.dtype, device=self.device)
            end = at + shape.numel()
            self.tensors.append(tensor.set_(memory[at * of : end * of], 0, shape))  # type: ignore[call-overload]
            at += size

    def leave(self, seen: Iterable[int]) -> None:
        """Somebody holds these: the memory is left to him."""
        self.copied.update(seen)
        self.move()

    def is_free(self, i: int) -> bool:
        """Does nobody hold tensor i?"""
        return users(self.tensors, i) == FREE

    def fits(self, shapes: Sequence[torch.Size], sizes: Sequence[int], dtype: torch.dtype) -> bool:
        return self.shapes == shapes and self.sizes == sizes and self.dtype is dtype


class Place:
    """Tensor ``index`` of ``bucket``; None: it has no place, or none yet."""

    __slots__ = ("__weakref__", "bucket", "index")

    def __init__(self) -> None:
        self.bucket: Bucket | None = None
        self.index = 0

    def settle(self, leaf: Tensor) -> None:
        """The gradient of ``leaf`` has come: it lies here from now on, and what it lay in is free
        for the next. Nothing happens where somebody would see that."""
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


def bucket_of(
    places: Sequence[Place],
    shapes: Sequence[torch.Size],
    sizes: Sequence[int],
    like: Tensor,
    dtype: torch.dtype,
) -> Bucket:
    """The one in which these tensors have their places, in this order: a new one where they have
    others. Tensors behind the places have theirs in this bucket only."""
    bucket = places[0].bucket
    if (
        bucket is None
        or not bucket.fits(shapes, sizes, dtype)
        or any(place.bucket is not bucket or place.index != i for i, place in enumerate(places))
    ):
        bucket = Bucket(shapes, sizes, like, dtype)
        for i, place in enumerate(places):
            place.bucket, place.index = bucket, i
    return bucket


def users(tensors: list[Tensor], i: int) -> tuple[int, int, int]:
    """How many references of Python, holders in C++, and users of its memory ``tensors[i]`` has."""
    return sys.getrefcount(tensors[i]), tensor_users(tensors[i]), storage_users(tensors[i])


def _counts() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """What is counted of a tensor that a list alone holds, and a leaf as its gradient."""
    leaf = torch.zeros(1, requires_grad=True)
    pieces = [torch.zeros(1)]
    free = users(pieces, 0)
    leaf.grad = pieces[0]
    return free, users(pieces, 0)


FREE, LENT = _counts()
