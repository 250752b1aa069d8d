"""Layout: how a mesh splits a tensor, as a value. No process group, no communication.

Two notations, converted without loss: ``placements`` (one per mesh axis) and
``dims_mapping`` + ``partial_status`` (mesh axes per tensor dim, major first; axis -> reduction).
Pieces follow torch.chunk: of 5 over 4 ranks the pieces are 2, 2, 1, 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from disttensor.checks import check_int, check_sequence, check_type
from disttensor.core.placement import Partial, Placement, Replicate, Shard, as_placement, show

Axes = tuple[int, ...]
Shape = tuple[int, ...]
Range = tuple[int, int]  # start and stop
Ranges = tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """``dims[d]``: the mesh axes that split dim d, major first; ``partial``: (axis, reduction),
    sorted.

    ``custom``: (axis, placement), sorted, for users' subclasses of our placements. Their axes are
    in ``dims`` or ``partial`` like axes of the base type, so local shapes follow.

    >>> ops.Layout(dims=((0,), ()), partial=((1, "sum"),)).placements(mesh_ndim=2)
    (Shard(0), Partial('sum'))
    """

    dims: tuple[Axes, ...]
    partial: tuple[tuple[int, str], ...] = ()
    custom: tuple[tuple[int, Placement], ...] = ()

    @property
    def sharded(self) -> frozenset[int]:
        """Mesh axes that split some dim."""
        return frozenset([a for axes in self.dims for a in axes])

    @property
    def partial_axes(self) -> frozenset[int]:
        return frozenset([a for a, _ in self.partial])

    def varies(self) -> frozenset[int]:
        """Returns the mesh axes over which locals differ: sharded or partial."""
        return frozenset([a for axes in (*self.dims, [a for a, _ in self.partial]) for a in axes])

    def dim_of(self, axis: int) -> int | None:
        """Returns the dim that ``axis`` splits, or None."""
        for d, axes in enumerate(self.dims):
            if axis in axes:
                return d
        return None

    def without_custom(self) -> Layout:
        """Returns the layout with the axes of users' own placements replicated."""
        if not self.custom:
            return self
        mine = {axis for axis, _ in self.custom}
        dims = tuple([tuple([a for a in axes if a not in mine]) for axes in self.dims])
        return Layout(dims, tuple([entry for entry in self.partial if entry[0] not in mine]))

    def placements(self, mesh_ndim: int) -> tuple[Placement, ...]:
        out: list[Placement] = [Replicate()] * mesh_ndim
        for axis, op in self.partial:
            out[axis] = Partial(op)
        for d, axes in enumerate(self.dims):
            in_order = tuple(sorted(axes)) == axes
            for i, axis in enumerate(axes):
                out[axis] = Shard(d) if in_order else Shard(d, order=i)
        for axis, p in self.custom:
            out[axis] = p
        return tuple(out)


@lru_cache(maxsize=64)
def replicated(ndim: int) -> Layout:
    return Layout(((),) * ndim)


def lies_whole(layout: Layout) -> bool:
    """Returns True if all ranks hold the same local tensor."""
    return not layout.partial and not any(layout.dims)


def layout_of(placements: Sequence[Placement], ndim: int, mesh_ndim: int) -> Layout:
    """Returns the Layout of placements, one per mesh axis. Negative dims count from the end.

    Raises ValueError for a wrong number of placements or a dim out of range.
    """
    if placements is not None and isinstance(as_placement(placements), Placement):
        placements = (placements,)  # type: ignore[assignment]
    given = check_sequence(
        "placements", placements, "a list of Shard(dim), Replicate() or Partial(op)"
    )
    placements = [as_placement(p) for p in given]
    for p in placements:
        if not isinstance(p, (Shard, Replicate, Partial)):
            raise TypeError(
                f"placements: {p!r} is no placement; use Shard(dim), Replicate() or Partial(op), "
                "one per mesh axis"
            )
    if len(placements) != mesh_ndim:
        raise ValueError(
            f"placements {show(placements)} has {len(placements)} entries, but the mesh has "
            f"{mesh_ndim} axes: give one placement per mesh axis (Replicate() where nothing is "
            "split)"
        )
    split: list[list[tuple[int, int]]] = [[] for _ in range(ndim)]
    partial = []
    for axis, p in enumerate(placements):
        if isinstance(p, Partial):
            partial.append((axis, p.reduce_op))
        elif isinstance(p, Shard):
            if not -ndim <= p.dim < ndim:
                raise ValueError(
                    f"placements {show(placements)}: {p!r} on mesh axis {axis} is out of "
                    f"range for a tensor of {ndim} dims"
                    + (": a 0-d tensor cannot be sharded" if not ndim else "")
                )
            split[p.dim % ndim].append((axis if p.order is None else p.order, axis))
    for d, pairs in enumerate(split):
        orders = [o for o, _ in pairs]
        if len(set(orders)) != len(orders):
            raise ValueError(f"placements {show(placements)}: two axes claim one order on dim {d}")
    own = [(a, p) for a, p in enumerate(placements) if type(p) not in (Shard, Replicate, Partial)]
    dims = tuple(tuple(a for _, a in sorted(pairs)) for pairs in split)
    return Layout(dims, tuple(partial), tuple(own))


