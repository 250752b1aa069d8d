"""ProcessMesh and DistSpec: places, names, groups, and their torch counterparts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from disttensor.comm import collectives
from disttensor.comm.process_group import world
from disttensor.core.init_mesh import init_mesh
from disttensor.core.layout import layout_of
from disttensor.core.mesh import ProcessMesh
from disttensor.core.placement import Partial, Replicate, Shard
from disttensor.core.spec import DistSpec
from tests.support.pool import fake_world, on_ranks

R, S, P = Replicate(), Shard, Partial


@pytest.fixture
def eight() -> Iterator[None]:
    with fake_world(8, rank=3):
        yield


def test_equal_meshes_are_one_object(eight):
    a = ProcessMesh([[0, 1], [2, 3]], ("dp", "tp"))
    assert ProcessMesh(torch.arange(4).reshape(2, 2), ["dp", "tp"]) is a
    assert ProcessMesh(np.arange(4).reshape(2, 2), ("dp", "tp")) is a
    assert ProcessMesh([[0, 1], [2, 3]], ("x", "y")) is not a
    assert ProcessMesh([[0, 2], [1, 3]], ("dp", "tp")) is not a
    for same in (copy.copy(a), copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        assert same is a


def test_what_a_mesh_knows(eight):
    mesh = ProcessMesh([[6, 3, 0], [1, 7, 2]], ("dp", "tp"))
    assert (mesh.shape, mesh.ndim, mesh.size) == ((2, 3), 2, 6)
    assert mesh.process_ids == [6, 3, 0, 1, 7, 2] and mesh.mesh.tolist() == [[6, 3, 0], [1, 7, 2]]
    assert mesh.coordinate == (0, 1)
    assert mesh.coordinate_of(7) == (1, 1) and mesh.coordinate_of(5) is None
    assert [mesh.axis(a) for a in ("dp", "tp", 0, -1)] == [0, 1, 0, 1]
    assert mesh.members((1,), (0, 1)) == [(0, 0), (0, 1), (0, 2)]
    assert mesh.members((1, 0), (0, 0))[:3] == [(0, 0), (1, 0), (0, 1)]
    assert [mesh.coordinate_of(r) for r in mesh.ranks] == mesh.coordinates()
    assert repr(mesh) == "ProcessMesh(dp=2, tp=3, ranks=[[6, 3, 0], [1, 7, 2]])"
    assert repr(ProcessMesh(range(8))) == "ProcessMesh(d0=8)"


def test_a_rank_outside(eight):
    mesh = ProcessMesh([4, 5], ("pp",))
    assert mesh.coordinate is None
    with pytest.raises(ValueError, match=r"rank 3 is not in ProcessMesh\(pp=2"):
        mesh.group((0,))
    with pytest.raises(ValueError, match="index by number"):
        mesh["pp"]
    spec = DistSpec(mesh, layout_of([S(0)], 2, 1), (5, 3), torch.float32)
    assert spec.local_shape == (0,) and spec.shape == (5, 3)
    assert spec.box_at((1,)) == ((3, 0), (2, 3))


def test_parts_of_a_mesh(eight):
    mesh = ProcessMesh(torch.arange(8).reshape(2, 2, 2), ("pp", "dp", "tp"))
    assert mesh["tp"].ranks == (2, 3) and mesh["pp"].ranks == (3, 7)
    assert mesh["dp", "tp"].mesh.tolist() == [[0, 1], [2, 3]]
    assert mesh["tp", "dp"].mesh.tolist() == [[0, 2], [1, 3]]
    assert mesh[1] is ProcessMesh([[4, 5], [6, 7]], ("dp", "tp"))
    assert mesh[:, 1] is ProcessMesh([[2, 3], [6, 7]], ("pp", "tp"))
    assert mesh[0, :, 1] is ProcessMesh([1, 3], ("dp",))
    assert mesh[..., 0] is ProcessMesh([[0, 2], [4, 6]], ("pp", "dp"))
    assert mesh[:1].shape == (1, 2, 2)
    assert mesh[0, 1, 1].ranks == (3,)
    with pytest.raises(ValueError, match="has no axis 'ep'; its axes are pp, dp, tp"):
        mesh["ep"]


@pytest.mark.parametrize(
    ("ranks", "names", "words"),
    [
        ([0, 0], None, "rank 0 occurs twice"),
        ([0, 9], None, r"ranks \[9\] are outside the world, which has ranks 0 to 7"),
        ([-1, 0], None, r"ranks \[-1\] are outside"),
        ([[0, 1]], ("dp",), "2 axes need as many different names"),
        ([[0, 1]], ("dp", "dp"), "different names"),
        ([[], []], None, "holds no rank"),
    ],
)
def test_meshes_that_are_refused(eight, ranks, names, words):
    with pytest.raises(ValueError, match=words):
        ProcessMesh(ranks, names)


def test_without_a_process_group_the_world_is_one():
    mesh = ProcessMesh([0], ("dp",))
    assert mesh.coordinate == (0,) and mesh.group((0,)).size == 1
    with pytest.raises(ValueError, match="call init_mesh first"):
        ProcessMesh([0, 1])


def test_a_new_world_makes_new_meshes():
    with fake_world(2):
        first = ProcessMesh([0, 1])
        group = first.group((0,))
    with fake_world(2):
        second = ProcessMesh([0, 1])
        assert second is not first and second.group((0,)).pg is not group.pg


def test_specs_are_interned(eight):
    mesh = ProcessMesh([[0, 1], [2, 3]], ("dp", "tp"))
    spec = DistSpec(mesh, layout_of([S(0), P()], 2, 2), (5, 3), torch.float32)
    assert DistSpec(mesh, layout_of([S(0), P()], 2, 2), [5, 3], torch.float32) is spec
    assert spec.with_dtype(torch.float32) is spec.with_layout(spec.layout) is spec
    half = spec.with_dtype(torch.float16)
    assert half is not spec and half.with_dtype(torch.float32) is spec
    assert spec.with_placements([S(0), R]).placements == (S(0), R)
    assert repr(spec) == "f32[5@dp, 3] {tp: P(sum)}"
    assert (spec.ndim, spec.nbytes) == (2, 60)
    for same in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert same is spec


def test_local_shape_and_offset_of_this_rank(eight):
    mesh = ProcessMesh([[0, 1], [2, 3]], ("dp", "tp"))  # this is rank 3, at (1, 1)
    spec = DistSpec(mesh, layout_of([S(0), S(0)], 2, 2), (5, 3), torch.float32)
    assert (spec.local_box.offset, spec.local_shape) == ((4, 0), (1, 3))
    assert [spec.box_at(c)[1][0] for c in mesh.coordinates()] == [2, 1, 1, 1]


@on_ranks(4)
def test_groups_follow_the_mesh():
    mesh = ProcessMesh([[3, 1], [0, 2]], ("dp", "tp"))
    i, j = mesh.coordinate
    dp, tp, both = mesh.group((0,)), mesh.group((1,)), mesh.group((0, 1))
    assert dp.ranks == tuple(mesh.mesh[:, j]) and dp.index == i
    assert tp.ranks == tuple(mesh.mesh[i]) and tp.index == j
    assert both.ranks == (3, 1, 0, 2) and both.index == 2 * i + j and not both.in_rank_order
    assert mesh.group([0]) is dp and both.pg is not dist.group.WORLD  # which is the user's
    rank = torch.tensor([world()[0]])
    for group in (dp, tp, both, mesh.group((1, 0))):
        assert collectives.all_gather(rank, group).view(-1).tolist() == list(group.ranks)


@on_ranks(4)
def test_groups_of_equal_ranks_are_shared():
    mesh = ProcessMesh([[0, 1], [2, 3]], ("dp", "tp"))
    renamed = ProcessMesh([[0, 1], [2, 3]], ("x", "y"))
    assert mesh.group((1,)).pg is renamed.group((1,)).pg is mesh["tp"].group((0,)).pg
    assert renamed.group((1,)).axes == ("y",)


@on_ranks(4)
def test_device_mesh_there_and_back():
    names = ("there", "back")  # of no other test: a mesh keeps the groups that it has
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    mesh = ProcessMesh.from_device_mesh(theirs)
    assert mesh is ProcessMesh([[0, 1], [2, 3]], names)
    for axis in range(2):
        assert mesh.group((axis,)).pg is theirs.get_group(axis)
    assert collectives.all_reduce(torch.ones(2), "sum", mesh.group((1,))).tolist() == [2, 2]
    odd = ProcessMesh([[3, 1], [0, 2]], ("a", "b"))
    back = odd.to_device_mesh()
    assert back.mesh.tolist() == [[3, 1], [0, 2]] and back.mesh_dim_names == ("a", "b")
    assert odd.to_device_mesh() is back and ProcessMesh.from_device_mesh(back) is odd


def test_a_missing_device_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch finds no CUDA device"):
        init_mesh((1,), device_type="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@on_ranks(2)
def test_cuda_without_a_device_is_refused_also_in_a_world_that_exists():
    with pytest.raises(RuntimeError, match="torch finds no CUDA device"):
        init_mesh((2,), device_type="cuda")
