"""Models that are not one program: the modules in them are compiled, with the bits of eager calls.
Sharded state, pipelines, checkpointed regions, and programs that write."""

from __future__ import annotations

import itertools
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import disttensor as dt
from disttensor import Replicate, Shard
from disttensor.graphs import local_program
from disttensor.graphs.local_program import LocalFunction
from tests.support.pool import on_ranks, run_on_ranks
from tests.trace.test_compile import pytestmark  # noqa: F401

R, S0 = Replicate(), Shard(0)


class Block(nn.Module):
    """``asks``: multiplies by one, and saves a tensor for that, if torch says that it compiles."""

    def __init__(self, dropout, asks=False) -> None:
        super().__init__()
        self.asks = asks
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        y = F.gelu(self.up(self.norm(x)))
        if self.asks and torch.compiler.is_compiling():
            y = y * torch.ones_like(y)
        return x + self.drop(self.down(y))


class Model(nn.Module):
    def __init__(self, checkpointed=False, dropout=0.3, asks=False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout, asks) for _ in range(4))
        self.head = nn.Linear(6, 3)
        self.checkpointed = checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def trained(make, step, backend, steps=4):
    """The losses, gradients and messages of each step, and the model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    if backend:
        dt.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for i in range(steps):
        torch.manual_seed(10 + i)
        dt.manual_seed(10 + i)
        with dt.debugging.record_comms() as log:
            loss = step(model)
        grads = [p.grad.full_tensor() for p in model.parameters() if p.is_initialized]
        seen.append((loss, grads, [(r.kind, r.bytes) for r in log.records]))
        optimizer.step()
        optimizer.zero_grad()
    return seen, model


def same(make, step, backend, steps=4):
    """Compares compiled training with eager training. Returns the compiled model."""
    plain, _ = trained(make, step, None, steps)
    compiled, model = trained(make, step, backend, steps)
    for (loss, grads, sent), (loss_c, grads_c, sent_c) in zip(plain, compiled, strict=True):
        assert loss == loss_c and sent == sent_c
        assert all(a.equal(b) for a, b in zip(grads, grads_c, strict=True))
    return model


def fed(mesh, rows=5):
    x = dt.shard_tensor(torch.randn(rows, 6), mesh, [S0] * mesh.ndim)
    return x, dt.shard_tensor(torch.randint(3, (rows,)), mesh, [S0] * mesh.ndim)


def step_on(mesh):
    def step(model):
        x, y = fed(mesh)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    return step


def runs(model):
    """How often the programs of the blocks ran."""
    forwards = [vars(block)["forward"] for block in model.blocks if "forward" in vars(block)]
    return [(forward.inner or forward).replays for forward in forwards]


def sharded(backend):
    mesh = dt.init_mesh((torch.distributed.get_world_size(),), ("dp",))
    blocks = [f"blocks.{i}" for i in range(4)]
    for stage in (1, 2, 3):

        def make(stage=stage):
            return dt.shard_data_parallel(
                Model(), mesh, shard_axis="dp", stage=stage, segments=blocks
            )

        model = same(make, step_on(mesh), backend)
        assert runs(model) == [3, 3, 3, 3] and model.forward.breaks() == []
        assert model.forward.why() == [
            "its parameters are in sharded segments (shard_data_parallel)"
        ]


@on_ranks(2)
def test_replicas_are_reduced_while_the_backward_goes_on():
    mesh = dt.init_mesh((2,), ("dp",))
    blocks = [f"blocks.{i}" for i in range(4)]

    def make():
        return dt.shard_data_parallel(Model(), mesh, shard_axis=None, segments=blocks)

    model = same(make, step_on(mesh), "aot_eager")
    assert runs(model) == [3, 3, 3, 3]
    (why,) = model.forward.why()
    assert "reduced in segments" in why
    started = []
    with dt.debugging.record_comms() as log:

        def hook(module, args):
            args[0].register_hook(lambda g: started.append(len(log.records)))

        model.blocks[1].register_forward_pre_hook(hook)
        step_on(mesh)(model)
    (before,) = started
    assert 3 <= before < len(log.records)  # the last three blocks; the first one follows
    one = dt.compile(dt.shard_data_parallel(Model(), mesh, shard_axis=None), backend="aot_eager")
    step_on(mesh)(one)
    assert one.forward.why() == []


@pytest.mark.parametrize(("n", "backend"), [(2, "eager"), (2, "aot_eager"), (4, "aot_eager")])
def test_the_blocks_of_sharded_state(n, backend):
    run_on_ranks(n, sharded, backend)


def checkpointed(backend):
    mesh = dt.init_mesh((torch.distributed.get_world_size(),), ("dp",))

    def make():
        return dt.shard_module(Model(checkpointed=True), mesh)

    model = same(make, step_on(mesh), backend)
    assert runs(model) == [4, 4, 4, 4]  # of two steps: forwards and recomputations

    def two_forwards(model):
        """The first is recorded; its recomputation runs after programs were compiled."""
        total = 0.0
        losses = [F.cross_entropy(model(x), y) for x, y in (fed(mesh) for _ in range(3))]
        for loss in losses:
            loss.backward()
            total += loss.item()
        return total

    assert runs(same(make, two_forwards, backend, steps=2)) == [8, 8, 8, 8]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_checkpointed_blocks(backend):
    run_on_ranks(2, checkpointed, backend)


@on_ranks(2)
def test_a_region_is_recomputed_as_it_was_recorded():
    """By blocks that ask whether they are compiled."""
    mesh = dt.init_mesh((2,), ("dp",))
    make = lambda: dt.shard_module(Model(checkpointed=True, asks=True), mesh)  # noqa: E731
    assert runs(same(make, step_on(mesh), "aot_eager", steps=3)) == [2, 2, 2, 2]


@on_ranks(2)
def test_blocks_that_a_strategy_recomputes():
    for stage in (None, 3):
        degree = {"dp": 2} if stage is None else {"sharding": 2, "zero_stage": stage}
        strategy = dt.Strategy(**degree, recompute=["blocks.*"])

        def make(strategy=strategy):
            model = Model()
            strategy.apply(model)
            return model

        model = same(make, step_on(strategy.stages()[0]), "aot_eager")
        assert runs(model) == [4, 4, 4, 4]


SCHEDULES = {"1f1b": [0, 1], "zero_bubble": [0, 1], "interleaved_1f1b": [0, 1, 0, 1]}


@on_ranks(2)
def test_the_layers_of_stages():
    mesh = dt.init_mesh((2, 1), ("pp", "dp"))
    for schedule, order in SCHEDULES.items():
        stages = [mesh[i] for i in order]

        def make(stages=stages):
            model = Model()
            layers = [*(f"blocks.{i}" for i in range(4)), "head"]
            dt.pipeline.split(layers, stages, of=model)
            return model

        def step(model, stages=stages, schedule=schedule):
            def loss(batch):
                x = dt.shard_tensor(batch[0], stages[0], [S0])
                y = dt.shard_tensor(batch[1], stages[-1], [S0])
                return F.cross_entropy(model(x), y)

            parts = [(torch.randn(3, 6), torch.randint(3, (3,))) for _ in range(3)]
            losses = dt.pipeline.run(loss, parts, schedule, stages=stages)
            return [dt.reshard(v, mesh, [R, R]).item() for v in losses]

        with warnings.catch_warnings():  # a compiled backward is not split
            warnings.simplefilter("ignore", dt.errors.FallbackWarning)
            model = same(make, step, "aot_eager", steps=3)
        here = [b for b in model.blocks if b.up.weight.is_initialized]
        assert here and all(b.forward.replays == 8 for b in here), runs(model)
        assert model.forward.why()[0] == "there are hooks on modules in it"


class Statistics(nn.Module):
    """A buffer that each forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.inner(x) - self.mean


