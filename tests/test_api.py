"""Making DistTensors, strict(), local_map: what they give on real ranks and in a world of one."""

from __future__ import annotations

import resource

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import disttensor as dt
from disttensor import Partial, ProcessMesh, Replicate, Shard
from tests.support.layouts import LAYOUTS, S0, S1, P, R, counted, everywhere, grid, same
from tests.support.pool import fake_world, on_ranks

# shard_tensor -------------------------------------------------------------------------------------


@pytest.mark.feature("Making them")
@everywhere
def test_shard_tensor_takes_what_torch_takes():
    mesh = grid()
    plain = counted(5, 6)
    for data in (
        plain,
        plain.numpy(),
        plain.tolist(),
        nn.Parameter(plain),
        dt.shard_tensor(plain, mesh),
    ):
        for layout in LAYOUTS:
            x = dt.shard_tensor(data, mesh, layout, dtype=torch.float64)
            assert x.placements == layout and x.local.shape == x.spec.local_shape
            assert isinstance(x, nn.Parameter) == isinstance(data, nn.Parameter)
            same(x, plain)
    x = dt.shard_tensor(plain, mesh, dims_mapping=[[1, 0], -1])
    assert x.dims_mapping == [[1, 0], -1] and x.partial_status == {}
    same(x, plain)
    x = dt.shard_tensor(plain, mesh, dims_mapping=[-1, 0], partial_status={1: "max"})
    assert x.placements == (S1, Partial("max")) and x.partial_status == {1: "max"}
    assert dt.shard_tensor(plain, mesh).placements == (R, R)
    assert (
        dt.shard_tensor(3.0, mesh).shape == ()
        and dt.shard_tensor([1, 2], mesh, (S0, R)).dtype == torch.int64
    )
    assert dt.shard_tensor(plain, mesh, (S0, R), requires_grad=True).requires_grad
    assert dt.shard_tensor(plain, mesh, (Shard(-1), R)).placements == (S1, R)


@everywhere
def test_a_leaf_gives_a_leaf_of_its_own_memory_and_a_result_stays_in_its_graph():
    plain = counted(5, 6)
    for layout in LAYOUTS:
        leaf = plain.clone().requires_grad_()
        x = dt.shard_tensor(leaf.detach(), grid(), layout)
        x.zero_()
        assert leaf[4, 5] == 30
        if not any(isinstance(p, Partial) and p.reduce_op == "max" for p in layout):
            (dt.shard_tensor(leaf * 2, grid(), layout) * 1.0).sum().backward()
            same(leaf.grad, torch.full((5, 6), 2.0, dtype=torch.float64))


@on_ranks(4)
def test_src_rank_decides_where_ranks_disagree():
    for src in range(4):
        for layout in [(R, R), (S0, S1), (S0, S0), (P, S1)]:
            mine = counted(5, 6) + 100 * dist.get_rank()
            same(dt.shard_tensor(mine, grid(), layout, src_rank=src), counted(5, 6) + 100 * src)
    mesh = ProcessMesh([2, 0, 3, 1], ("x",))
    same(
        dt.shard_tensor(torch.full((5,), dist.get_rank()), mesh, (S0,), src_rank=3),
        torch.full((5,), 3),
    )
    with pytest.raises(ValueError, match=r"src_rank=7 is not in"):
        dt.shard_tensor(torch.ones(4), mesh, (S0,), src_rank=7)


@on_ranks(4)
def test_check_names_the_rank_that_differs():
    data = counted(5, 6)
    same(dt.shard_tensor(data, grid(), (S0, R), check=True), data)
    if dist.get_rank() == 2:
        data[3, 3] += 1e-9
    with pytest.raises(
        ValueError, match=r"values of rank 2 differ from those of rank 0.*src_rank=0"
    ):
        dt.shard_tensor(data, grid(), (S0, R), check=True)
    data = counted(5, 6 if dist.get_rank() != 1 else 7)
    with pytest.raises(ValueError, match=r"shape or dtype of rank 1 differ"):
        dt.shard_tensor(data, grid(), (S0, R), check=True)
    torch.distributed.barrier()


# Born sharded -------------------------------------------------------------------------------------


