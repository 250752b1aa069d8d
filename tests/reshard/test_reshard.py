"""Every pair of layouts on real processes: values, what is sent, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

import reshard
from disttensor.comm import objects
from disttensor.comm.log import record_comms
from disttensor.comm.process_group import world
from disttensor.core.mesh import ProcessMesh
from disttensor.core.placement import Placement
from tests.support.pool import on_ranks
from tests.support.reshard_cases import P, R, S, check_pair, layouts, locals_of, spec, value

OPS = ("sum", "avg", "max", "min", "prod")
Pair = tuple[tuple[Placement, ...], tuple[Placement, ...]]


def check_pairs(
    mesh: ProcessMesh,
    pairs: Sequence[Pair],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Reshard for all pairs: input unchanged, what is sent as planned, locals as they must be."""
    whole = value(shape, dtype)
    inputs = {a: locals_of(spec(mesh, a, shape, dtype), whole) for a, _ in pairs}
    outs = []
    even = not shape or all(n % mesh.size == 0 for n in shape)
    for a, b in pairs:
        src, dst = spec(mesh, a, shape, dtype), spec(mesh, b, shape, dtype)
        x = inputs[a][mesh.coordinate]
        before = x.clone()
        with record_comms() as log:
            out = reshard.run(x, src, dst)
        assert torch.equal(x, before) and out.shape == dst.local_shape and out.dtype == dtype
        sent = [step for step in reshard.choose(src, dst) if step.bytes]
        if even:
            assert [r.kind for r in log] == [s.kind for s in sent]
            assert [r.axis for r in log] == [s.axis for s in sent]
            if dtype == torch.float32 and mesh.ndim == 1:
                assert [r.bytes for r in log] == [s.bytes for s in sent]
        if log:
            assert out.is_contiguous()
        outs.append(out.clone())
    everybody = objects.gather_objects(outs, mesh.group(range(mesh.ndim)), any_class=True)
    for i, (a, b) in enumerate(pairs):
        found = {place: each[i] for place, each in zip(mesh.coordinates(), everybody, strict=True)}
        check_pair(spec(mesh, a, shape, dtype), spec(mesh, b, shape, dtype), whole, found)


@pytest.mark.feature("Reshard")
@pytest.mark.parametrize("shape", [(5, 3), (8, 4), (1, 3), (0, 3)], ids=str)
@on_ranks(4)
def test_every_pair_on_one_axis(shape):
    pairs = list(itertools.product(layouts(2, 1, OPS), repeat=2))
    check_pairs(ProcessMesh(range(4), ("dp",)), pairs, shape)


@pytest.mark.parametrize("shape", [(5, 3), (8, 4)], ids=str)
@on_ranks(4)
def test_every_pair_on_two_axes(shape):
    pairs = list(itertools.product(layouts(2, 2, ("sum", "max")), repeat=2))
    check_pairs(ProcessMesh([[0, 1], [2, 3]], ("dp", "tp")), pairs, shape)


@on_ranks(4)
def test_ranks_in_any_order():
    pairs = list(itertools.product(layouts(2, 2, ("avg",)), repeat=2))
    check_pairs(ProcessMesh([[3, 1], [0, 2]], ("dp", "tp")), pairs, (5, 6))
    one = list(itertools.product(layouts(2, 1, ("sum",)), repeat=2))
    for shape in [(5, 3), (4, 8)]:
        check_pairs(ProcessMesh([2, 0, 3, 1], ("dp",)), one, shape)


@on_ranks(4)
def test_any_order_of_axes_on_one_dim():
    orders = [(S(0), S(0)), (S(0, 1), S(0, 0)), (S(1, 1), S(1, 0)), (R, S(0)), (S(0), R), (R, R)]
    pairs = list(itertools.product(orders, repeat=2))
    for shape in [(7, 3), (8, 4)]:
        check_pairs(ProcessMesh([[0, 1], [2, 3]], ("dp", "tp")), pairs, shape)