def layout_from_mapping(
    dims_mapping: Sequence[int | Sequence[int]],
    partial_status: Mapping[int, str] | None,
    mesh_ndim: int,
) -> Layout:
    """Returns the Layout of Paddle's notation (-1, an axis, or a list of axes for each dim)."""
    dims: list[Axes] = []
    for entry in dims_mapping:
        axes: Any = entry if isinstance(entry, (list, tuple)) else (entry,)
        dims.append(tuple(a for a in axes if a != -1))
    who = "partial_status"
    check_type(who, partial_status, (Mapping, type(None)), "a dict {axis: reduction}")
    partial = tuple((partial_status or {}).items())
    used = [a for axes in dims for a in axes] + [a for a, _ in partial]
    for axis in used:
        check_int("dims_mapping, partial_status: axis", axis)
        if not 0 <= axis < mesh_ndim:
            raise ValueError(f"dims_mapping {list(dims_mapping)}: the mesh has no axis {axis}")
        if used.count(axis) > 1:
            raise ValueError(
                f"dims_mapping {list(dims_mapping)}, partial_status {dict(partial)}: mesh axis "
                f"{axis} is used twice; an axis splits one dim, or holds one reduction"
            )
    for _, op in partial:
        Partial(op)
    return Layout(tuple(dims), tuple(sorted(partial)))


