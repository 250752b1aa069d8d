"""torch's DeviceMesh and DTensor beside ProcessMesh and DistTensor: shared groups, the same
bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

import disttensor as dt
from disttensor import Partial, ProcessMesh, Replicate, Shard
from tests.support.layouts import S0, S1, P, R, counted, everywhere, grid, same
from tests.support.pool import on_ranks

TORCH = {
    R: TorchReplicate(), S0: TorchShard(0), S1: TorchShard(1), P: TorchPartial(),
    Partial("max"): TorchPartial("max"), Partial("min"): TorchPartial("min"),
    Partial("prod"): TorchPartial("product"), Partial("avg"): TorchPartial("avg"),
}  # fmt: skip
PAIRS = list(itertools.product([R, S0, S1, P], repeat=2))


@on_ranks(4)
def test_meshes_convert_both_ways_and_share_groups():
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    ours = ProcessMesh.from_device_mesh(theirs)
    assert ours is ProcessMesh([[0, 1], [2, 3]], ("rows", "columns"))
    for axis, name in enumerate(ours.dim_names):
        assert ours.group((axis,)).pg is theirs.get_group(name)
    fresh = ProcessMesh([[1, 0], [3, 2]], ("a", "b"))
    groups = [fresh.group((a,)).pg for a in range(2)]
    back = fresh.to_device_mesh()
    assert back.mesh.tolist() == [[1, 0], [3, 2]] and back.mesh_dim_names == ("a", "b")
    assert [back.get_group(a) for a in range(2)] == groups, (
        "groups that are there are not made anew"
    )
    assert fresh.to_device_mesh() is back and ProcessMesh.from_device_mesh(back) is fresh
    assert ours.to_device_mesh() == theirs
    unnamed = ProcessMesh.from_device_mesh(DeviceMesh("cpu", torch.arange(4)))
    assert unnamed.dim_names == ("d0",) and unnamed.ranks == (0, 1, 2, 3)
    assert ProcessMesh.from_device_mesh(theirs["columns"]) is ours["columns"]
    assert ours["rows"].to_device_mesh() == theirs["rows"]
    assert ProcessMesh.from_device_mesh(fresh["b"].to_device_mesh()) is fresh["b"]


@everywhere
@pytest.mark.parametrize("shape", [(5, 6), (4, 4), (3, 1), (0, 2)], ids=str)
def test_same_layout_same_bytes(shape):
    mesh = grid()
    device_mesh = mesh.to_device_mesh()
    plain = counted(*shape)
    for pair in PAIRS:
        theirs = [TORCH[p] for p in pair]
        x = dt.shard_tensor(plain, mesh, pair)
        d = dt.to_dtensor(x)
        assert (
            isinstance(d, DTensor)
            and d.placements == tuple(theirs)
            and d.shape == shape
            and d.stride() == x.stride()
        )
        assert d.to_local().data_ptr() == x.to_local().data_ptr() and d.device_mesh is device_mesh
        assert torch.equal(d.full_tensor(), plain)
        if not any(isinstance(p, Partial) for p in pair):
            theirs = distribute_tensor(plain, device_mesh, theirs, src_data_rank=None)
            y = dt.from_dtensor(theirs)
            assert y.placements == pair and y.process_mesh is mesh
            assert y.to_local().data_ptr() == theirs.to_local().data_ptr()
            assert torch.equal(y.to_local(), x.to_local()), "the same layout holds the same bytes"
            same(y, plain)


@everywhere
def test_all_reductions_translate():
    plain = counted(5, 6)
    for p, theirs in TORCH.items():
        d = dt.to_dtensor(dt.shard_tensor(plain, grid(), (p, R)))
        assert d.placements == (theirs, TorchReplicate())
        y = dt.from_dtensor(d)
        assert y.placements == (p, R)
        same(y, plain)


@everywhere
def test_gradients_flow_both_ways():
    plain, weight = counted(5, 6), counted(5, 6).sin()
    for pair in [(R, R), (S0, S1), (S1, R), (S0, S0), (P, S0), (S1, P), (P, P)]:
        x = dt.shard_tensor(plain, grid(), pair, requires_grad=True)
        d = dt.to_dtensor(x * 2)
        assert d.requires_grad
        (d.full_tensor() * weight).sum().backward()
        same(x.grad, 2 * weight)
        x.grad = None
        y = dt.from_dtensor(dt.to_dtensor(x * 3))
        (y * weight).sum().backward()
        same(x.grad, 3 * weight)
        if P in pair:
            continue
        theirs = distribute_tensor(
            plain, grid().to_device_mesh(), [TORCH[p] for p in pair], src_data_rank=None
        ).requires_grad_()
        (dt.from_dtensor(theirs) * weight).sum().backward()
        same(theirs.grad.full_tensor(), weight)


@everywhere
def test_what_the_other_side_cannot_say_is_an_error():
    x = dt.shard_tensor(counted(4, 4), grid(), (Shard(0, order=1), Shard(0, order=0)))
    with pytest.raises(ValueError, match="mesh order"):
        dt.to_dtensor(x)
    with pytest.raises(ValueError, match="'any'"):
        dt.to_dtensor(dt.shard_tensor(torch.ones(4, dtype=torch.bool), grid(), (Partial("any"), R)))
    with pytest.raises(TypeError, match="DistTensor"):
        dt.to_dtensor(torch.ones(3))
    with pytest.raises(TypeError, match="DTensor"):
        dt.from_dtensor(x)
    strided = torch.distributed.tensor.placement_types._StridedShard(0, split_factor=2)
    d = DTensor.from_local(
        torch.ones(1, 2), grid().to_device_mesh(), [strided, TorchShard(0)], run_check=False
    )
    with pytest.raises(ValueError, match=r"_StridedShard.* has no counterpart"):
        dt.from_dtensor(d)


@everywhere
def test_mixing_both_in_one_call_names_the_way_out():
    x = dt.shard_tensor(counted(4, 4), grid(), (S0, Replicate()))
    with pytest.raises(ValueError, match="from_dtensor"):
        x + dt.to_dtensor(x)
    with pytest.raises(ValueError, match="from_dtensor"):
        dt.to_dtensor(x) + x
    assert dist.is_initialized()


@on_ranks(4)
def test_ranks_that_do_not_ascend_are_refused_where_torch_would_join_them_wrongly():
    mesh = ProcessMesh([2, 0, 3, 1], ("x",))
    with pytest.raises(ValueError, match="order of ranks"):
        dt.to_dtensor(dt.shard_tensor(counted(5), mesh, (S0,)))
    theirs = distribute_tensor(
        counted(5), mesh.to_device_mesh(), [TorchShard(0)], src_data_rank=None
    )
    same(dt.from_dtensor(theirs), counted(5))
