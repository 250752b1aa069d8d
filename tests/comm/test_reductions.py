"""Sums and averages near the limits of a dtype, by what factors fp16 stays between them; NaN in
max and min."""

from __future__ import annotations

import math

import pytest
import torch

import disttensor as dt
from disttensor.comm import collectives, wire
from disttensor.core.mesh import ProcessMesh
from tests.support.oracle import line
from tests.support.pool import fake_world, on_ranks

HALF = torch.float16
LARGEST, TINIEST = 65504.0, 2.0**-24


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_fp16_factors_are_powers_of_two_near_the_root_of_n(op):
    for n in range(1, 4097):
        before, after = wire.factors(op, n, HALF)
        if op == "avg":  # the rest of the division comes after, too
            assert before * after == pytest.approx(1 / n, rel=1e-15)
        else:
            assert before * after == 1
        assert math.frexp(before)[0] == 0.5, "not a power of two"
        assert 2**-0.5 - 1e-9 <= before * math.sqrt(n) <= 2**0.5 + 1e-9, n


def test_other_dtypes_need_no_factor_before():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert wire.factors("sum", 48, dtype) == (1, 1)
        assert wire.factors("avg", 48, dtype) == (1, 1 / 48)


def test_zeros_without_memory_get_some():
    """The gradient of torch.sgn has none."""
    zeros = torch._efficientzerotensor((2, 3))
    found = wire.dense(zeros)
    assert not found._is_zerotensor() and found.data_ptr() and not found.any()
    with pytest.raises(wire.CommError, match="sends memory as it is"):
        wire.check_memory("all_reduce", zeros)


def reduced(x, op, group):
    """The same reduction by all four ways; x is [n] and the part of this rank is [1]."""
    part, total = torch.empty(1, dtype=x.dtype), x.clone()
    collectives.reduce_scatter(x, op, group, out=part, async_op=True).wait()
    collectives.all_reduce(total, op, group, inplace=True, async_op=True).wait()
    return (
        collectives.all_reduce(x, op, group),
        total,
        collectives.reduce_scatter(x, op, group),
        part,
    )


# One row for each rank. The exact results are representable in fp16, and are what is wanted.
CASES = {
    "cancel": [[60000, 65504], [60000, 65504], [-60000, -65504], [-60000, 1]],
    "cancel in another order": [[-60000, 0], [60000, 60000], [-60000, 60000], [60000, -60000]],
    "small beside large": [[1, 0], [0, 2], [60000, 60000], [0, 2]],
    "tiny": [[2 * TINIEST, 4 * TINIEST]] * 4,
    "tiny, with signs": [
        [2 * TINIEST, 6 * TINIEST], [-4 * TINIEST, 0], [6 * TINIEST, 0], [0, -2 * TINIEST],
    ],
}  # fmt: skip
AVERAGES = {
    "large": [[32000, -32000], [32000, -32752], [32000, -32000], [32000, -32000]],
    "largest": [[LARGEST, -LARGEST], [LARGEST, -LARGEST], [0, 0], [0, 0]],
}


def check(rows, op, ranks):
    group = ProcessMesh(ranks, ("dp",)).group((0,))
    columns = torch.tensor(rows, dtype=torch.float64).repeat(1, 2)  # [rank, slot]
    want = columns.sum(0) / (4 if op == "avg" else 1)
    assert torch.isfinite(want.to(HALF)).all()
    whole, total, *parts = reduced(columns[group.index].to(HALF), op, group)
    assert whole.tolist() == total.tolist() == want.to(HALF).tolist()
    assert [p.item() for p in parts] == [want.to(HALF)[group.index].item()] * 2


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("case", CASES)
@on_ranks(4)
def test_fp16_near_its_limits(case, op):
    for ranks in ([0, 1, 2, 3], [2, 0, 3, 1]):
        check(CASES[case], op, ranks)


@pytest.mark.parametrize("case", AVERAGES)
@on_ranks(4)
def test_fp16_averages_of_large_values(case):
    check(AVERAGES[case], "avg", [0, 1, 2, 3])


