"""Modules that lie elsewhere are skipped whole, with the same values and gradients; those that must
not be are not."""

from __future__ import annotations

import copy
import logging
import pickle
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor.autograd import token
from disttensor.dispatch import native
from disttensor.graph_nodes import nodes_of
from disttensor.tensor import views
from disttensor.trace.skip import Skip
from tests.support.oracle import randn
from tests.support.pool import fake_world, on_ranks
from tests.support.stages import Stages, check_stages, stage_meshes


class Counts(logging.Handler):
    """Numbers of calls, where no guard looks: behind a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter()

    def emit(self, record) -> None:
        self.calls[record.msg] += 1


CALLS, LOGGER = Counts(), logging.getLogger(__name__)
LOGGER.setLevel(logging.INFO)
LOGGER.addHandler(CALLS)
LOGGER.propagate = False


class Inner(nn.Linear):
    """Counts its forwards where nobody who skips it looks."""

    def forward(self, x):
        LOGGER.info("inner")
        return super().forward(x)


class Block(nn.Module):
    def __init__(self, n: int = 5, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = Inner(n, 2 * n), Inner(2 * n, n)
        self.norm, self.drop = nn.LayerNorm(n), nn.Dropout(p)

    def forward(self, x):
        LOGGER.info("outer")
        return x + self.drop(self.second(torch.relu(self.first(self.norm(x)))))


def on_stage(on: Stages, module: nn.Module, stage: int) -> nn.Module:
    """``module`` in float64 with its parameters among the leaves."""
    module = module.double()
    if on.meshes is not None:
        dt.pipeline.skip(dt.shard_module(module, on.mesh(stage)))
    on.leaves += module.parameters()
    return module


def elsewhere(make, rank: int = 1, **kwargs):
    """A module on rank 0 of a fake world in which this process is rank 1; and the mesh."""
    mesh = dt.ProcessMesh([0], ("x",))
    return dt.pipeline.skip(dt.shard_module(make(**kwargs), mesh)), mesh


def count(f, *args, of="inner") -> int:
    """How often these forwards run in a call of ``f``."""
    before = CALLS.calls[of]
    f(*args)
    return CALLS.calls[of] - before


def value(mesh, *shape, requires_grad=False):
    return dt.shard_tensor(torch.ones(*shape), mesh, requires_grad=requires_grad)


# Values, gradients, random numbers ----------------------------------------------------------------


def three_times(block, forward=lambda block, x: block(x)):
    def program(on: Stages):
        torch.manual_seed(1)
        blocks = [on_stage(on, block(), stage) for stage in (0, 1)]
        total = 0.0
        for i in range(3):
            x = on.value(randn(4, 5, seed=i), 0)
            x = forward(blocks[0], x)
            x = forward(blocks[1], on.to(x, 1, whole=True))
            total = total + x.pow(2).mean()
        return total

    return program


class Pairs(nn.Module):
    """Each output depends on inputs and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x, y=None):
        y = x * 2 if y is None else y
        return {"a": self.block(x), "b": (y * 3, y.sum() > 0, [x.sum().shape, "text"])}


class Writing(Pairs):
    def forward(self, x, y):
        x.mul_(y)
        return self.block(x)


def pairs(on: Stages):
    torch.manual_seed(1)
    modules = [on_stage(on, Pairs(), stage) for stage in (0, 1)]
    total = 0.0
    for i in range(3):
        x, y = on.value(randn(4, 5, seed=i), 0), on.value(randn(4, 5, seed=9 + i), 0)
        first = modules[0](x, y=y)
        y = on.to(first["b"][0], 1, whole=True)
        second = modules[1](on.to(first["a"], 1, whole=True), y)
        total = total + second["a"].sum() * second["b"][0].mean()
        assert second["b"][1].dtype is torch.bool and second["b"][2] == [torch.Size([]), "text"]
    return total


