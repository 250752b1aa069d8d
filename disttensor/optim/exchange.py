"""Moves many tensors between layouts on the ranks of one mesh: one all-to-all for each bucket.

A layout may be on a part of the ranks, as on one. A pending sum is sent unreduced, and added up by
the ranks that receive it, in one order. Each rank is sent only the elements that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from disttensor.cache import cached
from disttensor.comm import collectives
from disttensor.comm.process_group import world
from disttensor.comm.work import Work
from disttensor.core.layout import Axes, Box
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec
from disttensor.gradients.sync import in_buckets
from reshard.routing import Key, Routes, Routing

Tensor = torch.Tensor


class Move(NamedTuple):
    """``local``: of ``src``, on its ranks; the others give None. All ranks of ``mesh`` take part;
    ``src`` and ``dst`` are on some of them."""

    local: Tensor | None
    src: DistSpec
    dst: DistSpec
    mesh: ProcessMesh


class _Bucket(NamedTuple):
    """The moves of one all-to-all, by their numbers, the routes of each, and what arrives."""

    numbers: list[int]
    routes: list[tuple[Routes, ...]]
    received: list[int]
    work: Work[Tensor]


def exchange(moves: Sequence[Move]) -> list[Tensor]:
    """Returns this rank's local of each ``dst``, in memory of its own; without elements on other
    ranks. All ranks of the meshes give the same specs in the same order. Not differentiable."""
    out: list[Tensor] = [torch.empty(0)] * len(moves)
    running: _Bucket | None = None
    for numbers in _buckets(moves):
        started = _start(numbers, moves)
        if running is not None:
            _finish(running, moves, out)
        running = started
    if running is not None:
        _finish(running, moves, out)
    return out


def _buckets(moves: Sequence[Move]) -> Iterator[list[int]]:
    """Yields the numbers of the moves of each bucket. It depends on meshes and specs alone."""
    alike: dict[tuple[ProcessMesh, torch.dtype], list[int]] = {}
    for i, move in enumerate(moves):
        alike.setdefault((move.mesh, move.src.dtype), []).append(i)
    for members in alike.values():
        yield from in_buckets(members, [moves[i].src.nbytes for i in members])


@cached(8192)
def _routes(src: DistSpec, dst: DistSpec, rank: int) -> tuple[Routes, ...]:
    """Returns the routes of ``rank`` for each summand of the pending sum of ``src``; one if nothing
    is pending. Of the ranks that hold the same elements, the one that sends least sends them."""
    axes = tuple(a for a, _ in src.layout.partial)
    summands: dict[Axes, dict[int, Key]] = {}
    for holder, at in zip(src.mesh.ranks, src.mesh.coordinates(), strict=True):
        summands.setdefault(tuple(at[a] for a in axes), {})[holder] = ((), src.box_at(at))
    places = zip(dst.mesh.ranks, dst.mesh.coordinates(), strict=True)
    needed: dict[int, Key] = {receiver: ((), dst.box_at(at)) for receiver, at in places}

    def nearest(receiver: int, holder: int, elements: int) -> tuple[int, int]:
        return elements, (holder - receiver) % world()[1]

    return tuple([Routing(held, needed, nearest).of(rank) for held in summands.values()])


@torch.no_grad()
def _start(numbers: list[int], moves: Sequence[Move]) -> _Bucket:
    rank, mesh, dtype = world()[0], moves[numbers[0]].mesh, moves[numbers[0]].src.dtype
    group = mesh.group(range(mesh.ndim), "owners")
    routes = [_routes(moves[i].src, moves[i].dst, rank) for i in numbers]
    sends: dict[int, list[Tensor]] = {member: [] for member in group.ranks}
    received = dict.fromkeys(group.ranks, 0)
    for i, summands in zip(numbers, routes, strict=True):
        for one in summands:
            for to, box in one.sends:
                sends[to].append(_cut(box, moves[i], one))
            for sender, box in one.receives:
                received[sender] += box.numel
    sent = [sum(map(torch.numel, parts)) for parts in sends.values()]
    flat = [part for parts in sends.values() for part in parts]
    x = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=mesh.device)
    arrive = list(received.values())
    begin = collectives.start_async
    return _Bucket(
        numbers, routes, arrive, begin(collectives.all_to_all_rows, x, sent, arrive, group)
    )


def _cut(box: Box, move: Move, routes: Routes) -> Tensor:
    """Returns the elements of ``box`` of this rank's local, flat."""
    assert move.local is not None and routes.source is not None
    return box.cut(move.local.detach(), routes.source).reshape(-1)


@torch.no_grad()
def _finish(bucket: _Bucket, moves: Sequence[Move], out: list[Tensor]) -> None:
    """Writes the results of a bucket to ``out``."""
    mesh, arrived = moves[bucket.numbers[0]].mesh, bucket.work.wait()
    group = mesh.group(range(mesh.ndim), "owners")
    parts = dict(zip(group.ranks, arrived.split(bucket.received), strict=True))
    for i, summands in zip(bucket.numbers, bucket.routes, strict=True):
        target, dtype = summands[0].target, moves[i].src.dtype
        if target is None:
            continue
        wide = torch.float32 if dtype.itemsize < 4 and len(summands) > 1 else dtype
        result = torch.empty(target.shape, dtype=wide, device=mesh.device)
        for n, one in enumerate(summands):
            pieces = []
            if one.kept:
                pieces.append((one.kept, _cut(one.kept, moves[i], one).view(one.kept.shape)))
            for sender, box in one.receives:
                mine, parts[sender] = parts[sender].split(
                    [box.numel, len(parts[sender]) - box.numel]
                )
                pieces.append((box, mine.view(box.shape)))
            if len(summands) == len(pieces) == 1 and one.receives and pieces[0][0] == target:
                result = pieces[0][1]
                break
            for box, piece in pieces:
                into = box.cut(result, target)
                into.add_(piece) if n else into.copy_(piece)
        out[i] = result.to(dtype)
