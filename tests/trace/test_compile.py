"""A compiled program gives the bits of the calls one by one, with the backends that do not change
numbers: values, gradients, placements, communication."""

from __future__ import annotations

import copy
import shutil
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code

import disttensor as dt
from disttensor import Partial, Replicate, Shard
from disttensor.comm import compare_programs, failure_watch
from disttensor.graphs.late_waits import wait_late
from disttensor.runtime import current_runtime
from reshard import planner
from tests.support.pool import on_ranks, run_on_ranks
from tests.trace.test_replay import LAYOUTS, MLP, TP, Attention, fed, mesh_of
from tests.trace.twins import agree, twice

R, S0, S1 = Replicate(), Shard(0), Shard(1)
# Python 3.13.0 has a flaw, of which Dynamo warns
pytestmark = [
    pytest.mark.filterwarnings("ignore:Guards may run slower"),
    # Dynamo itself does this
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
worlds = pytest.mark.parametrize(
    ("n", "backend"), [(2, "eager"), (2, "aot_eager"), (4, "aot_eager")]
)


def compiled(backend):
    def compile(target):
        torch._dynamo.reset()
        return dt.compile(target, backend=backend)

    return compile


def block(backend):
    mesh = mesh_of(torch.distributed.get_world_size())
    x = fed(mesh, 3, 5, 8)
    made = dt.shard_module(Attention(), mesh, TP)
    fast = agree(twice(made), x, x, x, through=compiled(backend))
    assert fast.forward.breaks() == []


@pytest.mark.feature("Compiled programs")
@worlds
def test_a_block_under_tensor_parallelism(n, backend):
    run_on_ranks(n, block, backend)


def layouts(backend):
    mesh = mesh_of(torch.distributed.get_world_size())
    for at in LAYOUTS:
        x = fed(mesh, 5, 6, at=at)
        fast = agree(twice(dt.shard_module(MLP(), mesh)), x, x, x, through=compiled(backend))
        assert fast.forward.breaks() == []


@worlds
def test_uneven_pieces_in_each_layout(n, backend):
    run_on_ranks(n, layouts, backend)


PAIRS = [R, S0, S1, Partial()]


@on_ranks(2)
def test_reshards_of_every_pair():
    """As calls inside of a program: uneven pieces, half precision too; at once, and started and
    waited for."""
    mesh = mesh_of(2)["tp"]
    small, all_sizes = nullcontext(), mock.patch.object(planner, "WORTH", 1)
    for dtype, rows, which in (
        (torch.float32, 5, small),
        (torch.float16, 7, all_sizes),
    ):
        for a in PAIRS:
            for b in PAIRS:
                if isinstance(b, Partial) and a != b:
                    continue

                def move(x, a=a, b=b):
                    y = (
                        (x * 2).redistribute(placements=[a])
                        if not isinstance(a, Partial)
                        else x @ x.mT
                    )
                    return (y * 1.0).redistribute(placements=[b]) * 3

                x = fed_in(mesh, dtype, rows)
                with which:
                    fast = agree(lambda: move, x, x, x, through=compiled("aot_eager"))
                assert fast.breaks() == []


def fed_in(mesh, dtype, rows):
    data = torch.linspace(-1, 1, 3 * rows, dtype=dtype).view(rows, 3)
    return lambda: (dt.shard_tensor(data, mesh, [S1]).requires_grad_(),)


def losses(backend):
    """A split vocabulary, a mean over a split batch, class weights, ignored rows."""
    mesh = mesh_of(torch.distributed.get_world_size())
    target = torch.tensor([0, 4, 2, -100, 1, 3])
    weight = torch.linspace(0.5, 1.5, 5)
    for at in ((S0, R), (S0, S1), (R, S1)):
        placed = dt.shard_tensor(target, mesh, [p if p == S0 else R for p in at])

        def loss(x, placed=placed):
            smooth = F.cross_entropy(x, placed, label_smoothing=0.1)
            return F.cross_entropy(x * 2, placed, weight.to(x.dtype)) + smooth

        x = fed(mesh, 6, 5, at=at)
        fast = agree(lambda: loss, x, x, x, through=compiled(backend))
        assert fast.breaks() == []


@worlds
def test_losses_over_split_dims(n, backend):
    run_on_ranks(n, losses, backend)


def statistics(backend):
    mesh = mesh_of(torch.distributed.get_world_size())
    x = fed(mesh, 3, 6, 5, at=(S0, Shard(2)))

    def function(x):
        y = F.layer_norm(x, (5,)) + x.softmax(-1) * x.std(-1, keepdim=True)
        return F.normalize(y, dim=-1) + x.cumsum(2)

    fast = agree(lambda: function, x, x, x, through=compiled(backend))
    assert fast.breaks() == []


@worlds
def test_functions_along_a_split_dim(n, backend):
    run_on_ranks(n, statistics, backend)


@on_ranks(2)
def test_reductions_without_a_gradient():
    mesh = mesh_of(2)
    x = fed(mesh, 3, 5, at=(R, S1), grad=False)

    def function(x):
        return x.amax(1) + (x > 0).any(1) - x.prod(1).amin()

    fast = agree(lambda: function, x, x, x, through=compiled("aot_eager"))
    assert fast.breaks() == []


@on_ranks(2)
def test_batch_norm_over_a_split_batch_is_one_graph():
    """It communicates, and writes to its running statistics."""
    mesh = mesh_of(2)

    def batch():
        stats = [dt.zeros(5, mesh=mesh), dt.ones(5, mesh=mesh)]
        return *fed(mesh, 6, 5, at=(R, S0))(), *stats

    norm = lambda x, m, v: F.batch_norm(x.sin(), m, v, training=True).cos()  # noqa: E731
    fast = agree(lambda: norm, batch, batch, batch, through=compiled("aot_eager"))
    assert fast.breaks() == []


@on_ranks(2)
def test_what_cannot_be_compiled_runs_call_by_call():
    mesh = mesh_of(2)
    x = fed(mesh, 6, 5, grad=False)

    def reading(x):
        return x.sin() if x.sum() > 0 else x.cos()

    fast = agree(lambda: reading, x, x, x, through=compiled("eager"), replays=0)
    assert len(fast.why()) == 1 and "reads a value" in fast.why()[0], fast.why()


@on_ranks(2)
def test_what_a_reshard_does_not_need_runs_while_it_communicates():
    """Of large messages, in the graphs of inductor: forward and backward."""
    mesh, graphs = dt.init_mesh((2,), ("tp",)), []

    def collect(graph, inputs):
        wait_late(graph.graph)
        graph.graph.lint()
        graph.recompile()
        graphs.append(" ".join(f"{node.args[:2]} {node.target}" for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    def function(x, a, w):
        whole = x.redistribute(placements=[R])
        other = a.sin() @ a
        return (whole @ w).cos().sum() + other.sum()

    def compile(target):
        torch._dynamo.reset()
        return dt.compile(target, backend=aot_autograd(fw_compiler=collect, bw_compiler=collect))

    for wide in (257, 1):

        def make(wide=wide):
            torch.manual_seed(0)
            whole = [torch.randn(*shape) for shape in ((wide, 300), (64, 64), (300, wide))]
            layouts = zip(whole, ([S0], [R], [S1]), strict=True)
            return [dt.shard_tensor(t, mesh, at).requires_grad_() for t, at in layouts]

        assert agree(lambda: function, make, make, make, through=compile).breaks() == []
    forward, backward, *small = graphs
    assert forward.index("start_reshard") < forward.index("aten.mm") < forward.index("wait_reshard")
    start, end = backward.rindex("start_reshard"), backward.rindex("wait_reshard")
    assert backward[start:end].count("aten.mm") == 3  # of w and twice of a; that of x is before
    assert small and "start_reshard" not in "".join(small)


@on_ranks(2)
def test_a_program_saves_what_plain_pytorch_saves():
    """Parameters, and not views of them."""
    mesh, saved = mesh_of(2), []

    def collect(graph, inputs):
        (outputs,) = next(node.args for node in graph.graph.nodes if node.op == "output")
        saved.append(sorted((n.op, *n.meta["val"].shape) for n in outputs if n is not None))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=collect, partition_fn=min_cut_rematerialization_partition)
    made, x = MLP(), torch.randn(6, 6)
    both = (
        torch.compile(copy.deepcopy(made), backend=backend, dynamic=False),
        dt.compile(dt.shard_module(made, mesh), backend=backend),
    )
    for model, y in zip(both, (x, dt.shard_tensor(x, mesh)), strict=True):
        for _ in range(2):
            model(y).sum().backward()
    plain, ours = saved[::2]
    assert ours == plain


@pytest.mark.filterwarnings("ignore")  # inductor warns of torch's own code
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a compiler")
@pytest.mark.limit(400)
@on_ranks(2, timeout=250)
def test_inductor_gives_the_numbers_of_eager_calls():
    mesh = mesh_of(2)
    block = dt.shard_module(Attention(), mesh, TP)
    fast = dt.compile(copy.deepcopy(block))
    for _ in range(3):
        found = []
        for twin in (block, fast):
            twin.zero_grad()
            (x,) = fed(mesh, 3, 5, 8)()
            twin(x).square().sum().backward()
            found.append([x.grad.full_tensor(), *[p.grad.full_tensor() for p in twin.parameters()]])
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert fast.forward.replays == 2 and not fast.forward.breaks()

    def program(x, a):
        return x.redistribute(placements=[R, R]), a @ a

    x, a = (fed(mesh, 300, 300, at=at)()[0].detach() for at in ((R, S0), (R, R)))
    fast = dt.compile(program, mode="default", options={"fx_graph_cache": False})
    whole, square = program(x, a)
    fast(x, a)
    (found, product), codes = run_and_get_code(fast, x, a)
    assert found.full_tensor().equal(whole.full_tensor())
    torch.testing.assert_close(product.full_tensor(), square.full_tensor(), rtol=1e-4, atol=1e-4)
    code = codes[0]
    assert code.index(".start_reshard") < code.index("kernels.mm") < code.index(".wait_reshard")


@on_ranks(2)
def test_models_that_ask_are_told_that_they_are_compiled():
    """As those of transformers, which then read no mask; a part without gradients is traced."""
    mesh = mesh_of(2)
    x = fed(mesh, 6, 5, at=(R, R))

    def function(x):
        with torch.no_grad():
            scale = x.sin() @ x.mT
        if not torch.compiler.is_compiling():
            assert scale.sum().item() < 100
        return scale @ x.cos()

    fast = agree(lambda: function, x, x, x, through=compiled("aot_eager"))
    assert fast.breaks() == [] and not torch.compiler.is_compiling()


class Doubled(torch.autograd.Function):
    """Dynamo does not trace ``name``, an object of Python."""

    @staticmethod
    def forward(ctx, x):
        return x * len(str(object())[:2])

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@on_ranks(2)
def test_a_call_that_dynamo_does_not_trace_ends_a_graph_and_is_named():
    mesh = mesh_of(2)
    x = fed(mesh, 6, 5, at=(S0, S1))

    def function(x):
        return dt.local_map(Doubled.apply, out_placements=x.placements, out_shapes=x.shape)(
            x.sin()
        ).cos()

    fast = agree(lambda: function, x, x, x, through=compiled("aot_eager"))
    assert fast.breaks() == ["tests.trace.test_compile.Doubled"]
    loss = lambda x: F.gaussian_nll_loss(x.sin(), x.detach(), x.detach().exp())  # noqa: E731
    fast = agree(lambda: loss, x, x, x, through=compiled("aot_eager"))
    assert [name.rpartition(".")[2] for name in fast.breaks()] == ["gaussian_nll_loss"]


@on_ranks(2)
def test_no_collective_is_dropped_or_merged():
    """A compiler would drop what a rank with an empty piece does not need, and others wait."""
    mesh = mesh_of(2)["tp"]

    def function(x):
        for _ in range(2):
            (x * 2).redistribute(placements=[R])
        return x.cos()

    x = fed_in(mesh, torch.float32, 5)
    fast = agree(lambda: function, x, x, x, through=compiled("aot_eager"))
    assert fast.breaks() == []


@on_ranks(2)
def test_a_rank_that_compiles_slowly_raises_no_alarm():
    """It compiles for longer than the watch waits for anything, in a forward between messages."""
    mesh, rank = mesh_of(2)["tp"], torch.distributed.get_rank()
    slow = []

    def backend(graph, inputs):
        slow.append(rank and time.sleep(1.5))
        return graph.forward

    net = dt.shard_module(Attention(), mesh, {k: v[1:] for k, v in TP.items()})
    x = dt.shard_tensor(torch.linspace(-1, 1, 120).view(3, 5, 8), mesh, [S0])
    torch._dynamo.reset()
    fast = dt.compile(net, backend=backend)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with (
        mock.patch.multiple(failure_watch, PERIOD=0.05, PATIENCE=0.2),
        mock.patch.object(compare_programs, "_PATIENCE", 0.2),
    ):
        for _ in range(3):
            fast(x).square().sum().backward()
            optimizer.step()
    watcher = failure_watch.watcher_of(current_runtime())
    assert slow and fast.forward.replays == 2
    assert not (watcher.failed or watcher.lost or watcher.store.check(["asked"]))