def back_and_forth(on: Stages):
    """A module of which one result depends on what another rank sent, and one does not."""
    torch.manual_seed(1)
    here, there = on_stage(on, Block(), 0), on_stage(on, Pairs(), 1)
    total = 0.0
    for i in range(3):
        x = here(on.value(randn(4, 5, seed=i), 0))
        out = there(on.to(x, 1, whole=True), on.value(randn(4, 5, seed=i), 1))
        total = total + on.to(out["a"].sum() + out["b"][0].sum(), 0, whole=True) * here(x).sum()
    return total


def shapes(on: Stages):
    torch.manual_seed(1)
    block = on_stage(on, Block(), 1)
    total = 0.0
    for n in (1, 4, 3, 4, 1, 3):
        total = total + block(on.value(randn(n, 5, seed=n), 1)).sum()
    return on.to(total, 0, whole=True)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        return torch.tanh(self.norm(x))


def batch_norm(on: Stages):
    modules = [on_stage(on, Norm(), stage) for stage in (0, 1)]
    total = 0.0
    for training in (True, True, False, False, True):
        for m in modules:
            m.train(training)
        x = modules[0](on.value(randn(4, 5), 0))
        total = total + modules[1](on.to(x, 1, whole=True)).pow(3).sum()
    return total


@pytest.mark.parametrize(
    "program",
    [
        three_times(Block),
        three_times(Block, lambda b, x: checkpoint(b, x, use_reentrant=False)),
        pairs, back_and_forth, shapes, batch_norm,
    ],
    ids=["blocks", "checkpoint", "pairs", "back_and_forth", "shapes", "batch_norm"],
)  # fmt: skip
@on_ranks(2)
def test_values_and_gradients_as_in_one_process(program):
    check_stages(program, stage_meshes())


@on_ranks(2)
def test_forwards_run_on_their_own_ranks_only():
    """In the first of three rounds everywhere, then not."""
    rank = torch.distributed.get_rank()
    blocks = [dt.pipeline.skip(dt.shard_module(Block(), mesh)) for mesh in stage_meshes()]
    for i in range(3):
        x = value(stage_meshes()[0], 4, 5)
        for stage, block in enumerate(blocks):
            x = dt.reshard(x, stage_meshes()[stage])
            before = CALLS.calls["inner"]
            x = block(x)
            assert CALLS.calls["inner"] - before == (2 if i == 0 or rank == stage else 0)
        x.sum().backward()


@on_ranks(2)
def test_random_numbers_go_on_behind_a_skipped_module():
    def draws(meshes):
        dt.manual_seed(3)
        block = Block(p=0.5)
        if meshes:
            dt.pipeline.skip(dt.shard_module(block, meshes[0]))
        for training in (True, True, True, False, True):
            block.train(training)
            block(value(meshes[0], 4, 5))
        x = dt.rand(8, mesh=meshes[1])
        return x.full_tensor(everywhere=True)

    both = dt.ProcessMesh([0, 1], ("x",))
    torch.testing.assert_close(draws(stage_meshes()), draws([both, both]))


# What is skipped ----------------------------------------------------------------------------------


@pytest.fixture
def world():
    with fake_world(2, rank=1):
        yield


def test_skipped_from_the_second_call_on(world):
    block, mesh = elsewhere(Block)
    assert [count(block, value(mesh, 4, 5)) for _ in range(3)] == [2, 0, 0]
    assert [count(block, value(mesh, 7, 5)) for _ in range(2)] == [2, 0]
    assert [count(block, value(mesh, 4, 5, requires_grad=True)) for _ in range(2)] == [2, 0]
    with torch.no_grad():
        assert [count(block, value(mesh, 4, 5)) for _ in range(2)] == [2, 0]


def test_result_is_that_of_a_run(world):
    block, mesh = elsewhere(Block)
    first, second = block(value(mesh, 4, 5)), block(value(mesh, 4, 5))
    assert second.spec is first.spec and second.requires_grad and not second.is_leaf
    with torch.no_grad():
        assert not block(value(mesh, 4, 5)).requires_grad
        assert not block(value(mesh, 4, 5)).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        outs = [block.second(block.first(value(mesh, 4, 5))) for _ in range(2)]
        assert [block(value(mesh, 4, 5)).dtype for _ in range(2)] == [torch.float32] * 2
        assert outs[0].dtype == torch.bfloat16
    assert block(value(mesh, 4, 5)).dtype == torch.float32
    block.to(torch.float64)
    assert block(value(mesh, 4, 5).double()).dtype == torch.float64