@on_ranks(4)
def test_all_dtypes():
    mesh = ProcessMesh(range(4), ("dp",))
    for dtype, ops in [
        (torch.bool, ("any", "all", "max", "min")),
        (torch.int64, ("sum", "max", "min", "prod")),
        (torch.int16, ("sum", "max", "min", "prod")),
        (torch.uint8, ("max", "min")),
        (torch.float16, OPS),
        (torch.bfloat16, OPS),
        (torch.float64, OPS),
        (torch.complex64, ()),
    ]:
        pairs = list(itertools.product(layouts(2, 1, ops), repeat=2))
        for shape in [(5, 3), (4, 8)]:
            check_pairs(mesh, pairs, shape, dtype)


@on_ranks(4)
def test_complex_sums():
    mesh, i = ProcessMesh(range(4), ("dp",)), world()[0]
    x = torch.complex(torch.full((6, 2), 1.0 + i), torch.full((6, 2), 2.0)).conj()
    for op, want in [("sum", 10 - 8j), ("avg", 2.5 - 2j)]:
        src = spec(mesh, [P(op)], (6, 2), torch.complex64)
        for p in [R, S(0), S(1)]:
            dst = spec(mesh, [p], (6, 2), torch.complex64)
            out = reshard.run(x, src, dst)
            assert torch.equal(out, torch.full(dst.local_shape, want)), (op, p)
            back = reshard.run(reshard.run(out, dst, src), src, dst)
            assert torch.equal(back, out)


@on_ranks(4)
def test_scalars_and_axes_of_size_one():
    mesh = ProcessMesh([[[0, 1], [2, 3]]], ("pp", "dp", "tp"))
    pairs = list(itertools.product(layouts(0, 3, ("sum", "max")), repeat=2))
    check_pairs(mesh, pairs, ())
    check_pairs(mesh, [((S(0), R, S(1)), (S(1), S(0), R)), ((P(), R, R), (S(0), R, R))], (5, 3))


@on_ranks(4)
def test_sub_mesh_and_ranks_outside():
    mesh = ProcessMesh([3, 1], ("dp",))
    src, dst = spec(mesh, [S(0)], (3, 2)), spec(mesh, [R], (3, 2))
    whole = value((3, 2))
    if mesh.coordinate is None:
        assert reshard.run(torch.empty(0, 0), src, dst).numel() == 0
    else:
        x = locals_of(src, whole)[mesh.coordinate]
        assert torch.equal(reshard.run(x, src, dst), whole)


@on_ranks(2)
def test_lazy_conj_and_neg_are_applied():
    mesh = ProcessMesh(range(2), ("dp",))
    z = torch.complex(torch.arange(4.0), torch.ones(4)).reshape(2, 2)
    src, dst = spec(mesh, [S(0)], (4, 2), z.dtype), spec(mesh, [R], (4, 2), z.dtype)
    assert torch.equal(reshard.run(z.conj(), src, dst), torch.cat([z.conj(), z.conj()]))
    v = z.conj().imag  # real, with a lazy minus
    assert v.is_neg()
    for a, b in [([S(0)], [R]), ([P()], [R])]:
        src, dst = spec(mesh, a, (4, 2)), spec(mesh, b, (4, 2))
        got = reshard.run(v if a == [S(0)] else torch.cat([v, v]), src, dst)
        assert torch.equal(got, torch.full((4, 2), -1.0 if a == [S(0)] else -2.0))
    src, dst = spec(mesh, [S(0)], (4, 2)), spec(mesh, [S(1)], (4, 2))
    assert torch.equal(reshard.run(v, src, dst), torch.full((4, 1), -1.0))


@on_ranks(2)
def test_a_local_of_the_wrong_shape_is_refused_before_anything_is_sent():
    mesh = ProcessMesh(range(2), ("dp",))
    src, dst = spec(mesh, [S(0)], (5, 2)), spec(mesh, [R], (5, 2))
    with record_comms() as log, pytest.raises(ValueError, match=r"has shape \(7, 2\)"):
        reshard.run(torch.ones(7, 2), src, dst)
    assert not len(log)