def half_without_grad(x):
    with torch.no_grad():
        weight = x.sigmoid()
    return (x * 3).mul_(2) * weight


def adds_to(x, y):
    y.add_(x.detach())
    doubled = y * 2
    y.mul_(doubled)
    return x * y, y


def tracked(x, y):
    y.add_(x)
    return x * y, y


WRITERS = {
    "batch norm": lambda: nn.Sequential(
        nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 3)
    ),
    "a buffer": Statistics,
}


@on_ranks(2)
def test_programs_that_write():
    """Two forwards come before a backward: the first one is recorded, the second one compiled."""
    mesh = dt.init_mesh((2,), ("dp",))
    for kind, at in itertools.product(WRITERS.values(), (S0, R)):

        def make(kind=kind):
            return dt.shard_module(kind(), mesh)

        def step(model, at=at):
            x, y = (t.redistribute(placements=[at]) for t in fed(mesh))
            shape = (5, 1, 6) if isinstance(model, nn.Sequential) else (5, 6)
            loss = sum(F.cross_entropy(model(x.view(shape) * i), y) for i in (1, 2))
            loss.backward()
            return loss.item(), [b.full_tensor().tolist() for b in model.buffers()]

        model = same(make, step, "aot_eager", steps=3)
        assert model.forward.replays == 5
        assert model.forward.why() == model.forward.breaks() == []


