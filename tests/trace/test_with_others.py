"""Replay beside the rest: activation checkpointing, micro-batches, pipelines, sharded state, ranks
outside a mesh, the torch of other tools."""

from __future__ import annotations

import functools
import random
import threading
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import Replicate, Shard, pipeline
from disttensor.debugging import strict
from disttensor.trace.replay import Replay
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.trace.test_replay import MLP, TP, Attention, fed, mesh_of
from tests.trace.twins import bits

R, S0, S1 = Replicate(), Shard(0), Shard(1)
TWO = {"up.*": [R, S0], "down.weight": [R, S1]}


def compare(run, *kinds):
    """``run(fast)`` gives the same bits with replay and without; how many calls were replays."""
    found = []
    for fast in (False, True):
        dt.manual_seed(2)
        torch.manual_seed(2)
        with dt.debugging.record_comms() as log:
            found.append(run(dt.replay if fast else lambda m: m))
        found[-1] += (len(log), log.total_bytes)
    assert found[0] == found[1]


def whys(net: nn.Module) -> tuple[int, list[str]]:
    """Replays and reasons of all in ``net``."""
    put = [m.__dict__["forward"] for m in net.modules() if "forward" in m.__dict__]
    replays = sum(f.replays for f in put if isinstance(f, Replay))
    return replays, sorted({w for f in put for w in f.why()})


@on_ranks(2)
@pytest.mark.parametrize("whole", [False, True])
def test_under_activation_checkpointing(whole):
    mesh = mesh_of(2)
    counts = []

    def run(wrap):
        net = nn.Sequential(*[dt.shard_module(MLP(0.5, "layer"), mesh, TWO) for _ in range(2)])
        for i, block in enumerate(net):
            net[i] = wrap(block)
        out = []
        for step in range(3):
            (x,) = fed(mesh, 5, 6, at=(R, S0), seed=step)()
            if whole:
                y = checkpoint(net, x, use_reentrant=False)
            else:
                y = net[1](checkpoint(net[0], x, use_reentrant=False))
            y.square().sum().backward()
            out += [bits(y), bits(x.grad), *(bits(p.grad) for p in net.parameters())]
        counts.append(whys(net))
        return (out,)

    compare(run)
    replays, why = counts[1]
    assert replays >= 6 and not why, counts


@on_ranks(4)
def test_pending_gradients_of_micro_batches_and_steps():
    mesh = mesh_of(4)
    counts = []

    def run(wrap):
        net = wrap(dt.shard_module(Attention(), mesh, TP))
        opt = torch.optim.AdamW(net.parameters(), lr=0.1)
        for step in range(6):
            (x,) = fed(mesh, 4, 5, 8, at=(S0, R), seed=step, grad=False)()
            net(x).square().mean().backward()
            if step % 2:
                opt.step()
                opt.zero_grad()
        counts.append(whys(net))
        return ([bits(p) for p in net.parameters()],)

    compare(run)
    assert counts[1] == (5, [])


