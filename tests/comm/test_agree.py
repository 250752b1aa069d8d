"""Facts that all ranks share are compared where values of the ranks enter the program."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import disttensor as dt
from disttensor import Partial, ProcessMesh, Replicate, Shard
from disttensor.comm import compare_programs
from disttensor.comm.agree import agree
from disttensor.errors import MismatchError
from tests.support.layouts import grid, same
from tests.support.pool import on_ranks

R, S0 = Replicate(), Shard(0)


@on_ranks(4)
def test_a_fact_that_differs_is_an_error_on_all_ranks():
    rank, group = dist.get_rank(), grid().group((0, 1))
    assert agree("here", group, rank, dtype=torch.float32, shape=(2,)) == [0, 1, 2, 3]
    with pytest.raises(
        MismatchError, match=r"here: shape differs.*\(2,\) on ranks 0, 1, 3, \(1,\)"
    ):
        agree("here", group, dtype=torch.float32, shape=(1 if rank == 2 else 2,))
    with pytest.raises(MismatchError, match="the same calls in the same order"):
        agree("here" if rank else "there", group, dtype=torch.float32)


def entries(rank, mesh):
    """Calls in which one fact differs on rank 1, and the name of the fact."""
    odd, part = rank == 1, mesh["tp"]
    ones, alone = torch.ones(4), ProcessMesh([0, 1], ("x",))
    graph = (torch.ones(4, requires_grad=True) * 2).requires_grad_()
    leaf = torch.ones(4, requires_grad=odd)
    other = ones.double() if odd else ones
    bits = torch.zeros(4, dtype=torch.int32) if odd else ones
    longer = torch.ones(6 if odd else 4)
    for on in (mesh, part, alone):
        first = [S0, R][: on.ndim]
        yield "requires_grad", lambda on=on, how=first: dt.from_local(leaf, on, how)
        yield "requires_grad", lambda on=on, how=first: dt.from_local(leaf * 2, on, how)
        yield "dtype", lambda on=on, how=first: dt.from_local(other, on, how)
        for call in (dt.shard_tensor, dt.distribute_tensor):
            source = {"src_rank": 0} if call is dt.shard_tensor else {}
            for fact, data in (
                ("dtype", other), ("dtype", bits), ("shape", longer), ("requires_grad", leaf),
                ("shape", torch.ones(2, 4) if odd else torch.ones(4, 2)),
            ):  # fmt: skip
                yield fact, lambda c=call, d=data, o=on, h=first, s=source: c(d, o, h, **s)
        yield "src_rank", lambda on=on, how=first: dt.shard_tensor(ones, on, how, src_rank=int(odd))
    yield (
        "in_graph",
        lambda: dt.shard_tensor(graph if odd else leaf.detach().requires_grad_(), mesh, src_rank=0),
    )


@on_ranks(4)
def test_each_entry_names_the_fact_on_all_ranks_and_the_next_call_works():
    mesh, rank = dt.init_mesh((2, 2), ("dp", "tp")), dist.get_rank()
    for fact, call in entries(rank, mesh):
        # the other group of a sub-mesh makes the call with equal facts, unless the root compares
        found = ""
        try:
            call()
        except MismatchError as error:
            found = str(error)
        everyone = [None] * 4
        dist.all_gather_object(everyone, found)
        assert all(f"{fact} differs" in text for text in everyone[:2]), (fact, everyone)
        same(dt.shard_tensor(torch.arange(4.0), mesh, [S0, R]), torch.arange(4.0))


@on_ranks(2)
def test_requires_grad_of_a_piece_with_a_given_shape_is_recorded():
    mesh = ProcessMesh([0, 1], ("x",))
    texts = []
    for grad in (False, True):
        compare_programs.CALLS.clear()
        dt.from_local(torch.ones(2, requires_grad=grad), mesh, [S0], shape=(4,))
        dt.shard_tensor(torch.ones(2, requires_grad=grad), mesh, [S0])
        dt.zeros(4, mesh=mesh, requires_grad=grad)
        texts.append([n.call.words() for n in compare_programs.CALLS])
    for without, with_grad in zip(*texts, strict=True):
        assert "requires grad" in with_grad and "requires grad" not in without


@on_ranks(2)
def test_data_in_a_graph_that_go_to_fewer_ranks_have_a_gradient_on_all():
    rank = dist.get_rank()
    meshes = [ProcessMesh(ranks, ("x",)) for ranks in ([0], [1], [0, 1], [1, 0])]
    for mesh in [*meshes, dt.init_mesh((2, 1), ("a", "b"))["b"]]:
        for how in (R, S0, Partial()):
            w = torch.arange(3.0, requires_grad=True)
            x = dt.shard_tensor(w * 2, mesh, [how])
            assert x.requires_grad and not x.is_leaf
            (x * 3).sum().backward()
            same(w.grad, torch.full((3,), 6.0))
            same(dt.broadcast_value(x.detach()), torch.arange(3.0) * 2)
            with torch.no_grad():
                assert dt.reshard(w * 2, mesh, [how]).is_leaf
    assert rank == dist.get_rank()


@on_ranks(2)
def test_no_grad_and_other_dtypes_keep_leaves_leaves():
    mesh, small = ProcessMesh([0, 1], ("x",)), ProcessMesh([0], ("x",))
    w = torch.ones(4, requires_grad=True)
    for on in (mesh, small):
        with torch.no_grad():
            for options in ({}, {"shape": (4,)}, {"run_check": False}):
                x = dt.from_local(w, on, [R], **options)
                assert not x.requires_grad and x.is_leaf
        for kind in (torch.float32, torch.float64, torch.bfloat16):
            for data in (w, torch.nn.Parameter(w.detach())):
                for options in ({}, {"src_rank": 0}, {"check": True}):
                    x = dt.shard_tensor(data, on, [S0], dtype=kind, **options)
                    assert x.is_leaf and x.requires_grad and x.dtype is kind
                    assert isinstance(x, torch.nn.Parameter) == isinstance(data, torch.nn.Parameter)
    assert w.grad is None