@on_ranks(2)
def test_functions_that_write():
    mesh = dt.init_mesh((2,), ("dp",))
    for eager in (half_without_grad, adds_to, tracked):
        torch._dynamo.reset()
        fast = dt.compile(eager, backend="aot_eager")
        for i in range(3):
            seen = []
            for f in (eager, fast):
                torch.manual_seed(i)
                x, y = (dt.shard_tensor(torch.randn(5, 3), mesh, [S0]) for _ in range(2))
                args = (x.requires_grad_(), y)[: eager.__code__.co_argcount]
                out = f(*args)
                first = out[0] if isinstance(out, tuple) else out
                first.sum().backward()
                seen.append([first, x.grad, y])
                assert not isinstance(out, tuple) or out[1] is y
            assert all(a.full_tensor().equal(b.full_tensor()) for a, b in zip(*seen, strict=True))
        refused = {
            adds_to: ["a backward needs a tensor from outside that it has written to"],
            tracked: ["it writes to a tensor of autograd's graph"],
        }.get(eager, [])
        assert fast.why() == refused and fast.breaks() == []
        assert fast.replays == (0 if refused else 2)


@on_ranks(2)
def test_equal_blocks_are_compiled_once():
    torch._dynamo.reset()
    mesh, graphs = dt.init_mesh((2,), ("dp",)), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    blocks = [f"blocks.{i}" for i in range(4)]
    model = dt.shard_data_parallel(Model(), mesh, shard_axis="dp", segments=blocks)
    dt.compile(model, backend=backend)
    for _ in range(3):
        model(fed(mesh)[0]).sum().backward()
    assert runs(model) == [2, 2, 2, 2]
    assert len(graphs) == 2  # the input of the first block has no gradient


@pytest.mark.filterwarnings("ignore")  # inductor warns of torch's own code
@on_ranks(2)
def test_programs_with_late_waits_share_a_function():
    mesh = dt.init_mesh((2,), ("dp",))
    x = dt.shard_tensor(torch.ones(300, 300), mesh, [S0])
    with mock.patch.object(local_program, "LocalFunction", wraps=LocalFunction) as made:
        for _ in range(2):
            fast = dt.compile(lambda x: x.redistribute(placements=[R]) * 3)
            fast(x)  # records, and compiles nothing yet
    assert made.call_count == 1
    assert "post_grad_custom_post_pass" in made.call_args.args[-1]["options"]


@on_ranks(2)
def test_constants_are_part_of_a_shared_function():
    mesh = dt.init_mesh((2,), ("dp",))
    found = []
    for zero in (0.0, -0.0, 1.0):
        fast = dt.compile(lambda x, zero=zero: torch.full_like(x, zero), backend="eager")
        x = dt.shard_tensor(torch.randn(5), mesh, [S0])
        found += [[*map(str, fast(x).full_tensor().tolist())][:1] for _ in range(2)]
        assert fast.replays == 1
    assert found == [["0.0"], ["0.0"], ["-0.0"], ["-0.0"], ["1.0"], ["1.0"]]


@on_ranks(2)
def test_a_dispatch_mode_sees_the_calls():
    torch._dynamo.reset()
    mesh = dt.init_mesh((2,), ("dp",))
    fast = dt.compile(lambda x: (x @ x.mT).sin(), backend="aot_eager")
    x = dt.shard_tensor(torch.randn(6, 4), mesh, [R])
    first = fast(x).full_tensor()
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            assert fast(x).full_tensor().equal(first)
        assert counter.get_total_flops() == 2 * 6 * 6 * 4
    assert fast(x).full_tensor().equal(first) and fast.replays == 1 and fast.why() == []


@on_ranks(2)
def test_tokens_of_experts_are_not_recorded():
    """The functions that they go through belong to one call."""
    mesh = dt.init_mesh((2,), ("dp",))
    x = dt.shard_tensor(torch.randn(6, 4), mesh, [S0])
    chosen = dt.shard_tensor(torch.randint(3, (6, 2)), mesh, [S0])

    def routed(x, chosen):
        sent = dt.experts.dispatch_tokens(x, chosen, 3).apply(lambda rows, counts: rows * 10)
        return dt.experts.combine_tokens(sent, chosen * 0.5)

    wanted = routed(x, chosen).full_tensor()
    for fast in (dt.replay(routed), dt.compile(routed, backend="eager")):
        for _ in range(3):
            assert fast(x, chosen).full_tensor().equal(wanted)
        assert fast.replays == 0 and fast.why()


class Routed(nn.Module):
    """A block, and rows that are sent to experts."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(0.3), nn.Linear(6, 3)

    def forward(self, x):
        x = self.block(x)
        chosen = x.detach()[:, :3].topk(2).indices
        sent = dt.experts.dispatch_tokens(x, chosen, 3).apply(lambda rows, counts: rows.sin())
        return self.head(dt.experts.combine_tokens(sent, x[:, :2].softmax(-1)))


@on_ranks(2)
def test_the_blocks_beside_experts_are_compiled():
    mesh = dt.init_mesh((2,), ("dp",))
    make = lambda: dt.shard_module(Routed(), mesh)  # noqa: E731
    model = same(make, step_on(mesh), "aot_eager")
    assert model.block.forward.replays == 2 and model.forward.replays == 0
    assert "sends tokens to experts" in model.forward.why()[0]
