"""``capture`` on the CPU: a step that a CUDA graph can repeat runs as it is, and each violation of
that contract is one error with the line of the user."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt
from disttensor import Replicate, Shard, observe
from disttensor.errors import CaptureError
from disttensor.tensor.versions import version
from disttensor.torch_private import count_dispatch_modes, creates
from tests.support.pool import on_ranks

R, S0 = Replicate(), Shard(0)
# Dynamo itself does this
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated")
FUSED = {"lr": 0.05, "fused": True, "capturable": True}


class Trained:
    """A small classifier and its training step; ``inside`` runs in each step."""

    def __init__(self, mesh, inside=lambda self: None, **options):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 5))
        plan = {"0.*": [dt.Shard(0)], "2.weight": [dt.Shard(1)]}
        dt.shard_module(self.net, mesh, plan)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), **(options or FUSED))
        self.inside = inside

    def step(self, x, y):
        self.optimizer.zero_grad()
        self.loss = F.cross_entropy(self.net(x), y, ignore_index=2)
        self.loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        self.optimizer.step()
        self.inside(self)
        return self.loss


def batches(mesh, n, at=R):
    draw = torch.Generator().manual_seed(0)
    for _ in range(n):
        x, y = torch.randn(7, 6, generator=draw), torch.randint(0, 5, (7,), generator=draw)
        yield dt.shard_tensor(x, mesh, [at]), dt.shard_tensor(y, mesh, [at])


def refused(mesh, inside=lambda self: None, match="", between=lambda self: None, **options):
    """Runs the checked calls of a step that violates the contract. All is left as after the same
    steps without ``capture``."""
    ours, plain = Trained(mesh, inside, **options), Trained(mesh, inside, **options)
    step = dt.capture(ours.step, warmup=3)
    names = [torch.Tensor.__dict__.get(n) for n in ("tolist", "numpy", "cpu")]
    error = None
    for i, (x, y) in enumerate(batches(mesh, 5)):
        try:
            loss = step(x, y)
        except CaptureError as caught:
            assert i >= 2, caught
            error = error or caught
        else:
            assert torch.equal(loss.full_tensor(), ours.loss.detach().full_tensor())
        plain.step(x, y)
        between(ours)
        between(plain)
        assert not observe.observers and not count_dispatch_modes()
        assert names == [torch.Tensor.__dict__.get(n) for n in ("tolist", "numpy", "cpu")]
        assert getattr(*creates).__module__ == "torch.distributed.distributed_c10d"
    assert error is not None, "the step was accepted"
    assert re.search(match, str(error)), (match, str(error))
    for a, b in zip(ours.net.parameters(), plain.net.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())


@pytest.mark.feature("Captured steps")
@pytest.mark.parametrize("at", [R, S0])
@on_ranks(2)
def test_a_step_that_keeps_the_contract_gives_the_bits_of_the_eager_one(at):
    """A split model, or a split batch of seven rows: the count of the mean loss, one norm over
    pieces, gradients that are reduced, a fused optimizer."""
    mesh = dt.init_mesh((2,), ("tp",))
    ours, plain = Trained(mesh), Trained(mesh)
    step = dt.capture(ours.step, warmup=3)
    for x, y in batches(mesh, 5, at):
        got, want = step(x, y), plain.step(x, y)
        assert got.grad_fn is None
        assert torch.equal(got.full_tensor(), want.detach().full_tensor())
    for a, b in zip(ours.net.parameters(), plain.net.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_sharded_state_keeps_the_contract(stage):
    """Gathered parameters get their memory inside of the step."""
    mesh = dt.init_mesh((2,), ("fsdp",))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    dt.shard_data_parallel(net, mesh, stage=stage)
    optimizer = torch.optim.AdamW(net.parameters(), **FUSED)
    scaler = torch.amp.GradScaler("cpu")

    @dt.capture
    def step(x):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss

    losses = [step(dt.shard_tensor(torch.ones(3, 5), mesh, [S0])).item() for _ in range(7)]
    assert losses[-1] < losses[0]


@on_ranks(2)
def test_values_on_the_host():
    mesh = dt.init_mesh((2,), ("tp",))
    w = torch.ones(3)
    lines = {
        r"aten.item\(float32\[\]\) reads a value on the host": lambda self: self.loss.item(),
        r"aten.item\(bool\[\]\) reads a value": lambda self: bool(self.loss > 0),
        r"aten.equal\(float32\[3\], float32\[3\]\) reads": lambda self: torch.equal(w, w),
        r"Tensor.tolist reads a value": lambda self: self.loss.tolist(),
        r"Tensor.numpy reads a value": lambda self: w.numpy(),
        r"Tensor.cpu reads a value": lambda self: self.loss.detach().cpu(),
        r"aten.nonzero\(float32\[3\]\) has a size that depends": lambda self: w.nonzero(),
        r"aten.index\(float32\[3\], \[bool\[3\]\]\) has a size": lambda self: w[w > 0],
        r"aten.lift_fresh\(float32\[1\]\) makes a tensor of a": lambda self: torch.tensor([1.0]),
    }
    for text, inside in lines.items():
        line = inside.__code__.co_firstlineno
        refused(mesh, inside, re.escape(f"{__file__}:{line}: ") + text)


@on_ranks(2)
def test_a_process_group_is_created_inside():
    mesh = dt.init_mesh((2,), ("tp",))
    made = []

    def ours(self):
        made.append(None)
        if len(made) > 4:  # in a checked call of each of the two steps
            from disttensor.comm.groups import new_group

            new_group([0, 1], ["tp"], f"lane {len(made)}")

    refused(mesh, ours, r"test_capture.py:\d+: a process group is created; create process groups")

    def theirs(self):
        made.append(None)
        torch.distributed.new_group([0, 1])

    refused(mesh, theirs, r"test_capture.py:\d+: a process group is created")


@on_ranks(2)
def test_memory_that_moves():
    mesh = dt.init_mesh((2,), ("tp",))

    def replace(self):
        weight = self.net[0].weight
        weight.data = weight.data.clone()

    refused(
        mesh, between=replace, match=r"test_capture.py:\d+: aten.t\(.*replaced since the last call"
    )

    def load(self):
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        state = next(iter(self.optimizer.state.values()))
        state["exp_avg"] = state["exp_avg"].clone()

    refused(mesh, between=load, match=r"test_capture.py:\d+: aten._fused_adamw_\(.*replaced since")
    w = [torch.ones(3)]

    def other(self):
        w[0] = torch.ones(3)

    refused(mesh, lambda self: w[0] * 2, r"aten.mul\(float32\[3\], 2\) reads a tensor", other)


@on_ranks(2)
def test_gradients_that_are_replaced_outside_of_the_step():
    """The new gradient of a replay would be in the memory of the old one. Filling with zeros, or
    ``zero_grad`` inside of the step, is right."""
    mesh = dt.init_mesh((2,), ("tp",))
    w = dt.ones(5, mesh=mesh, placements=[S0], requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step():
        (w * w).sum().backward()
        optimizer.step()

    captured = dt.capture(step, warmup=3)
    for _ in range(4):
        captured()
        optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad()
    with pytest.raises(CaptureError, match=r"the gradient of the leaf float32\[\d\] was replaced"):
        captured()


@on_ranks(2)
def test_numbers_of_the_host_that_change():
    mesh = dt.init_mesh((2,), ("tp",))

    def decay(self):
        self.optimizer.param_groups[0]["lr"] *= 0.5

    text = r"test_capture.py:\d+: aten._fused_adamw_\(.*0\.0.* ran where the call before ran aten"
    refused(mesh, decay, text)
    refused(mesh, match=r"aten.item\(float32\[\]\).*it runs in .*optim", lr=0.1, foreach=False)
    drop = nn.Dropout(0.5)
    x = dt.ones(4, mesh=mesh)
    refused(mesh, lambda self: drop(x), "draws by a seed that the host counts|ran where the call")
    calls = []

    def more(self):
        calls.append(None)
        return len(calls) > 6 and w.relu()

    w = torch.ones(3)
    refused(mesh, more, r"aten.relu\(float32\[3\]\) ran where the call before ran aten.detach")


@on_ranks(2)
def test_the_arguments_are_those_of_the_first_call():
    mesh = dt.init_mesh((2,), ("tp",))
    calls = []

    @dt.capture
    def step(x, scale):
        calls.append(None)
        return {"y": x * scale}

    x = dt.ones(3, 2, mesh=mesh)
    for _ in range(5):
        step(x, 2.0)
    for other in (
        (x, 3.0), (dt.ones(3, 3, mesh=mesh), 2.0), (x.full_tensor(), 2.0),
        (dt.shard_tensor(torch.ones(3, 2), mesh, [S0]), 2.0),
    ):  # fmt: skip
        with pytest.raises(CaptureError, match=r"call 6 has the arguments .*, and the first call"):
            step(*other)
    with pytest.raises(TypeError, match="an argument requires grad; tensors that require no grad"):
        step(x.clone().requires_grad_(), 2.0)
    with pytest.raises(TypeError, match="an argument is a object"):
        step(object(), 2.0)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(CaptureError, match=r"under autocast.*inside of the step"),
    ):
        step(x, 2.0)
    assert len(calls) == 5
    step(x, 2.0)


@on_ranks(2)
def test_a_step_that_raises_is_checked_again():
    mesh = dt.init_mesh((2,), ("tp",))
    stop = []
    w = dt.ones(3, mesh=mesh)

    @dt.capture
    def step():
        y = w * 2
        if stop:
            raise ZeroDivisionError
        return y + 1

    for _ in range(5):
        step()
    stop.append(None)
    with pytest.raises(ZeroDivisionError):
        step()
    stop.clear()
    for _ in range(2):
        assert step().tolist() == [3, 3, 3]


@on_ranks(2)
def test_experts_read_the_counts_of_tokens():
    mesh = dt.init_mesh((2,), ("ep",))
    up = dt.shard_tensor(torch.ones(4, 3, 3), mesh, [S0])
    indices, weights = torch.tensor([[0, 2]] * 5), torch.full((5, 2), 0.5)

    def mlp(rows, counts, up):
        return torch.cat([r @ w for r, w in zip(rows.split(counts), up, strict=True)])

    @dt.capture
    def step(x):
        sent = dt.experts.dispatch_tokens(x, indices, 4)
        return dt.experts.combine_tokens(sent.apply(mlp, up), weights)

    x = dt.shard_tensor(torch.ones(5, 3), mesh, [S0])
    for _ in range(3):
        want = step(x)
    line = mlp.__code__.co_firstlineno + 6  # of combine_tokens
    with pytest.raises(CaptureError, match=rf"{__file__}:{line}: Tensor.tolist reads.*routing.py:"):
        step(x)
    assert want.tolist() == [[3.0] * 3] * 5


@on_ranks(2)
def test_replayed_and_compiled_modules_are_checked():
    """With ``dt.compile`` the checked calls run one by one, as under each dispatch mode."""
    mesh = dt.init_mesh((2,), ("tp",))
    for through, least in ((dt.replay, 2), (lambda net: dt.compile(net, backend="eager"), 1)):
        ours, plain = Trained(mesh), Trained(mesh)
        through(ours.net)
        step = dt.capture(ours.step)
        for x, y in batches(mesh, 6, S0):
            assert torch.equal(step(x, y).full_tensor(), plain.step(x, y).detach().full_tensor())
        assert ours.net.forward.replays >= least and not ours.net.forward.why()


class GraphOnCpu:
    """Stands for a CUDA graph: its capture runs eagerly, and ``replay`` adds 1 to the result."""

    def replay(self):
        self.result.local.add_(1)


@on_ranks(1)
def test_the_memory_of_a_graph():
    """The parts of a replay around the graph itself: arguments are copied, results stay where they
    are, kept values become invalid, and tensors that were replaced are an error."""
    mesh = dt.init_mesh((1,), ("dp",))
    graph = GraphOnCpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
        patch.setattr(torch.cuda, "graph", lambda graph, stream: nullcontext())
        memory_of_a_graph(mesh, graph)


def memory_of_a_graph(mesh, graph):
    w = dt.ones(3, mesh=mesh, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.5)

    def step(x):
        (w * x).sum().backward()
        optimizer.step()
        graph.result = w.detach().sum()
        return graph.result

    def captured():
        nonlocal w
        w = dt.ones(3, mesh=mesh, requires_grad=True)
        optimizer.param_groups[0]["params"] = [w]
        made = dt.capture(step, warmup=3)
        for _ in range(3):
            made(dt.ones(3, mesh=mesh))
        made.watch.on_cuda = True
        return made

    run = captured()
    before = version(w.local)
    losses = [run(dt.full((3,), float(i), mesh=mesh)) for i in range(3)]
    assert losses[0].local.data_ptr() == losses[2].local.data_ptr()
    assert version(w.local) >= before + 3
    assert run.graph.inputs[0].tolist() == [2.0] * 3
    w.data = w.data.clone()
    with pytest.raises(CaptureError, match=r"test_capture.py:\d+: aten.mul\(.*was replaced since"):
        run(dt.ones(3, mesh=mesh))
    run = captured()
    run(dt.ones(3, mesh=mesh))
    w.grad = None
    with pytest.raises(CaptureError, match=r"test_capture.py:\d+: the gradient of the leaf"):
        run(dt.ones(3, mesh=mesh))
