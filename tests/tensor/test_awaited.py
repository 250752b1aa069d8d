"""A reshard within a mesh begins where it is called, and is waited for where its result is read:
what happens in which order, and that nothing else changes."""

from __future__ import annotations

import copy
import gc
import io
import threading
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import DistTensor, Partial, Replicate, Shard, runtime
from disttensor.comm import collectives, groups
from disttensor.errors import CommError
from disttensor.tensor.awaited import Awaited, PendingLocal
from tests.support import pool
from tests.support.blocking import Blocking
from tests.support.oracle import grid, line, place, randn
from tests.support.part import part
from tests.support.pool import fake_world, on_ranks, run_on_ranks

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PAIRS = [(S0, R), (S1, R), (P, R), (P, S0), (P, S1), (S0, S1), (S1, S0)]
NAMES = ["S0-R", "S1-R", "P-R", "P-S0", "P-S1", "S0-S1", "S1-S0"]
SHAPES = [(512, 384), (511, 383), (2, 140_001), (140_001, 1)]  # the last two: empty pieces


@contextmanager
def events():
    """What begins in the background and what is waited for, in order."""
    seen, start, wait = [], collectives.start, PendingLocal.wait

    def started(kind, *args, **options):
        seen.append(kind)
        return start(kind, *args, **options)

    def waited(arrival):
        if arrival.work is not None:
            seen.append("wait")
        return wait(arrival)

    waits = mock.patch.object(PendingLocal, "wait", waited)
    with mock.patch.object(collectives, "start", started), waits:
        yield seen


def both_ways(run):
    """With reshards that are waited for where they are read, and where they are called."""
    later = run()
    with Blocking():
        return later, run()


def source(layout=P, shape=(512, 384), seed=0, mesh=None, **options):
    mesh = mesh or line()
    placements = layout if isinstance(layout, list) else [layout, R][: mesh.ndim]
    return place(randn(*shape, seed=seed, **options), mesh, placements)


# What it gives ------------------------------------------------------------------------------------


def bits(src, dst, shape, dtype, mesh):
    """Values, gradients and what was sent, of a source that is written to at once."""
    leaf = source(src, shape, mesh=mesh, dtype=dtype).requires_grad_()
    x = leaf * 1.5
    weight = source(R, shape, seed=1, mesh=mesh, dtype=dtype)
    with dt.debugging.record_comms() as log:
        y = dt.reshard(x, mesh, [dst, R][: mesh.ndim])
        x.detach().zero_()
        z = (y * weight).abs().sum()
        z.backward()
        plain = dt.reshard(leaf.detach(), mesh, [dst, R][: mesh.ndim])
        out = plain.to_local()
        plain.mul_(2)  # nobody else has its memory
    sent = [(r.kind, r.axis, r.bytes, r.phase) for r in log]
    return y.to_local(), out, leaf.grad.to_local(), z.full_tensor(), sent


def check_bits(src, dst, mesh_of):
    for shape in SHAPES:
        for dtype in (torch.float32, torch.float64, torch.complex64):
            later, now = both_ways(lambda: bits(src, dst, shape, dtype, mesh_of()))
            assert all(map(torch.equal, later[:-1], now[:-1])), (shape, dtype)
            assert later[-1] == now[-1]


@pytest.mark.parametrize("pair", PAIRS, ids=NAMES)
@on_ranks(2)
def test_bits_on_two_ranks(pair):
    check_bits(*pair, line)


@pytest.mark.parametrize("name", part(NAMES, 3, "four"))
@on_ranks(4, timeout=120)
def test_bits_on_four_ranks(name):
    check_bits(*PAIRS[NAMES.index(name)], line)


@pytest.mark.parametrize("name", part(NAMES, 3, "grid"))
@on_ranks(4, timeout=120)
def test_bits_on_an_axis_of_a_grid(name):
    check_bits(*PAIRS[NAMES.index(name)], grid)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool], ids=str)
@on_ranks(2)
def test_bits_of_other_dtypes(dtype):
    for src, dst in PAIRS:
        op = Partial("any") if dtype == torch.bool else src

        def run(src=src, dst=dst, op=op):
            full = randn(511, 1023).mul(4).to(dtype)
            x = place(full, line(), [op if src == P else src])
            y = dt.reshard(x, line(), [dst])
            x.zero_()
            return y.to_local()

        assert torch.equal(*both_ways(run)), (src, dst)