def test_autocast_is_another_kind_of_call(world):
    seq, mesh = elsewhere(lambda: nn.Sequential(Inner(5, 5), Inner(5, 5)))
    dtypes = []
    for on in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            dtypes.append(seq(value(mesh, 4, 5)).dtype)
    assert dtypes == [torch.float32, torch.bfloat16] * 2


def test_frozen_parameters_are_seen(world):
    block, mesh = elsewhere(Block)
    x = value(mesh, 4, 5)
    assert block(x).requires_grad and block(x).requires_grad
    block.requires_grad_(False)
    assert not block(x).requires_grad and not block(x).requires_grad
    block.second.weight.requires_grad_(True)
    assert block(x).requires_grad


def test_a_replaced_parameter_is_seen(world):
    seq, mesh = elsewhere(lambda: nn.Sequential(Inner(5, 5, bias=False)))
    x = value(mesh, 4, 5)
    assert [tuple(seq(x).shape) for _ in range(2)] == [(4, 5)] * 2
    seq[0].weight = nn.Parameter(value(mesh, 3, 5))
    assert [tuple(seq(x).shape) for _ in range(2)] == [(4, 3)] * 2
    seq[0]._parameters["weight"] = nn.Parameter(value(mesh, 2, 5))
    assert [tuple(seq(x).shape) for _ in range(2)] == [(4, 2)] * 2
    seq[0].register_parameter("weight", nn.Parameter(value(mesh, 6, 5)))
    assert [tuple(seq(x).shape) for _ in range(2)] == [(4, 6)] * 2
    seq[0].weight.data = value(mesh, 7, 5)
    assert [tuple(seq(x).shape) for _ in range(2)] == [(4, 7)] * 2


def test_functional_call_is_seen(world):
    seq, mesh = elsewhere(lambda: nn.Sequential(Inner(5, 5, bias=False)))
    x = value(mesh, 4, 5)
    seq(x), seq(x)
    out = torch.func.functional_call(seq, {"0.weight": value(mesh, 3, 5)}, (x,))
    assert tuple(out.shape) == (4, 3) and tuple(seq(x).shape) == (4, 5)


def test_hooks_on_inner_modules_are_called(world):
    block, mesh = elsewhere(Block)
    x, seen = value(mesh, 4, 5), []
    block(x), block(x)
    handle = block.first.register_forward_hook(lambda *a: seen.append(1))
    block(x), block(x)
    assert len(seen) == 2
    handle.remove()
    block(x)
    assert [count(block, x) for _ in range(2)] == [0, 0] and len(seen) == 2
    block.norm.register_forward_pre_hook(lambda *a: seen.append(2))
    block(x)
    assert seen[2:] == [2]


def test_hooks_on_the_module_itself_are_called(world):
    block, mesh = elsewhere(Block)
    seen = []
    block.register_forward_hook(lambda *a: seen.append(1))
    assert [count(block, value(mesh, 4, 5)) for _ in range(3)] == [2, 0, 0] and len(seen) == 3


def test_attributes_are_seen(world):
    block, mesh = elsewhere(Block, p=0.5)
    x = value(mesh, 4, 5)

    def draws():
        before = dt.random.counter.get_state()[1]
        block(x)
        return dt.random.counter.get_state()[1] - before

    assert [draws() for _ in range(3)] == [1, 1, 1]
    block.eval()
    assert [draws() for _ in range(3)] == [0, 0, 0]
    block.train()
    assert count(block, x) == 0 and draws() == 1  # known from before
    block.drop.p = 0.0
    block.first = Inner(5, 10)
    block.first = dt.shard_module(Inner(5, 10), mesh)
    assert count(block, x) == 2


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.times, self.wide = nn.Parameter(torch.ones(4)), 1, False

    def forward(self, x):
        return (x * self.weight).repeat(self.times + 4 * self.wide)


