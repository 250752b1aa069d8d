"""Random numbers on CUDA: by element index they have the bits of the CPU; torch's own are seeded
for each call and restored."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import Replicate, Shard
from tests.support.oracle import line, randn
from tests.support.pool import on_ranks
from tests.support.training import compare, full


@on_ranks(2)
def test_numbers_by_index_are_those_of_the_cpu():
    meshes = [dt.ProcessMesh([0, 1], ("x",), kind) for kind in ("cpu", "cuda")]
    for make in (dt.rand, dt.randn):
        for placements in ([Replicate()], [Shard(0)]):
            found = []
            for mesh in meshes:
                dt.manual_seed(3)
                found.append(make(5, 7, mesh=mesh, placements=placements).full_tensor().cpu())
            if make is dt.rand:
                assert torch.equal(*found)
            else:  # through the logarithm and cosine of the device
                torch.testing.assert_close(*found)


@on_ranks(2)
def test_dropout_is_repeatable_and_leaves_the_generators_alone():
    mesh = line()
    x = dt.shard_tensor(torch.ones(8, 6, device="cuda"), mesh, [Shard(0)])
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    torch.manual_seed(5)
    before = torch.cuda.get_rng_state()
    first = F.dropout(x, 0.5)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    torch.manual_seed(5)
    assert torch.equal(first.to_local(), F.dropout(x, 0.5).to_local())
    torch.set_rng_state(states[0])
    torch.cuda.set_rng_state(states[1])
    whole = first.full_tensor()
    assert not torch.equal(whole[:4], whole[4:])  # shards draw other numbers
    same = F.dropout(dt.shard_tensor(torch.ones(8, 6, device="cuda"), mesh), 0.5)
    assert torch.equal(*dt.from_local(same.to_local(), mesh, [Shard(0)]).full_tensor().chunk(2))


@on_ranks(2)
def test_a_recomputed_dropout_draws_the_same():
    mesh = line()
    x = dt.shard_tensor(randn(8, 6), mesh, [Shard(0)]).requires_grad_()
    y = checkpoint(lambda x: F.dropout(x.sin(), 0.5).exp(), x, use_reentrant=False)
    y.sum().backward()
    kept = (y.detach() != 1).to(y.dtype)
    want = y.detach() * kept * 2 * x.detach().cos()
    compare(full(x.grad), full(want))


@on_ranks(2)
def test_initialization_and_sampling():
    mesh = line()
    dt.manual_seed(1)
    w = torch.nn.init.kaiming_uniform_(dt.empty(6, 4, mesh=mesh, placements=[Shard(0)]))
    assert w.device.type == "cuda" and 0 < float(w.abs().max().full_tensor()) < 2
    rows = dt.shard_tensor(torch.ones(6, 4, device="cuda"), mesh, [Shard(0)])
    picked = torch.multinomial(rows, 2)
    assert picked.shape == (6, 2)