# When ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_it_is_waited_for_by_the_next_call_on_it():
    x = source()
    with events() as seen:
        y = dt.reshard(x, line(), [R])
        assert type(y) is Awaited and isinstance(y, DistTensor)
        x.sin().sum()
        seen.append("computed")
        assert y.shape == x.shape and y.placements == (R,) and y.dtype == x.dtype
        assert y.device == x.device and not y.requires_grad and y.is_leaf and y.grad_fn is None
        seen.append("asked")
        z = y + 1
    assert seen == ["all_reduce", "computed", "asked", "wait"]
    assert type(y) is DistTensor and type(z) is DistTensor
    with pytest.raises(AttributeError, match="'DistTensor' object has no attribute 'cheese'"):
        dt.reshard(x, line(), [R]).cheese  # noqa: B018


@on_ranks(2)
def test_several_are_under_way_and_a_rank_waits_in_its_own_order():
    """Two of one communicator, one that is waited for at once behind them, and one more."""
    xs = [source(layout, seed=i) for i, layout in enumerate((P, S0, P, S1))]
    with events() as seen:
        ys = [dt.reshard(x, line(), [R]) for x in xs[:3]]
        total = dt.reshard(xs[0].sum(), line(), [R]).item()  # a small one
        ys.append(dt.reshard(xs[3], line(), [R]))
        for i in range(4) if dist.get_rank() else range(3, -1, -1):
            ys[i].to_local()
    assert seen == ["all_reduce", "all_gather", "all_reduce", "all_gather", *["wait"] * 4]
    for x, y in zip(xs, ys, strict=True):
        assert torch.equal(y.to_local(), x.full_tensor())
    assert abs(total - xs[0].full_tensor().sum().item()) < 1e-6


@on_ranks(2)
def test_what_is_dropped_unread_is_waited_for():
    x = source()
    with events() as seen:
        y = dt.reshard(x, line(), [R])
        del y
        assert seen == ["all_reduce", "wait"]
        for _ in range(20):  # each of them while others wait for their turn
            dt.reshard(x, line(), [R])
        gc.collect()
    assert seen.count("wait") == 21


@on_ranks(2)
def test_what_is_recorded_says_where_it_was_waited_for():
    x = source()
    with dt.debugging.record_comms() as log:
        y = dt.reshard(x, line(), [R])
        assert log[0].background and log[0].waited == ""
        y.sum()
    begun, waited = log[0].where.rsplit(":", 1), log[0].waited.rsplit(":", 1)
    assert begun[0] == waited[0] and int(waited[1]) == int(begun[1]) + 2
    assert "forward, overlapped" in str(log) and f"waited for at {log[0].waited}" in str(log)


@on_ranks(2)
def test_small_ones_are_waited_for_Blocking():
    with events() as seen:
        y = dt.reshard(source(shape=(5, 3)), line(), [R])
    assert type(y) is DistTensor and seen == []


@pytest.mark.parametrize("shape", [(5, 3), (512, 384)], ids=str)
@pytest.mark.parametrize("pair", [(R, S0), *PAIRS], ids=["R-S0", *NAMES])
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks(2)
def test_the_result_has_memory_of_its_own(pair, shape, ranks):
    """On an axis of one rank too, where both layouts are the same memory."""
    mesh = dt.ProcessMesh(torch.arange(2).view(-1, ranks), ("a", "b"))
    x = place(randn(*shape), mesh, (R, pair[0]))
    before = x.full_tensor().clone()
    dt.reshard(x, mesh, (R, pair[1])).to_local().fill_(7)
    assert torch.equal(x.full_tensor(), before)


def test_what_begins_in_the_background():
    """One collective; over gloo a reduce-scatter would be another one, which adds up in another
    order."""
    with fake_world(4):
        mesh = dt.ProcessMesh([[0, 1], [2, 3]], ("dp", "tp"))

        def kind(*pair):
            return type(dt.reshard(source(pair[0], mesh=mesh), mesh, pair[1]))

        assert kind([P, P], [R, R]) is kind([S0, R], [R, R]) is kind([S0, R], [S1, R]) is Awaited
        assert kind([P, S0], [R, R]) is kind([R, R], [S0, R]) is kind([R, R], [P, R]) is DistTensor
        assert kind([P, R], [R, R]) is Awaited and kind([R, R], [R, R]) is DistTensor
        runtime.current_runtime().stands_for = "gloo"
        assert kind([P, R], [S0, R]) is kind([R, P], [R, S1]) is DistTensor
        runtime.current_runtime().stands_for = "nccl"
        assert kind([P, R], [S0, R]) is kind([R, P], [R, S1]) is Awaited


