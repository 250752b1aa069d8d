"""Each dtype of torch with each way of a reshard: moves keep all bits, reductions are exact, and a
reduction without a result of the dtype is refused by name."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch

import disttensor as dt
import reshard
from disttensor.core.placement import REDUCTIONS, Balanced
from disttensor.core.spec import spec_of
from tests.support.part import part
from tests.support.pool import run_on_ranks
from tests.support.reshard_cases import P, R, S, spec

SHAPE = (5, 3)
INTEGERS = [f"{sign}int{bits}" for sign in ("u", "") for bits in (8, 16, 32, 64)]
NARROW = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
FLOATS = ["float16", "bfloat16", "float32", "float64", *NARROW]
COMPLEX = ["complex32", "complex64", "complex128"]
MEANT = {
    "bool": ("max", "min", "any", "all"),
    **dict.fromkeys(INTEGERS, ("sum", "max", "min", "prod")),
    **dict.fromkeys(FLOATS, ("sum", "avg", "max", "min", "prod")),
    **dict.fromkeys(COMPLEX, ("sum", "avg")),
    "float8_e8m0fnu": ("max", "min", "prod"),
}
DTYPES = {str(d)[6:] for d in map(vars(torch).get, dir(torch)) if type(d) is torch.dtype}
REDUCE = {"sum": sum, "avg": lambda row: sum(row) / len(row), "max": max, "min": min,
          "prod": math.prod, "any": any, "all": all}  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", MEANT)
def test_a_spec_has_only_reductions_with_a_result_of_its_dtype(name):
    mesh, dtype = dt.ProcessMesh([0], ("dp",)), getattr(torch, name)
    for op in REDUCTIONS:
        if op in MEANT[name]:
            assert spec_of(mesh, SHAPE, dtype, [P(op)]).layout.partial == ((0, op),)
        else:
            words = rf"Partial\('{op}'\) of {dtype} on mesh axis 'dp' has no meaning; use Partial"
            with pytest.raises(ValueError, match=words):
                spec_of(mesh, SHAPE, dtype, [P(op)])
            with pytest.raises(ValueError, match=words):
                reshard.choose(*(spec(mesh, [p], SHAPE, dtype) for p in (P(op), R)))


@pytest.mark.parametrize("name", sorted(DTYPES - MEANT.keys()))
def test_packed_dtypes_are_refused_by_name(name):
    with pytest.raises(TypeError, match=f"no DistTensor has the dtype torch.{name}"):
        spec(dt.ProcessMesh([0], ("dp",)), [R], SHAPE, getattr(torch, name))


def bits(x):
    return x.contiguous().view(torch.uint8)


def zero(dtype):
    """-0.0; in dtypes without it, NaN or a number."""
    return torch.tensor([0] * (dtype.itemsize - 1) + [128], dtype=torch.uint8).view(dtype)


def any_bits(dtype, seed):
    """Returns values of any bits: NaN with payloads, subnormal numbers and -0.0 among them."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (math.prod(SHAPE), dtype.itemsize), generator=g).to(torch.uint8)
    x = (rows % 2 == 0).view(SHAPE) if dtype == torch.bool else rows.view(dtype).view(SHAPE)
    if dtype != torch.bool:
        x[0, 0] = zero(dtype)
    return x


def exact(dtype, seed):
    """Returns values whose reductions are exact. uint64 has numbers that no int64 can hold."""
    x = 2 ** torch.randint(0, 3, SHAPE, generator=torch.Generator().manual_seed(seed))
    if dtype == torch.uint64:
        return torch.where(x == 4, x ^ torch.iinfo(torch.int64).min, x).view(dtype)
    return x == 4 if dtype == torch.bool else x.to(dtype)


def reduced(op, parts):
    """Returns the reduction by Python's numbers, as torch does not reduce all dtypes."""
    dtype = parts[0].dtype
    wide = [p.double() if dtype.is_floating_point else p for p in parts]
    row = [REDUCE[op](column) for column in zip(*(p.flatten().tolist() for p in wide), strict=True)]
    if dtype == torch.uint64:
        return torch.tensor([n % 2**64 for n in row], dtype=dtype).view(SHAPE)
    return torch.tensor(row).to(dtype).view(SHAPE)


def check(names, world):
    warnings.filterwarnings("ignore", "ComplexHalf")
    me = dt.init_mesh((world,)).get_rank()
    every, back, first, last = (
        dt.ProcessMesh(ranks, ("dp",))
        for ranks in (range(world), range(world)[::-1], [0], [world - 1])
    )
    flat = dt.ProcessMesh([[*range(world)]], ("one", "dp"))
    ends = [R, S(0), S(1), Balanced(0)]

    def same(x, want, *told):
        got = dt.reshard(x, every, [R]).to_local()
        assert got.dtype == want.dtype and torch.equal(bits(got), bits(want)), (*told, got, want)

    for name in names:
        dtype = getattr(torch, name)
        x = any_bits(dtype, 3)
        for a, b in itertools.permutations(ends, 2):
            same(dt.shard_tensor(x, every, [a]).redistribute(placements=[b]), x, name, a, b)
        for m, n in itertools.permutations([every, back, first, last], 2):
            same(dt.reshard(dt.shard_tensor(x, m, [S(0)]), n, [Balanced(0)]), x, name, m, n)
        for op in MEANT[name]:
            one = dt.shard_tensor(x, flat, [P(op), S(0)])
            same(one, x, name, op, "over one rank")
            same(dt.reshard(one, first, [P(op)]), x, name, op, "over one rank")
            y = exact(dtype, 3)
            if name in FLOATS and "uz" not in name:
                y[0] = zero(dtype)
            for end in ends:
                pending = dt.shard_tensor(y, every, [end]).redistribute(placements=[P(op)])
                same(pending, y, name, op, end)
            for m in (back, first):
                same(dt.reshard(dt.shard_tensor(y, last, [R]), m, [P(op)]), y, name, op, m)
            parts = [exact(dtype, 10 + rank) for rank in range(world)]
            want = reduced(op, parts)
            pending = dt.from_local(parts[me], every, [P(op)], shape=SHAPE)
            for end in ends:
                same(pending.redistribute(placements=[end]), want, name, op, end)
            for m, end in itertools.product([back, first, last], [P(op), S(0)]):
                same(dt.reshard(pending, m, [end]), want, name, op, m, end)


@pytest.mark.parametrize("world", [2, 4])
def test_every_dtype_keeps_its_bits_and_reduces_exactly(world):
    names = part(MEANT, 6 // world, "dtypes")
    run_on_ranks(world, check, [*dict.fromkeys(["uint64", *names])] if world == 2 else names, world)