NUMBERS = [
    np.float64(1.5), np.float16(2), np.int32(3), np.uint8(3), torch.tensor(3.0).double(),
    torch.tensor(1j), torch.tensor(True),
]  # fmt: skip


@everywhere
def test_factories():
    mesh = grid()
    for layout in [p for p in LAYOUTS if not any(isinstance(a, Partial) for a in p)]:
        same(dt.zeros(5, 6, mesh=mesh, placements=layout), torch.zeros(5, 6))
        same(
            dt.ones((5, 6), mesh=mesh, placements=layout, dtype=torch.int32),
            torch.ones(5, 6, dtype=torch.int32),
        )
        same(dt.full((5, 6), 3, mesh=mesh, placements=layout), torch.full((5, 6), 3))
        same(
            dt.full([5, 6], 2.5, mesh=mesh, placements=layout, requires_grad=True),
            torch.full((5, 6), 2.5),
        )
        same(dt.api.create.from_fn(torch.zeros, mesh, layout, (5, 6)), torch.zeros(5, 6))
        same(dt.api.create.from_fn(torch.full, mesh, layout, (5, 6), 7.0), torch.full((5, 6), 7.0))
        for value in NUMBERS:
            want = torch.full((5, 6), value)
            assert dt.full((5, 6), value, mesh=mesh, placements=layout).dtype is want.dtype
            same(dt.full((5, 6), value, mesh=mesh, placements=layout), want)
        x = dt.empty(torch.Size((5, 6)), mesh=mesh, placements=layout, dtype=torch.bfloat16)
        assert x.shape == (5, 6) and x.dtype == torch.bfloat16 and x.placements == layout
    assert dt.zeros(4, mesh=mesh).placements == (R, R) and dt.zeros((), mesh=mesh).shape == ()
    assert dt.api.create.from_fn(
        torch.ones, mesh, None, (3, 4), dims_mapping=[-1, 1]
    ).placements == (R, S1)
    with pytest.raises(ValueError, match=r"from_fn: .*pending"):
        dt.zeros(4, mesh=mesh, placements=(P, R))
    for make in (dt.zeros, dt.ones, dt.empty, dt.rand):
        with pytest.raises(TypeError, match="out"):
            make(4, mesh=mesh, out=torch.ones(4))


def test_factories_allocate_the_shard_only():
    with fake_world(4096, rank=77):
        mesh = ProcessMesh(torch.arange(4096).reshape(64, 64), ("dp", "tp"))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for make in (dt.zeros, dt.ones, dt.empty):
            x = make(1 << 20, 1 << 14, mesh=mesh, placements=(Shard(0), Shard(1)))
            assert x.nbytes == 64 << 30 and x.local.nbytes == 16 << 20
            x.add_(1)
            del x
        x = dt.full((1 << 20, 1 << 14), 2.0, mesh=mesh, placements=(Shard(0), Shard(0)))
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        assert x.local.shape == (256, 1 << 14) and peak < 128, f"{peak} MiB"


# from_local ---------------------------------------------------------------------------------------


@on_ranks(4)
def test_from_local_takes_uneven_pieces():
    plain = counted(5, 7)
    mesh = grid()
    for layout in LAYOUTS:
        piece = dt.shard_tensor(plain, mesh, layout).to_local()
        for shape in (None, (5, 7)):
            with dt.debugging.record_comms() as log:
                x = dt.from_local(piece, mesh, layout, shape=shape)
            assert x.placements == layout and len(log) == (shape is None)
            assert x.to_local().data_ptr() == piece.data_ptr()
            same(x, plain)
    line = ProcessMesh(range(4), ("x",))
    piece = torch.ones(2, 3)
    one, other = (dt.from_local(piece, line, [S0]) for _ in range(2))
    same_piece = dt.local_map(lambda x: piece, in_placements=([S0],), out_placements=[S0])(one)
    other.requires_grad_()
    assert not (piece.requires_grad or one.requires_grad or same_piece.requires_grad)
    sizes = [2, 2, 1, 0]
    x = dt.from_local(torch.full((sizes[dist.get_rank()], 3), 1.0), line, [S0])
    assert x.shape == (5, 3)
    with pytest.raises(
        ValueError, match=r"rank 1 has \[2, 3\], and \[1, 3\] is expected.*torch.chunk"
    ):
        dt.from_local(torch.ones([1, 2, 1, 0][dist.get_rank()], 3), line, [S0])
    with pytest.raises(ValueError, match=r"from_local"):
        dt.from_local(torch.ones(2, 3 + dist.get_rank()), line, [S0])
    with pytest.raises(ValueError, match=r"this rank's piece"):
        dt.from_local(torch.ones(9, 3), line, [S0], shape=(5, 3))