def dims_mapping_of(layout: Layout) -> list[int | list[int]]:
    """Returns Paddle's notation: -1 for a whole dim, an axis, or a list of axes (major first)."""
    return [-1 if not a else a[0] if len(a) == 1 else list(a) for a in layout.dims]


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Returns (offset, length) of piece ``index`` of ``size`` elements, as torch.chunk cuts."""
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(start + step, size) - start


def balanced_ranges(size: int, index: int, parts: int) -> Ranges:
    """Returns the rows of piece ``index`` of ``Balanced``: as many as ``chunk`` has, half of them
    counted from the front and half from the back."""
    lengths = [chunk(size, parts, i)[1] for i in range(index + 1)]
    early, late = [-(-n // 2) for n in lengths], [n // 2 for n in lengths]
    return (
        (sum(early[:-1]), sum(early)),
        (size - sum(late), size - sum(late[:-1])),
    )


class Box(NamedTuple):
    """A piece of a tensor: its offset in the whole, and its sizes.

    >>> dt.layout.Box((2, 0), (2, 6)).intersect(dt.layout.Box((3, 2), (4, 2)))
    Box(offset=(3, 2), shape=(1, 2))
    """

    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the piece: ``whole[box.slices]``."""
        return tuple(slice(o, o + n) for o, n in zip(*self, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Returns the box of elements that are in both, or None."""
        starts = tuple(map(max, self.offset, other.offset))
        stops = [min(i + n, j + m) for i, n, j, m in zip(*self, *other, strict=True)]
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if all(n > 0 for n in sizes) else None

    def cut(self, x: Tensor, outer: Box) -> Tensor:
        """Returns the view of x for this box; x holds the elements of ``outer``, around it."""
        for dim, (start, length, first, size) in enumerate(zip(*self, *outer, strict=True)):
            if length != size:  # an empty piece may begin behind the end
                x = x.narrow(dim, min(start - first, size - length), length)
        return x


def box_at(shape: Sequence[int], dims: Sequence[Axes], mesh_shape: Shape, coordinate: Shape) -> Box:
    """Returns the piece at ``coordinate``. All code that needs the place of data calls this."""
    offsets, sizes = [], []
    for size, axes in zip(shape, dims, strict=True):
        offset = 0
        for axis in axes:
            start, size = chunk(size, mesh_shape[axis], coordinate[axis])
            offset += start
        offsets.append(offset)
        sizes.append(size)
    return Box(tuple(offsets), tuple(sizes))


def members(mesh_shape: Shape, axes: Sequence[int], coordinate: Shape) -> list[Shape]:
    """Returns the coordinates that differ from ``coordinate`` on ``axes`` only; ``axes`` vary major
    first."""
    places = itertools.product(*(range(mesh_shape[a]) for a in axes))
    changed = (dict(zip(axes, place, strict=True)) for place in places)
    return [tuple([at.get(a, c) for a, c in enumerate(coordinate)]) for at in changed]


def missing_numel(
    shape: Sequence[int], have: Sequence[Axes], want: Sequence[Axes], mesh_shape: Shape
) -> int:
    """Returns how many elements of its piece in ``want`` the first rank does not hold in ``have``.
    The first rank holds most; its last row is rounded up, as a gather pads it. A dim keeps its
    elements only if one list of axes is a prefix of the other."""
    kept = needed = 1
    for size, now, then in zip(shape, have, want, strict=True):
        held, asked = largest_piece(size, now, mesh_shape), largest_piece(size, then, mesh_shape)
        if now[: len(then)] == then:
            kept *= held
            needed *= held * math.prod(mesh_shape[a] for a in now[len(then) :])
        else:
            needed *= asked
            kept *= asked if then[: len(now)] == now else 0
    return needed - kept


def largest_piece(size: int, axes: Axes, mesh_shape: Shape) -> int:
    """Returns the length of a dim on the first rank, which has the largest piece."""
    for a in axes:
        size = -(-size // mesh_shape[a])
    return size


_SHORT = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "complex64": "c64",
    "complex128": "c128", "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8",
    "uint8": "u8",
    "bool": "bool",
}  # fmt: skip


def describe(shape: Sequence[int], dtype: object, layout: Layout, axis_names: Sequence[str]) -> str:
    """Returns ``f32[8@dp, 16] {tp: P(sum)}``, the notation of repr, errors, docs and tests."""
    name = str(dtype).removeprefix("torch.")
    body = ", ".join(
        f"{size}@{'+'.join(axis_names[a] for a in axes)}" if axes else str(size)
        for size, axes in zip(shape, layout.dims, strict=True)
    )
    named = {a: f"P({op})" for a, op in layout.partial} | {a: repr(p) for a, p in layout.custom}
    pending = ", ".join(f"{axis_names[a]}: {text}" for a, text in sorted(named.items()))
    return f"{_SHORT.get(name, name)}[{body}]" + (f" {{{pending}}}" if pending else "")


def global_strides(
    strides: Sequence[int], piece: Sequence[int], shape: Sequence[int]
) -> tuple[int, ...]:
    """Returns strides of the dense global tensor, with the dims in the order of the piece's strides
    (0 where it repeats)."""
    out = [0] * len(shape)
    step = 1
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], piece[d] > 1, -d)):
        if strides[d] or shape[d] <= 1 or piece[d] <= 1:
            out[d] = step
            step *= max(1, shape[d])
    return tuple(out)


def is_dense(local: Any, shape: Sequence[int]) -> bool:
    """Returns True if the global tensor of this ``shape`` is contiguous, given its contiguous piece
    ``local``.

    In torch a dim of one row or none may have any stride: the piece ``x[:, 3:5]`` is contiguous on
    a rank that has one row of x. This stride shows the strides of the global tensor, unless the
    piece fills its memory (copies keep strides) or is empty.
    """
    if _steps(local.stride(), local.shape, shape):
        return True
    if local.numel() * local.itemsize not in (0, local.untyped_storage().nbytes()):
        return False
    return _steps(global_strides(local.stride(), local.shape, shape), shape, shape)


def _steps(strides: Sequence[int], piece: Sequence[int], shape: Sequence[int]) -> bool:
    """Returns True if these are the strides of a contiguous piece, in all dims of more than one row
    in the whole tensor."""
    step = 1
    for stride, rows, size in zip(reversed(strides), reversed(piece), reversed(shape), strict=True):
        if size > 1 and stride != step:
            return False
        step *= max(1, rows)
    return True
