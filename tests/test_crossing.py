"""Tensors that go from one mesh to another, on real ranks: values, bytes, and who is left out."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

import disttensor as dt
import reshard
from disttensor import ProcessMesh
from reshard import crossing
from tests.pool import on_ranks
from tests.reshard_cases import layouts, locals_of, spec, value, value_of, window

# Pairs of meshes on four ranks: what section the pair stands for, and the two arrays of ranks.
MESHES = {
    "stages": ([0, 1], [2, 3]),
    "back": ([2, 3], [0, 1]),
    "overlapping": ([0, 1, 2], [1, 3]),
    "reordered": ([0, 1, 2, 3], [3, 1, 0, 2]),
    "one to many": ([2], [0, 1, 2, 3]),
    "many to one": ([0, 1, 2, 3], [1]),
    "more axes": ([3, 0], [[0, 1], [2, 3]]),
    "fewer axes": ([[0, 1], [2, 3]], [0, 1, 3]),
    "transposed": ([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
    "columns": ([[0], [1]], [[2], [3]]),
}


def mesh(ranks):
    return ProcessMesh(ranks, ("dp", "tp")[: torch.tensor(ranks).ndim])


def some(seed, n, ndim, left, right, ops=("sum", "max", "avg")):
    rnd = random.Random(seed)
    pairs = [(rnd.choice(layouts(ndim, left, ops)), rnd.choice(layouts(ndim, right, ops)))]
    while len(pairs) < n:
        pairs.append((rnd.choice(layouts(ndim, left, ops)), rnd.choice(layouts(ndim, right, ops))))
    return pairs


def local_of(s, whole):
    """This rank's local, or the empty one of a rank outside."""
    if s.mesh.coordinate is None:
        return torch.empty(s.local_shape, dtype=whole.dtype)
    return locals_of(s, whole)[s.mesh.coordinate]


def check(src, dst, whole):
    """Run src -> dst on all ranks; rank 0's word for all, put together from the locals of dst."""
    x = local_of(src, whole)
    before = x.clone()
    with dt.record_comms() as log:
        out = reshard.run(x, src, dst)
    assert torch.equal(x, before) and out.dtype == whole.dtype
    locals_: list = [None] * dist.get_world_size()
    dist.all_gather_object(locals_, (out, sum(r.bytes for r in log if r.kind == "send")))
    if dst.mesh.coordinate is None:
        assert out.numel() == 0
    got = {c: locals_[r][0] for r, c in zip(dst.mesh.ranks, dst.mesh.coordinates(), strict=True)}
    for place, part in value_of(dst, got).items():
        want = window(whole, dst.box_at(place))
        assert part.shape == want.shape and torch.equal(part, want), (
            f"{src!r} -> {dst!r} at {place}"
        )
    return sum(n for _, n in locals_)


@pytest.mark.parametrize("name", MESHES)
@on_ranks(4)
def test_every_pair_of_meshes(name):
    a, b = map(mesh, MESHES[name])
    for shape in [(5, 3), (8, 4), (1, 3), (0, 2)]:
        for left, right in some(f"{name} {shape}", 12, 2, a.ndim, b.ndim):
            src, dst = spec(a, left, shape), spec(b, right, shape)
            sent = check(src, dst, value(shape))
            assert sent == crossing.plan_crossing(src, dst).nbytes