# By which ways ------------------------------------------------------------------------------------


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def saved(y):
    file = io.BytesIO()
    torch.save(y.detach(), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def hooked(y):
    seen, layer = [], nn.Identity()
    layer.register_full_backward_hook(lambda _, given, out: seen.append(out[0].full_tensor()))
    layer(y).sum().backward()
    return seen[0]


def of_hook(y):
    seen = []
    y.register_hook(lambda g: seen.append(g.full_tensor()))
    y.square().sum().backward()
    return seen[0]


def kept(y):
    y.retain_grad()
    y.square().sum().backward()
    return y.grad


def put(y):
    p = dt.zeros(*y.shape, mesh=y.process_mesh, dtype=y.dtype, requires_grad=True)
    p.grad = y.detach()
    p.data = dt.reshard(y.detach() * 1, y.process_mesh, y.placements)
    return p.grad + p


def resorted(y):
    split = dt.reshard(dt.reshard(y, y.process_mesh, [S0]), y.process_mesh, [S1])
    assert type(split) in (Awaited, DistTensor)
    return split.sort(1)[0]


def compiled(y):
    return torch.compile(lambda t: t.relu().sum() * 2, backend="eager")(y)


WAYS = {
    "a method": lambda y: y.sin(),
    "an operator": lambda y: 2 - y,
    "torch's function": lambda y: torch.add(y, y),
    "the second argument": lambda y: torch.ones_like(y.detach()) @ y.transpose(0, 1),
    "in a list": lambda y: torch.cat([y, y * 2]),
    "a keyword": lambda y: torch.where(y > 0, input=y, other=0.0),
    "a slice": lambda y: y[1:3, ::2],
    "a view": lambda y: y.view(-1).T,
    "several": lambda y: y.chunk(2)[1],
    "in place": lambda y: y.add_(1),
    "written by index": lambda y: y.detach().fill_(2) + y,
    "detach": lambda y: y.detach(),
    "clone": lambda y: y.clone(),
    "to_local": lambda y: y.to_local(),
    "full_tensor": lambda y: y.full_tensor(),
    "numpy": lambda y: torch.from_numpy(y.detach().numpy()),
    "item": lambda y: torch.tensor(y.sum().item()),
    "bool": lambda y: torch.tensor(bool((y > 0).any())),
    "repr": lambda y: (repr(y), y)[1],
    "format": lambda y: (f"{y}", y)[1],
    "deepcopy": lambda y: copy.deepcopy(y.detach()),
    "pickle": saved,
    "iteration": lambda y: next(iter(y)),
    "once more": lambda y: dt.reshard(y, y.process_mesh, [S1]),
    "back": lambda y: dt.reshard(dt.reshard(y, y.process_mesh, [S0]), y.process_mesh, [R]),
    "a call that reshards": resorted,
    "local_map": lambda y: dt.local_map(torch.sin, in_placements=[[R]], out_placements=[R])(y),
    "custom function": lambda y: Twice.apply(y),
    "checkpoint": lambda y: checkpoint(lambda t: t.sin() * t, y, use_reentrant=False),
    "backward hook": hooked,
    "tensor hook": of_hook,
    "retain_grad": kept,
    "gradient and data": put,
    "torch.compile": compiled,
    "replay": lambda y: [f := dt.replay(lambda t: t.sin() * 2), f(y), f(y)][-1],
    "autograd.grad": lambda y: torch.autograd.grad(y.square().sum(), y)[0],
    "backward of it": lambda y: (y.backward(torch.ones_like(y.detach())), y.detach())[1],
    "no_grad": lambda y: torch.no_grad()(torch.sin)(y),
    "requires_grad_": lambda y: y.detach().requires_grad_(),
    "strides": lambda y: torch.tensor(y.stride()),
    "memory": lambda y: (y.data_ptr(), y.untyped_storage(), y)[2],
    "zeros_like": lambda y: torch.zeros_like(y),
}


def whole(value):
    return value.full_tensor() if isinstance(value, DistTensor) else value


@pytest.mark.filterwarnings("ignore:Twice.apply")  # it is gathered for
@pytest.mark.filterwarnings("ignore:torch.compile ends its graph")
@pytest.mark.parametrize("name", WAYS)
@on_ranks(2)
def test_ways_to_read(name):
    """Right after the reshard, forward and backward; once more with plans that are known."""

    def run(layout):
        leaf = source(layout, (512, 256), dtype=torch.float32).requires_grad_()
        y = dt.reshard(leaf * 1, line(), [R])
        out = WAYS[name](y)
        assert type(y) is DistTensor
        if isinstance(out, torch.Tensor) and out.requires_grad and out.grad_fn is not None:
            out.square().sum().backward()
        return whole(out), leaf.grad.full_tensor() if leaf.grad is not None else torch.ones(1)

    for layout in (S0, P):
        later, now = both_ways(lambda: run(layout))
        assert all(map(torch.equal, later, now)), layout
        assert all(map(torch.equal, run(layout), now)), layout


@on_ranks(2)
def test_explain_takes_one():
    y = dt.reshard(source(), line(), [R])
    assert "by rule" in str(dt.debugging.explain(torch.sin, y))


@on_ranks(2)
def test_in_the_middle_of_a_program_with_checkpoints():
    """Sequence parallelism by hand, computed again in the backward."""

    def run():
        x = source(S0, (512, 384)).requires_grad_()
        w = source(S0, (64, 384), seed=1).requires_grad_()

        def part(t):
            whole = dt.reshard(t.tanh(), line(), [R])
            other = t.sin()
            out = torch.nn.functional.linear(whole, w)
            back = dt.reshard(out @ w, line(), [S0])
            return other.cos() + back

        out = checkpoint(part, checkpoint(part, x, use_reentrant=False), use_reentrant=False)
        out.square().mean().backward()
        return out.to_local(), x.grad.to_local(), w.grad.to_local()

    later, now = both_ways(run)
    assert all(map(torch.equal, later, now))


@on_ranks(2)
def test_second_derivatives():
    def run():
        x = source(S1).requires_grad_()
        y = dt.reshard(x.sin(), line(), [R])
        (g,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        g.square().sum().backward()
        return x.grad.to_local()

    assert torch.equal(*both_ways(run))


@on_ranks(2)
def test_modes_where_it_begins_and_where_it_is_read():
    """What ends it writes to memory that was made in the mode where it began."""
    for src, dst in PAIRS:
        x = source(src)
        for begins in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            for reads in (torch.inference_mode, torch.no_grad, torch.enable_grad):
                with begins():
                    y = dt.reshard(x, line(), [dst])
                with reads():
                    z = y * 2
                assert torch.equal(z.full_tensor(), x.full_tensor() * 2)


@on_ranks(2)
def test_two_threads_read_one():
    for seed in range(5):
        x = source(S1, seed=seed)
        y, found = dt.reshard(x, line(), [R]), []
        ready = threading.Barrier(2)

        def read(y=y, found=found, ready=ready):
            ready.wait()
            found.append(y.to_local().clone())

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.equal(*found) and torch.equal(found[0], x.full_tensor())


@on_ranks(2)
def test_a_module_on_its_way():
    """A parameter, a buffer and an attribute that are results of reshards."""

    def run():
        layer = nn.Linear(384, 512, bias=False, dtype=torch.float64)
        layer.weight = nn.Parameter(dt.reshard(source(S0), line(), [R]))
        layer.register_buffer("scale", dt.reshard(source(S1, seed=2), line(), [R]))
        layer.register_forward_pre_hook(lambda m, args: (args[0] * m.scale,))
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(dt.reshard(source(S0, seed=1), line(), [R])).square().mean().backward()
        optimizer.step()
        return layer.weight.to_local(), layer.state_dict()["scale"].to_local()

    later, now = both_ways(run)
    assert all(map(torch.equal, later, now))


@on_ranks(2)
def test_under_debug_ranks_compare_it_where_it_begins():
    with dt.debugging.compare_ranks(seconds=20):
        y = dt.reshard(source(), line(), [R])
        assert type(y) is Awaited
        assert torch.equal(y.full_tensor(), source().full_tensor())


# When it goes wrong -------------------------------------------------------------------------------


def lose_a_rank():
    mesh = dt.ProcessMesh([0, 1], ("pair",))
    x = place(randn(512, 384), mesh, [P])
    dt.reshard(x, mesh, [R]).to_local()
    dist.barrier()
    if dist.get_rank() == 1:
        return "away"
    groups.set_timeout(timedelta(seconds=1), mesh.group((0,)).pg)
    y = dt.reshard(x, mesh, [R])
    for read in (lambda: y + 1, y.to_local, lambda: y.local):
        with pytest.raises(CommError) as caught:
            read()
    return str(caught.value)


def test_an_error_is_raised_where_it_is_read_and_names_the_ranks():
    try:
        message, _ = run_on_ranks(2, lose_a_rank)
    finally:
        pool.stop(2)  # its ranks are out of step now
    assert "all_reduce over mesh axes pair (ranks [0, 1]) failed on rank 0" in message


def end_the_world(rank, file):
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    x = source(P, (4096, 1024), mesh=dt.ProcessMesh([0, 1], ("pair",)))
    want = x.full_tensor()
    y = dt.reshard(x, x.process_mesh, [R])
    dropped = dt.reshard(x, x.process_mesh, [R])
    dist.destroy_process_group()
    assert torch.equal(y.to_local(), want)
    del dropped


def test_the_process_group_may_go_while_one_is_under_way(tmp_path):
    torch.multiprocessing.spawn(end_the_world, (str(tmp_path / "store"),), nprocs=2)