@everywhere
def test_from_local_and_to_local_keep_the_graph():
    plain = counted(5, 6)
    for layout in [(R, R), (S0, S1), (S0, S0), (P, S1)]:
        local = dt.shard_tensor(plain, grid(), layout).to_local().clone().requires_grad_()
        x = dt.from_local(local * 1, grid(), layout)
        y = x * 3
        assert y.to_local().requires_grad
        y.full_tensor().sum().backward()
        assert torch.equal(local.grad, torch.full_like(local, 3.0))


# reshard and full_tensor --------------------------------------------------------------------------


@everywhere
def test_reshard_and_full_tensor():
    plain = counted(5, 6)
    x = dt.shard_tensor(plain, grid(), (S0, S1), requires_grad=True)
    assert dt.reshard(x, grid(), (S0, S1)) is x
    y = dt.reshard(x, grid(), (R, S0))
    assert y.placements == (R, S0) and dt.reshard(x, dims_mapping=[-1, [0, 1]]).dims_mapping == [
        -1,
        [0, 1],
    ]
    full = y.full_tensor()
    assert type(full) is torch.Tensor and full.requires_grad
    (full * plain).sum().backward()
    same(x.grad, plain)
    same(dt.reshard(plain, grid(), (S1, R)), plain)
    assert torch.equal(x.detach().full_tensor(), plain)


# strict -------------------------------------------------------------------------------------------


@on_ranks(4)
def test_strict_refuses_silent_communication_and_fallback():
    mesh = grid()
    a, b = (
        dt.shard_tensor(counted(4, 4), mesh, (S0, R)),
        dt.shard_tensor(counted(4, 4), mesh, (S1, R)),
    )
    whole = dt.shard_tensor(counted(4, 4), mesh)
    with dt.debugging.strict(), dt.debugging.record_comms() as log:
        (a + a).sum(1)
        a + whole  # a slice costs nothing
        (a @ whole).relu()
        dt.reshard(b, mesh, (S0, R)) + a  # asked for
        with pytest.raises(
            dt.errors.StrictError,
            match=r"add.* at .*test_api.py:\d+: argument \d is f64\[4.*"
            r"implicit all_to_all of [\d,]+ bytes",
        ):
            a + b
        with pytest.raises(dt.errors.StrictError, match=r"test_api.py:\d+.*all_to_all.*bytes"):
            b.reshape(-1)
        with pytest.raises(dt.errors.StrictError, match=r"relu at .*all_reduce|reduce_scatter"):
            torch.relu(a.sum(0))
        with pytest.raises(
            dt.errors.StrictError, match=r"histc.* at .*test_api.py:\d+ has no rule.*bytes"
        ):
            torch.histc(a)
        for ask in (lambda: a.full_tensor(), lambda: a.to_local(), lambda: repr(a)):
            ask()
        with pytest.raises(dt.errors.StrictError), dt.debugging.strict():
            a.clone().add_(b)
        with pytest.raises(dt.errors.StrictError):
            a + b
    assert [r.kind for r in log] == ["all_to_all", "all_gather"]
    a + b
    with dt.debugging.strict():
        pass


# local_map ----------------------------------------------------------------------------------------


