"""How the pieces of ranks fit together to a tensor of one process, found from sizes and values.

A DTensor or a DistTensor knows its place. For a regular tensor the layouts are tried that parallel
programs use: the same on all ranks; rows of the batch; a part of a dim, or of each half or third of
a dim (fused projections); both; parts of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch

from disttensor.verification.records import Place

Tensor = torch.Tensor
Pieces = dict[int, Tensor]  # by rank
_FUSED = (1, 2, 3)  # tensors that one dim may hold one after the other


class Batch(NamedTuple):
    """How the ranks share the batch. parts: the ranks that have the same rows. rows: of each part,
    their numbers in the batch of one process; None: in order of the parts."""

    parts: list[list[int]]
    rows: list[list[int]] | None = None


class Fit(NamedTuple):
    """What the ranks hold in a layout, and should hold. way: "pieces", "sum" or "mean"."""

    way: str
    actual: Pieces
    expected: Pieces

    def errors(self) -> dict[int, float]:
        """Returns the largest difference of each rank."""
        return {r: distance(x, self.expected[r]) for r, x in self.actual.items()}


def distance(x: Tensor, y: Tensor) -> float:
    """Returns the largest difference of two tensors of one shape. Two values nan are equal."""
    same = (x == y) | ((x != x) & (y != y))
    if bool(same.all()):
        return 0.0
    if not (x.is_floating_point() or x.is_complex()):
        return 1.0
    return float(torch.where(same, 0.0, (x - y).abs().nan_to_num(torch.inf)).max())


def share_batch(one: Sequence[Tensor], held: Mapping[int, Sequence[Tensor]]) -> Batch | None:
    """Returns how the ranks share the inputs of a call; None if they do not add up to the inputs of
    one process."""
    parts: list[list[int]] = []
    for rank, mine in held.items():
        same = [part for part in parts if all(map(_is_equal, held[part[0]], mine))]
        if same:
            same[0].append(rank)
        else:
            parts.append([rank])
    for i in sorted(range(len(one)), key=lambda i: -one[i].numel()):
        pieces = [held[part[0]][i] for part in parts]
        if len(parts) == 1 and _is_equal(one[i], pieces[0]):
            return Batch(parts)
        for dim in range(one[i].ndim):
            if (rows := _rows(one[i], pieces, dim)) is not None:
                return Batch(parts, rows)
    return None


def _rows(one: Tensor, pieces: list[Tensor], dim: int) -> list[list[int]] | None:
    """Returns the place of each slice of the pieces along ``dim``, if these are all slices."""
    if any(x.ndim != one.ndim for x in pieces):
        return None
    if _cut(one, dim, [x.shape[dim] for x in pieces]) is None:
        return None
    slices = {x.numpy().tobytes(): i for i, x in enumerate(one.unbind(dim))}
    bytes_ = [[x.numpy().tobytes() for x in piece.unbind(dim)] for piece in pieces]
    flat = [b for part in bytes_ for b in part]
    if flat == [x.numpy().tobytes() for x in one.unbind(dim)]:  # slices may be equal
        numbers = iter(range(len(flat)))
        return [[next(numbers) for _ in part] for part in bytes_]
    if {*flat} != {*slices} or len(slices) != len(flat):
        return None
    return [[slices[b] for b in part] for part in bytes_]


def fits(
    one: Tensor, held: Pieces, places: Mapping[int, Place | None], batches: Sequence[Batch],
    has_rows: bool,
) -> Iterator[Fit]:  # fmt: skip
    """Yields the layouts that are possible by the sizes: those of pieces, then of sums and means.

    Args:
        one: the tensor of one process.
        held: the tensors of the ranks.
        places: of tensors that know it.
        batches: how the ranks may share the batch.
        has_rows: whether rows of the batch are a dim; not in parameters.
    """
    if any(place and place.op for place in places.values()):
        held = _reduced(held, places)
    sums = []
    for batch in batches:
        parts = [[r for r in part if r in held] for part in batch.parts]
        if not all(parts):
            parts, batch = [part for part in parts if part], Batch([])
        for tops in _tops(one, held, parts, batch.rows, has_rows):
            yield from _pieces(tops, held, places, parts)
            if all(
                held[r].shape == t.shape for t, part in zip(tops, parts, strict=True) for r in part
            ):
                totals = [sum(held[r] for r in part) for part in parts]
                sums.append(_fit("sum", totals, tops, parts))
        if one.numel() == 1 and all(x.shape == one.shape for x in held.values()):
            first = [held[part[0]] for part in parts]
            total: Any = sum(first)
            sums += [
                _fit("mean", [total / len(first)], [one], [[*held]]),
                _fit("sum", [total], [one], [[*held]]),
            ]
    yield from sums


def _fit(way: str, actual: Sequence[Any], expected: Sequence[Tensor], parts: Any) -> Fit:
    pairs = [(r, a, e) for part, a, e in zip(parts, actual, expected, strict=True) for r in part]
    return Fit(way, {r: a for r, a, _ in pairs}, {r: e for r, _, e in pairs})


def _tops(
    one: Tensor, held: Pieces, parts: list[list[int]], rows: list[list[int]] | None, has_rows: bool
) -> Iterator[list[Tensor]]:
    """Yields the tensor that each part of the ranks should hold together."""
    yield [one] * len(parts)
    for dim in range(one.ndim if has_rows and len(parts) > 1 else 0):
        total = sum(map(len, rows or ()))
        if rows and one.shape[dim] and one.shape[dim] % total == 0:
            each = one.shape[dim] // total  # dims may be flattened
            index = [[r * each + i for r in mine for i in range(each)] for mine in rows]
            yield [one.index_select(dim, torch.tensor(i)) for i in index]
        elif not rows and all(held[part[0]].ndim == one.ndim for part in parts):
            cut = _cut(one, dim, [held[part[0]].shape[dim] for part in parts])
            if cut is not None:
                yield cut


def _pieces(
    tops: list[Tensor], held: Pieces, places: Mapping[int, Place | None], parts: list[list[int]]
) -> Iterator[Fit]:
    """Yields the layouts in which the ranks of a part have pieces of its tensor, in their order."""
    pairs = [(top, r) for top, part in zip(tops, parts, strict=True) for r in part]
    if all(places[r] for _, r in pairs):
        if all(places[r].shape == tuple(top.shape) for top, r in pairs):  # type: ignore[union-attr]
            expected = {r: _at(top, places[r]) for top, r in pairs}
            yield Fit("pieces", {r: held[r] for r in expected}, expected)
        return
    if any(top.ndim != held[r].ndim for top, r in pairs):
        return
    dims = {d for t, r in pairs for d in range(t.ndim) if t.shape[d] != held[r].shape[d]}
    if not dims:
        yield Fit("pieces", {r: held[r] for _, r in pairs}, {r: top for top, r in pairs})
    for fused in _FUSED if len(dims) == 1 else ():
        (dim,) = dims
        sizes = [[held[r].shape[dim] for r in part] for part in parts]
        cuts = [_cut(top, dim, s, fused) for top, s in zip(tops, sizes, strict=True)]
        if all(cut is not None for cut in cuts):
            flat = [x for cut in cuts if cut for x in cut]
            expected = {r: x for (_, r), x in zip(pairs, flat, strict=True)}
            if all(held[r].shape == x.shape for r, x in expected.items()):
                yield Fit("pieces", {r: held[r] for r in expected}, expected)


def _at(x: Tensor, place: Place | None) -> Tensor:
    for dim, numbers in enumerate(place.numbers if place else ()):
        x = x.index_select(dim, torch.tensor(numbers, dtype=torch.long))
    return x


def _cut(x: Tensor, dim: int, sizes: Sequence[int], fused: int = 1) -> list[Tensor] | None:
    """Returns the pieces of these sizes along ``dim``; of each of ``fused`` tensors in ``x``."""
    if sum(sizes) != x.shape[dim] or any(n % fused for n in sizes):
        return None
    chunks = x.split(max(x.shape[dim] // fused, 1), dim)
    cuts = [chunk.split([n // fused for n in sizes], dim) for chunk in chunks]
    return [torch.cat(pieces, dim) for pieces in zip(*cuts, strict=True)]


def _reduced(held: Pieces, places: Mapping[int, Place | None]) -> Pieces:
    """Returns the pieces after the reduction that is pending between ranks."""
    groups: dict[str, list[int]] = {}
    for rank, place in places.items():
        groups.setdefault(repr((place.numbers, place.group)) if place else str(rank), []).append(
            rank
        )
    out: Pieces = {}
    for ranks in groups.values():
        place = places[ranks[0]]
        total = _reduce(place.op if place else "", [held[r] for r in ranks])
        out |= dict.fromkeys(ranks, total)
    return out


def _reduce(op: str, xs: list[Tensor]) -> Tensor:
    if op in ("max", "min"):
        return reduce(torch.maximum if op == "max" else torch.minimum, xs)
    if op.startswith("norm"):
        return torch.linalg.vector_norm(torch.stack(xs), float(op.split()[1]), dim=0)
    total = torch.stack(xs).sum(0)
    return total / len(xs) if op in ("avg", "mean") else total


def _is_equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and distance(x, y) == 0
