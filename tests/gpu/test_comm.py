"""Collectives, messages and reshards of CUDA tensors give the bits that they give on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import disttensor as dt
from disttensor import Partial, ProcessMesh, Replicate, Shard
from disttensor.comm import collectives, p2p
from disttensor.comm.groups import world_group
from tests.support.oracle import line, place, randn
from tests.support.pool import on_ranks

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64,
    torch.int16, torch.bool,
]  # fmt: skip


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Other numbers on each rank, on the CPU."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, 5, shape, generator=draw).to(dtype)


def alike(call, x):
    """Compares the results of ``call`` for a CPU and for a CUDA tensor."""
    want, got = call(x), call(x.cuda())
    for a, b in zip(*[r if isinstance(r, list) else [r] for r in (want, got)], strict=True):
        assert b.is_cuda and torch.equal(a, b.cpu()), (a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(2)
def test_collectives(dtype, async_op):
    group, me = world_group(), dist.get_rank()

    def end(work):
        return work.wait() if async_op else work

    ops = ["sum", "max"] if not dtype.is_complex else ["sum"]
    if dtype.is_floating_point:
        ops.append("avg")
    for op in ops:
        alike(lambda x: end(collectives.all_reduce(x, op, group, async_op=async_op)),
              numbers(3, 5, dtype=dtype))  # fmt: skip
        alike(lambda x: end(collectives.reduce_scatter(x, op, group, async_op=async_op)),
              numbers(2, 3, 5, dtype=dtype))  # fmt: skip
    alike(lambda x: end(collectives.all_gather(x, group, async_op=async_op)),
          numbers(3, 5, dtype=dtype))  # fmt: skip
    alike(lambda x: end(collectives.all_to_all_rows(x, (), (), group, async_op=async_op)),
          numbers(2, 3, 5, dtype=dtype))  # fmt: skip
    sent = [3, 1] if me == 0 else [2, 4]
    received = [3, 2] if me == 0 else [1, 4]
    alike(lambda x: end(collectives.all_to_all(list(x.split(sent)), received, group,
                                               async_op=async_op)),
          numbers(sum(sent), dtype=dtype))  # fmt: skip
    alike(lambda x: end(collectives.all_to_all_rows(x, sent, received, group, async_op=async_op)),
          numbers(sum(sent), 3, dtype=dtype))  # fmt: skip
    if not async_op:
        alike(lambda x: collectives.broadcast(x, 1, group), numbers(3, 5, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2)
def test_messages(dtype):
    me = dist.get_rank()

    def exchange(x):
        tag = p2p.next_tag()
        [work] = p2p.transfer([(1 - me, x)], [(1 - me, (3, 5))], x.dtype, x.device, tag)
        x = x.clone().zero_()  # the one that was given may change
        return work.wait()

    alike(exchange, numbers(3, 5, dtype=dtype))


@on_ranks(2)
def test_reshards_of_every_pair():
    mesh = line()
    full = randn(5, 3)
    every = [Replicate(), Shard(0), Shard(1), Partial(), Partial("max"), dt.attention.Balanced(0)]
    for one, other in itertools.product(every, every):
        if isinstance(other, Partial) and other != one:
            continue
        x = place(full, mesh, [one if not isinstance(one, dt.attention.Balanced) else Replicate()])
        x = dt.reshard(x, mesh, [one])
        asks = Partial("max") not in (one, other)
        got = dt.reshard(x.requires_grad_(asks), mesh, [other])
        assert got.device.type == "cuda"
        torch.testing.assert_close(got.full_tensor().detach(), full, rtol=1e-12, atol=1e-12)
        if not asks:
            continue
        got.full_tensor().square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 2 * full, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_reshards_between_meshes():
    stages = [ProcessMesh([rank], ("tp",), "cuda") for rank in range(2)]
    whole, full = line(), randn(5, 3)
    for source, target in itertools.permutations([*stages, whole], 2):
        for place_ in (Replicate(), Shard(0)):
            x = dt.shard_tensor(full, source, [place_]).requires_grad_()
            got = dt.reshard(x, target, [Shard(1)])
            (got * got).sum().backward()
            torch.testing.assert_close(got.detach().full_tensor(everywhere=True), full)
            want = dt.shard_tensor(2 * full, source, [place_])
            if source.coordinate is not None:
                torch.testing.assert_close(x.grad.to_local(), want.to_local())