@on_ranks(2)
@pytest.mark.parametrize("options", [
    {"stage": 3}, {"stage": 1}, {"shard_axis": None}, {"stage": 3, "param_dtype": torch.bfloat16},
    {"stage": 3, "segments": ["0", "1"]}, {"shard_axis": None, "segments": ["0", "1"]},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("inner", [False, True])
def test_with_sharded_state(options, inner):
    counts = []
    mesh = dt.init_mesh((2,), ("fsdp",))

    def run(wrap):
        torch.manual_seed(0)
        net = nn.Sequential(MLP(), MLP())
        net = dt.shard_data_parallel(net, mesh, **options)
        if inner:
            net[0] = wrap(net[0])
        else:
            net = wrap(net)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(4):
            x = dt.shard_tensor(randn(4, 6, seed=step, dtype=torch.float32), mesh, [S0])
            net(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
            if step == 1:
                net.load_state_dict({k: v.detach() * 2 for k, v in net.state_dict().items()})
        counts.append(whys(net))
        return ([bits(p) for p in net.parameters()],)

    compare(run)
    replays, why = counts[1]
    assert replays or why


class Staged(nn.Module):
    """Blocks on meshes of their own, brought together by reshards."""

    def __init__(self, meshes, wrap, p):
        super().__init__()
        self.meshes = meshes
        self.blocks = nn.ModuleList(wrap(dt.shard_module(MLP(p, "layer"), mesh)) for mesh in meshes)

    def forward(self, x):
        for mesh, block in zip(self.meshes, self.blocks, strict=True):
            x = block(dt.reshard(x, mesh, [R]))
        return x.square().mean()


@on_ranks(2)
@pytest.mark.parametrize("schedule", ["", "gpipe", "1f1b"])
@pytest.mark.parametrize("whole", [False, True])
def test_stages_of_a_pipeline(schedule, whole):
    meshes = [dt.ProcessMesh([0], ("x",)), dt.ProcessMesh([1], ("x",))]
    counts = []

    def run(wrap):
        net = Staged(meshes, (lambda m: m) if whole else wrap, 0.5)
        net = wrap(net) if whole else net
        data = [dt.shard_tensor(randn(4, 6, seed=i, dtype=torch.float32), meshes[0], [R])
                for i in range(4)]  # fmt: skip
        if schedule:
            losses = pipeline.run(net, data, schedule)
        else:
            losses = [net(x) for x in data]
            for loss in losses:
                loss.backward()
        counts.append(whys(net))
        return ([bits(x) for x in losses], [bits(p.grad) for p in net.parameters()])

    compare(run)
    replays, why = counts[1]
    if whole:
        assert not replays and why, counts
    else:
        assert replays == 3, (dist.get_rank(), counts)


@on_ranks(2)
def test_outside_the_mesh_calls_go_one_by_one():
    mesh = dt.ProcessMesh([0], ("x",))
    net = dt.replay(dt.shard_module(MLP(0.5), mesh))
    f = dt.replay(lambda t: t * 2)
    x = dt.shard_tensor(randn(4, 6, dtype=torch.float32), mesh, [R])
    for _ in range(3):
        y = f(net(x))
    if dist.get_rank():
        assert f.replays == 0 and "outside the mesh" in f.why()[0] and not y.is_initialized
    else:
        assert f.replays == 2 and net.forward.replays == 2


@on_ranks(1)
def test_an_outer_replay_records_the_inner_ones_whole():
    mesh = mesh_of(1)
    net = nn.Sequential(dt.shard_module(MLP(), mesh), dt.shard_module(MLP(), mesh))
    net[0] = dt.replay(net[0])
    outer = dt.replay(net)
    (x,) = fed(mesh, 5, 6)()
    first = [outer(x).full_tensor() for _ in range(3)]
    assert torch.equal(first[0], first[2]) and outer.forward.replays == 2
    assert net[0].forward.replays == 0


@on_ranks(2)
def test_communication_is_recorded_as_that_of_the_calls():
    mesh = mesh_of(2)
    (x,) = fed(mesh, 3, 5, 8, at=(R, R))()
    net = dt.replay(dt.shard_module(Attention(), mesh, TP))
    seen = []
    for _ in range(3):
        with dt.debugging.record_comms() as log:
            net(x).sum().backward()
        seen.append([(r.kind, r.axis, r.bytes, r.phase, r.shape) for r in log])
    assert seen[0] and seen[0] == seen[1] == seen[2] and net.forward.replays == 2


def _in_a_thread(run, x):
    found = []
    thread = threading.Thread(target=lambda: found.append(run(x)))
    thread.start()
    thread.join()
    return found[0]


def _within(*modes):
    def call(run, x):
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            return run(x)

    return call


class Seen(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _bf16():
    return torch.autocast("cpu", torch.bfloat16)


WAYS = {
    "": lambda run, x: run(x), "twice": lambda run, x: run(run(x)), "thread": _in_a_thread,
    "checkpoint": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "checkpoints": lambda run, x: checkpoint(
        lambda t: checkpoint(run, t, use_reentrant=False), x, use_reentrant=False),
    "reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "no_grad": _within(torch.no_grad), "inference": _within(torch.inference_mode),
    "bf16": _within(_bf16), "fp16": _within(lambda: torch.autocast("cpu", torch.float16)),
    "both": _within(_bf16, torch.no_grad), "mode": _within(Seen), "strict": _within(strict),
    "device": _within(lambda: torch.device("cpu")), "fast": _within(lambda: dt.random.rng("fast")),
    "invariant": _within(lambda: dt.random.rng("invariant")), "saved": _within(save_on_cpu),
    "jvp": lambda run, x: torch.func.jvp(run, (x,), (x,))[0],
    "vmap": lambda run, x: torch.func.vmap(run)(x),
}  # fmt: skip


@on_ranks(1)
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_recorded_in_one_way_and_called_in_others(norm):
    """A walk through the ways, twins side by side: the same bits, or the same error."""
    mesh = mesh_of(1)
    slow, fast = (dt.shard_module(MLP(0.5, norm), mesh, {}) for _ in "ab")
    fast = dt.replay(fast)

    def step(net, way):
        (x,) = fed(mesh, 6, 6)()
        net.zero_grad()
        try:
            y = WAYS[way](functools.partial(net, skip=False), x)
        except Exception as error:
            return str(error)
        if y.requires_grad:
            y.float().square().sum().backward()
        return bits(y), bits(x.grad), [bits(t) for p in net.parameters() for t in (p, p.grad)]

    draw = random.Random(0)
    for i in range(120):
        way = draw.choice(["", *WAYS])
        dt.manual_seed(i)
        found = step(fast, way)
        dt.manual_seed(i)
        assert found == step(slow, way), (i, way)
    assert fast.forward.replays > 30, fast.forward.why()