@on_ranks(2)
def test_two_ranks_add_fp16_without_a_loss():
    group = ProcessMesh([0, 1], ("dp",)).group((0,))
    for x in ([TINIEST, 3 * TINIEST], [30000.0, 32752.0], [-TINIEST, LARGEST / 2]):
        for out in reduced(torch.tensor(x, dtype=HALF), "sum", group)[:2]:
            assert out.tolist() == [2 * v for v in x]
    large = torch.tensor([LARGEST, 60000.0], dtype=HALF)
    for out in reduced(large, "avg", group)[:2]:
        assert out.tolist() == large.tolist()


@on_ranks(4)
def test_three_ranks_average_in_every_float():
    if ProcessMesh([2, 0, 1], ("dp",)).coordinate is None:
        return
    group = ProcessMesh([2, 0, 1], ("dp",)).group((0,))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, HALF):
        x = torch.tensor([1.0, 7.0, 100.0]).to(dtype)
        for out in reduced(x, "avg", group)[:2]:
            assert torch.equal(out, x)  # the average of equal values is that value
        for out in reduced(x, "avg", group)[2:]:
            assert torch.equal(out.view(-1), x[group.index : group.index + 1])


def test_the_backend_is_asked_for_an_average_where_it_has_one():
    with fake_world(4):
        group = ProcessMesh(range(4), ("dp",)).group((0,))
        x = torch.ones(4)
        assert wire.scale_factors("avg", x, group) == (
            "sum",
            1,
            1 / 4,
        )  # the fake backend has none
        assert wire.scale_factors("avg", x.half(), group) == ("sum", 1 / 2, 2 / 4)
        assert wire.scale_factors("sum", x, group) == ("sum", 1, 1)
        assert wire.scale_factors("max", x.half(), group) == ("max", 1, 1)
    gloo_has_it()


@on_ranks(2)
def gloo_has_it():
    group = ProcessMesh([0, 1], ("dp",)).group((0,))
    if "gloo" in wire.AVERAGES:
        assert wire.scale_factors("avg", torch.ones(4), group) == ("avg", 1, 1)
        assert wire.scale_factors("avg", torch.ones(4).bfloat16(), group) == ("avg", 1, 1)


@on_ranks(4)
def test_the_largest_and_the_smallest_keep_a_nan_of_any_rank():
    mesh = line()
    group, me, nan, inf = mesh.group((0,)), mesh.coordinate[0], float("nan"), float("inf")
    columns = [[nan if i == k else float(i) for i in range(4)] for k in range(4)]
    columns += [[-inf, -0.0, inf, 1.0], [-0.0, 0.0, -0.0, 0.0], [-1.0, -2.0, -inf, -2.5]]
    columns += [[-nan, 1.0, inf, 2.0], [1e-45, -1e-45, 0.0, 1.0], [inf] * 4, [-inf] * 4]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        every = torch.tensor(columns, dtype=dtype).t()
        for op, reduce in (("max", torch.amax), ("min", torch.amin)):
            want = reduce(every, 0)
            got = collectives.all_reduce(every[me], op, group)
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            got = collectives.start_async(collectives.all_reduce, every[me], op, group).wait()
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            rows = every[me].expand(4, -1)
            got = collectives.reduce_scatter(rows, op, group)
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@on_ranks(2)
def test_functions_that_compare_ranks_keep_a_nan():
    mesh = line()
    for place in (0, 3):
        x = torch.tensor([1.0, 2.0, 3.0, 4.0])
        x[place] = float("nan")
        d = dt.shard_tensor(x, mesh, [dt.Shard(0)])
        pending = dt.from_local(d.to_local(), mesh, [dt.Partial("max")], shape=(2,))
        mine = [
            torch._foreach_max([d])[0], torch._foreach_norm([d], float("inf"))[0],
            torch.linalg.vector_norm(d, float("inf")), d.amax(), d.max(0).values, d.softmax(0),
            pending, pending.redistribute(placements=[dt.Shard(0)]),
        ]  # fmt: skip
        rows = torch.stack([x[:2], x[2:]]).amax(0)
        plain = [x.amax()] * 5 + [x.softmax(0), rows, rows]
        for a, b in zip(mine, plain, strict=True):
            torch.testing.assert_close(a.full_tensor(), b, equal_nan=True)