@everywhere
def test_local_map_is_differentiable():
    mesh = grid()
    plain, weight = counted(5, 6).sin(), counted(6, 3).cos()
    for layout, kind in [
        ((S0, R), (S0, R)),
        ((S0, S0), (S0, S0)),
        ((S1, R), (P, R)),
        ((R, R), (R, R)),
        ((S0, S1), (S0, P)),
    ]:
        x = dt.shard_tensor(plain, mesh, requires_grad=True)
        w = dt.shard_tensor(weight, mesh, requires_grad=True)
        cut = tuple(S0 if p == S1 else R for p in layout)  # the dim that is summed over
        f = dt.local_map(
            lambda a, b: torch.tanh(a) @ b, in_placements=(layout, cut), out_placements=kind
        )
        y = f(x, w)
        assert y.placements == kind and y.shape == (5, 3)
        y.square().sum().backward()
        p, q = plain.clone().requires_grad_(), weight.clone().requires_grad_()
        z = torch.tanh(p) @ q
        z.square().sum().backward()
        same([y, x.grad, w.grad], [z, p.grad, q.grad])


@everywhere
def test_local_map_several_results_keywords_and_plain_tensors():
    mesh = grid()
    plain = counted(5, 6)
    x = dt.shard_tensor(plain, mesh, (S0, R), requires_grad=True)
    p = torch.ones(6, dtype=torch.float64, requires_grad=True)

    def fn(a, k, *, scale):
        assert type(a) is torch.Tensor and type(k) is torch.Tensor
        return a * k, (a * scale).sum(), 5.0

    f = dt.local_map(fn, in_placements=(None, None), out_placements=[(S0, R), (P, R), None])
    y, s, number = f(x, p, scale=2.0)
    assert number == 5.0
    same(y, plain)
    same(s, 2 * plain.sum())
    (y.sum() + s).backward()
    same(x.grad, torch.full((5, 6), 3.0, dtype=torch.float64))
    same(p.grad, plain.sum(0))
    shaped = dt.local_map(lambda a: a * 2, out_placements=(S0, R), out_shapes=(5, 6))
    with dt.debugging.record_comms() as log:
        same(shaped(x).local, 2 * x.detach().local)
    assert len(log) == 0


@on_ranks(4)
def test_local_map_in_grad_placements():
    """The user's backward reduces by itself, so the gradient of the replicated weight arrives
    whole."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, w):
            ctx.save_for_backward(a, w)
            return a * w

        @staticmethod
        def backward(ctx, g):
            a, w = ctx.saved_tensors
            own = (g * a).sum(0)
            dist.all_reduce(own, group=dist.group.WORLD)
            return g * w, own / 2  # tp holds copies

    plain, weight = counted(5, 6), counted(6)
    x = dt.shard_tensor(plain, grid(), (S0, R), requires_grad=True)
    w = dt.shard_tensor(weight, grid(), requires_grad=True)
    f = dt.local_map(
        Scale.apply,
        in_placements=((S0, R), (R, R)),
        out_placements=(S0, R),
        in_grad_placements=(None, (R, R)),
    )
    f(x, w).sum().backward()
    assert w.grad.placements == (R, R)
    same([x.grad, w.grad], [weight.expand(5, 6), plain.sum(0)])


@everywhere
def test_local_map_says_what_is_wrong():
    x = dt.shard_tensor(counted(5, 6), grid(), (S0, R))
    with pytest.raises(TypeError, match="out_placements"):
        dt.local_map(torch.sin)
    with pytest.raises(ValueError, match="no argument is a DistTensor"):
        dt.local_map(torch.sin, out_placements=(R, R))(torch.ones(3))
    with pytest.raises(ValueError, match="in_grad_placements has 2 entries, the call has 1 tensor"):
        dt.local_map(torch.sin, out_placements=(R, R), in_grad_placements=(None, None))(x)
    with pytest.raises(ValueError, match="in_placements has 2 entries, the call has 1"):
        dt.local_map(torch.sin, in_placements=((S0, R), (R, R)), out_placements=(S0, R))(x)
    with pytest.raises(ValueError, match="gave 1 results, out_placements describes 2"):
        dt.local_map(lambda a: [a], out_placements=[(S0, R), (R, R)])(x)
    with pytest.raises(ValueError, match="2 axes"):
        dt.local_map(torch.sin, out_placements=(Replicate(),))(x)
    with pytest.raises(ValueError, match="2 axes"):
        dt.local_map(torch.sin, in_placements=(Shard(0),), out_placements=(S0, R))(x)
    with pytest.raises(TypeError, match="result 0 of fn is int, no tensor"):
        dt.local_map(lambda a: 3, out_placements=(R, R))(x)