def test_an_attribute_from_outside_counts_from_the_next_call_on(world):
    module, mesh = elsewhere(Repeated)
    for times, wide in ((1, False), (1, False), (2, False), (2, True), (2, False), (3, True)):
        module.times, module.wide = times, wide
        assert module(value(mesh, 4)).shape == (4 * times + 16 * wide,)
    del module.wide
    type(module).wide = 1
    assert module(value(mesh, 4)).shape == (28,)


class Config:
    def __init__(self) -> None:
        self.times = 1


SETTINGS = {"times": 1}


class Configured(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight, self.config = nn.Parameter(torch.ones(4)), config

    def forward(self, x):
        return (x * self.weight).repeat(self.config.times * SETTINGS["times"])


def test_what_an_object_or_a_global_holds_is_seen(world):
    module, mesh = elsewhere(partial(Configured, Config()))
    for times, outer in ((1, 1), (1, 1), (2, 1), (2, 1), (2, 3), (2, 3)):
        module.config.times, SETTINGS["times"] = times, outer
        assert module(value(mesh, 4)).shape == (4 * times * outer,)
    SETTINGS["times"] = 1


def test_a_forward_that_counts_in_a_global_is_not_skipped(world):
    module, mesh = elsewhere(Plain, body=counting)
    before = len(COUNTED)
    for _ in range(4):
        module(value(mesh, 4, 5))
    assert len(COUNTED) == before + 4 and module.forward.why() == [
        "it changes what it reads: a list"
    ]


COUNTED: list[int] = []


def counting(self, y, x):
    COUNTED.append(1)
    return y


class Plain(nn.Module):
    """One line of the forward is given."""

    def __init__(self, body) -> None:
        super().__init__()
        self.inner, self.body = Inner(5, 5), body
        self.seen, self.n = [], 0
        self.constant = (torch.ones(5),)

    def forward(self, x):
        LOGGER.info("outer")
        return self.body(self, self.inner(x), x)


def counted(self, y, x):
    self.n += 1
    return y


def kept(self, y, x):
    self.seen.append(y.shape)
    return y


def in_place(self, y, x):
    x.add_(y)
    return x


def random_way(self, y, x):
    return y * 2 if torch.rand(()) < 0.5 else y


@pytest.mark.parametrize(
    "body",
    [
        counted, kept, in_place, random_way,
        lambda self, y, x: y * self.constant[0],
        lambda self, y, x: (y, object()),
        lambda self, y, x: (y, self.inner.weight),
        lambda self, y, x: dt.reshard(y, dt.ProcessMesh([1], ("x",))),
        lambda self, y, x: (y, torch.ones(3)),
        lambda self, y, x: torch.rand(5) + y,
    ],
    ids=[
        "counter", "list", "in_place", "rand", "constant", "object", "weight", "crossing", "plain",
        "noise",
    ],
)  # fmt: skip
def test_not_skipped(world, body):
    module, mesh = elsewhere(Plain, body=body)
    runs = [count(module, value(mesh, 4, 5) * 1.0, of="outer") for _ in range(4)]
    assert runs == [1, 1, 1, 1] and module.forward.why()


def test_an_input_that_is_written_to_depends_on_what_was_written(world):
    module, mesh = elsewhere(Writing)
    mine = dt.ProcessMesh([1], ("x",))
    for _ in range(3):
        x, y = (dt.reshard(value(mine, 4, 5, requires_grad=True) * 1.0, mesh) for _ in range(2))
        before = x.local
        module(x, y)
        assert x.local is not before and x.local is not y.local


def test_results_depend_on_the_inputs_that_they_are_made_of(world):
    """On a rank that sent x and y: the backward of a result waits for the gradients of its own
    inputs only."""
    module, mesh = elsewhere(Pairs)
    mine = dt.ProcessMesh([1], ("x",))
    for i in range(3):
        x, y = (dt.reshard(value(mine, 4, 5, requires_grad=True) * 1.0, mesh) for _ in range(2))
        out = module(x, y=y)
        if i == 0:
            module(x)
            continue
        assert not module.forward.why()
        assert out["a"].local is x.local and out["b"][0].local is y.local
        assert not out["b"][1].requires_grad
        out = module(x)
        assert out["b"][0].local is x.local


class Sum(nn.Module):
    """One result: of the inputs that it is told, in this order, and of a parameter."""

    def __init__(self, *of: int) -> None:
        super().__init__()
        self.scale, self.of = nn.Parameter(torch.ones(())), of

    def forward(self, *inputs):
        LOGGER.info("inner")
        return sum((inputs[i] for i in self.of), start=self.scale * 2)


@pytest.mark.parametrize("in_c", [True, False])
def test_a_single_result_depends_on_the_inputs_that_it_is_made_of(world, in_c):
    mine = dt.ProcessMesh([1], ("x",))
    cases = [((), []), ((0,), [0]), ((1, 1), [1]), ((1, 0), [0, 1]), ((2,), []), ((2, 0), [0])]
    for of, sources in cases:
        module, mesh = elsewhere(partial(Sum, *of))
        for i in range(2):
            x, y = (dt.reshard(value(mine, 4, 5, requires_grad=True) * 1.0, mesh) for _ in range(2))
            leaf = value(mesh, 4, 5, requires_grad=True)
            with native.using(in_c):
                before = CALLS.calls["inner"]
                out = module(x, y, leaf)
                with torch.no_grad():
                    assert module(x, y, leaf).local is token.no_grad_token(mesh.device)
            assert CALLS.calls["inner"] - before == (0 if i else 2) and not module.forward.why()
            local, sent = out.local, [(x, y)[s].local for s in sources]
            if not i:  # a real run, on tokens of its own
                continue
            if len(sent) == 2:  # two that carry on one transfer
                assert module(x, x * 2, leaf).local is x.local
            if len(sent) == 2:
                assert {n for n, _ in local.grad_fn.next_functions} == {t.grad_fn for t in sent}
            else:
                assert local is (sent[0] if sent else token.no_source_token(mesh.device))


def test_calls_of_one_tensor_differ_by_all_that_others_differ_by(world):
    """One positional tensor has a shorter key: each of what it leaves out runs the forward once."""
    block, mesh = elsewhere(Block)
    x, y = value(mesh, 4, 5), value(mesh, 4, 5, requires_grad=True)
    other = dt.shard_tensor(torch.ones(4, 5), mesh, [dt.Shard(0)])

    def of_another_dtype(x):
        torch.set_default_dtype(torch.float64)
        try:
            return block(x)
        finally:
            torch.set_default_dtype(torch.float32)

    def in_bfloat16(x):
        with torch.autocast("cpu", torch.bfloat16):
            return block(x)

    def by_ring(x):
        with dt.attention.policy("ring"):
            return block(x)

    def evaluated(x):
        block.eval()
        try:
            return block(x)
        finally:
            block.train()

    calls = [
        (block, x), (block, y), (block, other), (torch.no_grad()(block.__call__), x),
        (of_another_dtype, x), (in_bfloat16, x), (by_ring, x), (evaluated, x),
        (lambda x: block(x=x), x),
    ]  # fmt: skip
    assert [count(call, of) for call, of in calls] == [2] * len(calls)
    assert [count(call, of) for call, of in calls] == [0] * len(calls)


def test_never_skip(world):
    block, mesh = elsewhere(Block)
    assert [count(block, value(mesh, 4, 5)) for _ in range(2)] == [2, 0]
    assert dt.pipeline.never_skip(block.norm) is block.norm
    assert [count(block, value(mesh, 4, 5), of="outer") for _ in range(3)] == [1, 1, 1]
    assert [count(copy.deepcopy(block), value(mesh, 4, 5), of="outer") for _ in range(2)] == [1, 1]


def test_plain_inputs_run_the_forward(world):
    module, _ = elsewhere(Plain, body=lambda self, y, x: y)
    assert [count(module, torch.ones(4, 5), of="outer") for _ in range(3)] == [1, 1, 1]


@pytest.mark.filterwarnings("ignore::disttensor.errors.PieceWarning")
def test_copies_and_pickles(world):
    block, mesh = elsewhere(Block)
    block(value(mesh, 4, 5))
    assert "forward" not in block.state_dict()
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert isinstance(other.forward, Skip) and other.forward.module is other
        assert [count(other, value(mesh, 4, 5)) for _ in range(2)] == [2, 0]
    assert [count(block, value(mesh, 4, 5)) for _ in range(2)] == [0, 0]


def test_an_input_that_is_given_back_is_itself(world):
    module, mesh = elsewhere(Plain, body=lambda self, y, x: (x, y, x.view(20)))
    for _ in range(3):
        x = value(mesh, 4, 5)
        same, _, view = module(x)
        assert same is x and views.base_of(view) is x


def test_a_result_that_is_returned_twice_is_one_tensor(world):
    module, mesh = elsewhere(Plain, body=lambda self, y, x: {"a": y, "b": [y, (x, y), x * 2]})
    for _ in range(3):
        out = module(value(mesh, 4, 5))
        a, (b, (_, c), d) = out["a"], out["b"]
        assert a is b is c and d is not a
    assert not module.forward.why()


def test_results_that_share_memory_depend_on_what_is_written_to_either(world):
    body = {
        "results": lambda self, y, x: (y, y[:, 0]),
        "views": lambda self, y, x: (y.t(), y.view(20)),
        "an_input": lambda self, y, x: (x.view(20), y, x.t()),
    }
    mine = dt.ProcessMesh([1], ("x",))
    for each in body.values():
        module, mesh = elsewhere(Plain, body=each)
        for _ in range(3):
            # of a view of a tensor that is no input
            x = dt.reshard(value(mine, 2, 10, requires_grad=True) * 1.0, mesh).view(4, 5)
            out = module(x)
            w = dt.reshard(value(mine, 1, requires_grad=True) * 1.0, mesh)
            out[-1].mul_(w)
            assert w.local.grad_fn in nodes_of([out[0].local])


def test_a_result_has_the_strides_and_the_attributes_that_the_forward_gave_it(world):
    def named(self, y, x):
        y.note = "a"
        return y

    module, mesh = elsewhere(Plain, body=lambda self, y, x: y.t())
    noted, _ = elsewhere(Plain, body=named)
    for _ in range(3):
        out = module(value(mesh, 4, 5))
        assert out.stride() == (1, 5) and not out.is_contiguous()
        assert noted(value(mesh, 4, 5)).note == "a"


def test_a_result_follows_the_strides_and_the_attributes_of_its_input(world):
    def pair(self, y, x):
        return (x * 2, x.contiguous()) if getattr(x, "twice", False) else (x * 2,)

    module, mesh = elsewhere(Plain, body=pair)
    for _ in range(3):
        x = value(mesh, 4, 5)
        assert module(x)[0].is_contiguous() and len(module(x)) == 1
        assert module(value(mesh, 5, 4).t())[0].stride() == (1, 4)
        x.twice = True
        assert module(x)[1] is x


def test_a_single_input_or_view_of_it_that_is_given_back(world):
    same, mesh = elsewhere(Plain, body=lambda self, y, x: x)
    view, _ = elsewhere(Plain, body=lambda self, y, x: x.view(20))
    x = value(mesh, 4, 5)
    for i in range(3):
        before = CALLS.calls["outer"]
        assert same(x) is x and views.base_of(view(x)) is x
        assert CALLS.calls["outer"] - before == (0 if i else 2)


def test_a_tensor_that_is_an_attribute_counts_as_an_input(world):
    module, mesh = elsewhere(Plain, body=lambda self, y, x: y * self.beside)
    module.beside = value(mesh, 4, 5)
    x = value(mesh, 4, 5)
    assert [count(module, x) for _ in range(3)] == [1, 0, 0]
    module.beside.requires_grad_()
    assert [count(module, x) for _ in range(3)] == [1, 0, 0]


def test_shapes_that_always_change_end_the_trials(world):
    block, mesh = elsewhere(Block)
    for n in range(1, 40):
        assert tuple(block(value(mesh, n, 5)).shape) == (n, 5)
    assert block.forward.why() == ["it changes too often"]


def test_ranks_inside_run_as_ever():
    with fake_world(2, rank=0):
        block = dt.pipeline.skip(dt.shard_module(Block(), dt.ProcessMesh([0], ("x",))))
        assert "forward" not in block.__dict__
