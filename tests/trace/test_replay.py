"""A replay gives the bits of the calls one by one: values, gradients, placements, communication."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import FunctionType
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import get_world_size as world

import disttensor as dt
from disttensor import Partial, Replicate, Shard
from disttensor.pytree import collect
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.trace.twins import agree, one, twice

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


class MLP(nn.Module):
    def __init__(self, p: float = 0.0, norm: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.drop = nn.Linear(6, 10), nn.Linear(10, 6), nn.Dropout(p)
        self.norm = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}.get(norm, nn.Identity)(6)
        self.scale = 1.0

    def forward(self, x, *, skip: bool = True):
        y = self.down(self.drop(F.gelu(self.up(self.norm(x)))))
        return x + y * self.scale if skip else y


class Attention(nn.Module):
    """One block of a transformer: causal attention, SwiGLU, RMS norms."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm1, self.norm2 = nn.RMSNorm(8), nn.RMSNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down, self.p = nn.Linear(12, 8, bias=False), p

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (4, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


TP = {f"{n}.weight": [R, S0] for n in ("q", "k", "v", "gate", "up")} | {
    f"{n}.weight": [R, S1] for n in ("o", "down")
}


def mesh_of(n: int) -> dt.ProcessMesh:
    return dt.init_mesh({1: (1, 1), 2: (1, 2), 4: (2, 2)}[n], ("dp", "tp"))


def fed(mesh, *shape, at=(S0, R), grad=True, seed=0):
    """A batch: the same numbers each time, in a new tensor."""
    data = randn(*shape, seed=seed, dtype=torch.float32)

    def make():
        x = dt.shard_tensor(data, mesh, at)
        return (x.requires_grad_(grad),)

    return make


LAYOUTS = [(R, R), (S0, R), (S0, S1), (R, S0), (S1, R)]


@on_ranks(4)
@pytest.mark.parametrize("at", LAYOUTS, ids=str)
@pytest.mark.parametrize("tp", [False, True])
def test_mlp(at, tp):
    mesh = mesh_of(world())
    plan = {"up.*": [R, S0], "down.weight": [R, S1]} if tp else {}
    batch = fed(mesh, 5, 6, at=at)
    agree(lambda: dt.shard_module(MLP(), mesh, plan), batch, batch, batch)


@on_ranks(1)
@pytest.mark.parametrize("make", [MLP, lambda: MLP(0.5), lambda: MLP(0.0, "layer")])
def test_on_a_mesh_of_one(make):
    mesh = mesh_of(world())
    batch = fed(mesh, 5, 6)
    agree(lambda: dt.shard_module(make(), mesh, {}), batch, batch, batch)


@pytest.mark.feature("Replay")
@on_ranks(2)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_transformer_block_of_two_ranks(p):
    mesh = mesh_of(world())
    batch = fed(mesh, 3, 5, 8, at=(R, R))
    agree(lambda: dt.shard_module(Attention(p), mesh, TP), batch, batch, batch)


@on_ranks(4)
@pytest.mark.parametrize("at", [(S0, R), (S0, S1), (R, R)], ids=str)
def test_transformer_block_of_data_and_tensor_parallel_ranks(at):
    mesh = mesh_of(world())
    batch = fed(mesh, 3, 5, 8, at=at)
    agree(lambda: dt.shard_module(Attention(0.2), mesh, TP), batch, batch, batch)


@on_ranks(4)
@pytest.mark.parametrize("policy", ["fast", "invariant"])
@pytest.mark.parametrize("at", [(S0, R), (S0, S1)], ids=str)
def test_dropout_draws_what_it_would_draw(policy, at):
    mesh = mesh_of(world())
    batch = fed(mesh, 5, 6, at=at)
    make = twice(dt.shard_module(MLP(0.5), mesh, {}))
    agree(make, batch, batch, batch, around=lambda: dt.random.rng(policy))


@on_ranks(2)
def test_random_numbers_go_on_from_replay_to_replay():
    mesh = mesh_of(world())
    (x,) = fed(mesh, 5, 6)()
    drop = dt.replay(lambda t: F.dropout(t, 0.5))
    dt.manual_seed(1)
    fast = [drop(x).full_tensor() for _ in range(4)]
    dt.manual_seed(1)
    slow = [F.dropout(x, 0.5).full_tensor() for _ in range(4)]
    assert all(map(torch.equal, fast, slow)) and not torch.equal(fast[1], fast[2])
    assert drop.replays == 3


@on_ranks(4)
@pytest.mark.parametrize("at", [(S0, R), (S1, R), (R, R)], ids=str)
def test_batch_norm_keeps_its_statistics(at):
    mesh = mesh_of(world())
    batch = fed(mesh, 6, 6, at=at)
    steps = [None, None, None, lambda m: m.eval(), None]
    module = dt.shard_module(MLP(0.0, "batch"), mesh, {})
    agree(twice(module), *[batch] * 5, steps=steps, replays=3)


@on_ranks(2)
def test_modes_and_shapes_have_programs_of_their_own():
    mesh = mesh_of(world())
    short, long = fed(mesh, 5, 6, at=(R, S0)), fed(mesh, 7, 6, at=(R, S0))
    train, rest = nn.Module.train, nn.Module.eval
    steps = [train, None, rest, rest, train, train, train]
    batches = [short, short, short, short, long, long, short]
    fast = agree(twice(dt.shard_module(MLP(0.4), mesh, {})), *batches, steps=steps, replays=4)
    assert len(fast.forward.programs) == 3


@on_ranks(2)
@pytest.mark.parametrize("grad", [False, True])
def test_without_gradients(grad):
    mesh = mesh_of(world())
    batch = fed(mesh, 5, 6, at=(R, S0), grad=grad)
    make = twice(dt.shard_module(MLP(), mesh, {}))
    agree(make, batch, batch, around=torch.no_grad, backward=False)
    agree(make, batch, batch, around=torch.inference_mode, backward=False)


@on_ranks(2)
def test_autocast_on_and_off():
    mesh = mesh_of(world())
    batch = fed(mesh, 5, 6, at=(R, S0))
    on = {"now": False}

    def switch(flag):
        return lambda _: on.update(now=flag)

    steps = [switch(f) for f in (False, True, True, False, True)]
    make = twice(dt.shard_module(MLP(), mesh, {"up.*": [R, S0], "down.weight": [R, S1]}))

    def around():
        return torch.autocast("cpu", torch.bfloat16, enabled=on["now"])

    agree(make, *[batch] * 5, around=around, steps=steps, replays=3)


# What is run in place of a call of torch -> how many lines there are in all, less results
SHORTER = {
    "a body in Python": (lambda x: F.layer_norm(F.silu(x), (6,)), ["silu", "layer_norm"]),
    "one that stays": (lambda x: F.pad(F.relu(x), (1, 1)), ["relu", "F.pad"]),
    "a cast to its own dtype": (lambda x: x.relu().float().to(torch.float32), ["relu"]),
    "a permutation of one dim": (lambda x: x[0].permute(0) * 2, ["__getitem__", "permute", "mul"]),
    "two transposes": (lambda x: x[:, None].transpose(0, 1).permute(1, 2, 0) * 2,
                       ["__getitem__", "permute", "mul"]),
    "three": (lambda x: x.exp().t().transpose(0, 1).transpose(1, 0).transpose(0, 1) * 2,
              ["exp", "t", "permute", "mul"]),
    "one that is read twice": (lambda x: (lambda y: y.transpose(0, 1) @ y)(x.transpose(0, 1)),
                               ["transpose", "transpose", "matmul"]),
    "one that is a result": (lambda x: (lambda y: (y, y.transpose(0, 1) * 2))(x.transpose(0, 1)),
                             ["transpose", "transpose", "mul"]),
    "a loss on one rank": (lambda x: F.cross_entropy(x, x.argmax(1)),
                           ["argmax", "cross_entropy_loss"]),
}  # fmt: skip


@on_ranks(1)
@pytest.mark.parametrize("name", SHORTER)
def test_the_lines_of_a_program(name):
    batch = fed(mesh_of(1), 6, 6)
    f, names = SHORTER[name]
    fast = agree(lambda: lambda x: f(x), batch, batch, batch)
    ((run, text, *_),) = fast.recorded()
    called = [run.__globals__[c] for c in re.findall(r"= (c\d+)\(t", text)]
    python = {True: "F.", False: ""}
    found = [python[isinstance(c, FunctionType)] + c.__name__ for c in called]
    assert found == names, text


class Pair(NamedTuple):
    first: torch.Tensor
    rest: list[torch.Tensor]


# Functions of x [5, 6] and y [5, 6]: arguments, nests, views, writes.
FUNCTIONS = {
    "nests": lambda x, y: {"a": x + y, "b": [x * 2, (y.sum(), None, 3)], "c": Pair(x - y, [y])},
    "the same tensor twice": lambda x, y: (lambda z: (z, z))(x * y),
    "arguments come back": lambda x, y: (y, x, x + y),
    "view of an argument": lambda x, y: (x.view(5, 3, 2), y.t(), x[:, None]),
    "contiguous is itself": lambda x, y: (x.contiguous(), y.contiguous() * 1),
    "writes to what it made": lambda x, y: (x * 2).mul_(y).add_(1),
    "writes to a view": lambda x, y: (lambda z: (z[:, 1:].mul_(3), z)[1])(x * y),
    "sets an item": lambda x, y: (lambda z: (z.__setitem__(0, 7.0), z)[1])(x * y),
    "plain tensors": lambda x, y: x + torch.arange(6.0) * torch.ones(5, 1) + y,
    "plain random": lambda x, y: x * torch.rand(5, 6) + torch.randn(6) * y,
    "detached": lambda x, y: (x.detach() * y, (x * y).detach()),
    "no_grad inside": lambda x, y: (_constant(x), x * _constant(y)),
    "gather": lambda x, y: x.full_tensor() * 2,
    "piece": lambda x, y: x.to_local() * 2,
    "reductions": lambda x, y: x / x.sum(0) + (y.mean(1, keepdim=True) + x.amax()),
    "shared sums": lambda x, y: (lambda s: s.relu() + s.sigmoid() + s)(x.sum(0) + y.sum(0)),
    "pending result": lambda x, y: ((x * y).sum(0), x.sum()),
    "reduced result": lambda x, y: (lambda s: (s, s.relu()))((x * y).sum(0)),
    "norm": lambda x, y: F.layer_norm(x, (6,)) @ F.softmax(y, -1).t(),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "stack": lambda x, y: torch.cat([torch.stack([x, y]).sum(0), x.chunk(2, 1)[0]], 1),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], x[None]),
    "losses": lambda x, y: F.cross_entropy(x, y.argmax(1)) + F.mse_loss(x, y),
    "cast": lambda x, y: (x.double() * y.to(torch.float64)).float(),
    "cumulative": lambda x, y: x.cumsum(0) + y.flip(1).roll(1, 0),
    "where": lambda x, y: torch.where(x > 0, x, y).masked_fill(y > 1, 0.0),
    "reshard": lambda x, y: dt.reshard(x, x.process_mesh, [R, R]).relu() * y,
    "reshard and give": lambda x, y: dt.reshard(x * 2, x.process_mesh, [R, R]),
    "custom function": lambda x, y: Tripled.apply(x.to_local() * 2) * y.sum().to_local(),
    "local_map": lambda x, y: _on_pieces(x, y),
}  # fmt: skip


class Tripled(torch.autograd.Function):
    """Its gradient is not that of what it computes."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3


COPIED = ("view of an argument", "writes to a view")  # a copy in some layouts: not recorded


def _on_pieces(x, y):
    at = [x.placements, x.placements]
    run = dt.local_map(
        lambda a, b: a.exp() * b.mean(),
        in_placements=at,
        out_placements=[x.placements],
        out_shapes=[(5, 6)],
    )
    return run(x, y)


@torch.no_grad()
def _constant(x):
    return x * 3


@on_ranks(4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_all_kinds(name):
    mesh = mesh_of(world())
    f = FUNCTIONS[name]
    for at in [((S0, R), (S0, R)), ((S0, R), (R, R)), ((R, S1), (S0, S1))]:
        for grads in [(True, True), (False, True)]:

            def batch(at=at, grads=grads):
                return sum((
                    fed(mesh, 5, 6, at=p, grad=g, seed=i)()
                    for i, (p, g) in enumerate(zip(at, grads, strict=True))
                ), ())  # fmt: skip

            count = -1 if name in COPIED and at[0] == (R, S1) else None
            agree(lambda: lambda x, y: f(x, y), batch, batch, batch, replays=count)


@on_ranks(2)
@pytest.mark.parametrize("way", ["leaf", "product", "view", "moved"])
def test_however_an_argument_was_made(way):
    mesh = mesh_of(world())
    made = {
        "leaf": lambda x: x, "product": lambda x: x * 1.0, "view": lambda x: x.view(5, 6),
        "moved": lambda x: dt.reshard(x, mesh, [R, R]),
    }[way]  # fmt: skip
    batch = fed(mesh, 5, 6, at=(R, S0) if way == "moved" else (R, R))
    module = dt.shard_module(MLP(), mesh, {"up.*": [R, S0], "down.weight": [R, S1]})

    def make():
        net = dt.replay(twice(module)()) if make.fast else twice(module)()
        return lambda x: net(made(x))

    results = []

    for fast in (False, True):
        make.fast = fast
        f = make()
        results.append([one(f, [], batch(), nullcontext, True) for _ in "abc"])
    assert results[0] == results[1]


@on_ranks(2)
def test_the_gradients_of_a_gradient():
    mesh = mesh_of(world())
    (x,) = fed(mesh, 5, 6, at=(R, S0))()
    found = []
    for wrap in (lambda f: f, dt.replay):
        net = dt.shard_module(MLP(0.0, "layer"), mesh, {"up.*": [R, S0], "down.weight": [R, S1]})
        f = wrap(lambda t, net=net: net(t).square().sum())
        for _ in range(3):
            (g,) = torch.autograd.grad(f(x), x, create_graph=True)
            second = torch.autograd.grad(g.square().sum(), [x, *net.parameters()])
        found.append([t.full_tensor() for t in (g, *second)])
    assert all(map(torch.equal, *found))


@on_ranks(2)
def test_gradients_add_up_over_calls():
    mesh = mesh_of(world())
    found = []
    for fast in (False, True):
        net = dt.shard_module(MLP(), mesh, {})
        net = dt.replay(net) if fast else net
        for i in range(4):
            (x,) = fed(mesh, 5, 6, at=(R, S0), seed=i)()
            net(x).sum().backward()
        found.append([p.grad.full_tensor() for p in net.parameters()])
    assert all(map(torch.equal, *found))


@on_ranks(2)
def test_a_result_that_the_caller_writes_to():
    mesh = mesh_of(world())
    f = dt.replay(lambda x: x * 2)
    (x,) = fed(mesh, 5, 6, at=(R, S0), grad=False)()
    for _ in range(3):
        y = f(x)
        assert torch.equal(y.full_tensor(), x.full_tensor() * 2)
        y.zero_()
    assert f.replays == 2


@on_ranks(2)
@pytest.mark.parametrize("at", [(R, S0), (R, R)], ids=str)
def test_writes_to_arguments(at):
    mesh = mesh_of(world())

    def make():
        return lambda x, y: (x.add_(y.sum(0)), x[:, 0].mul_(2), y + x)[0]

    def batch():
        return fed(mesh, 5, 6, at=at, grad=False)() + fed(mesh, 5, 6, at=(R, S0), seed=1)()

    agree(make, batch, batch, batch)


@on_ranks(2)
def test_arguments_by_name_and_constants():
    mesh = mesh_of(world())
    x = fed(mesh, 5, 6, at=(R, S0))
    make = twice(dt.shard_module(MLP(), mesh, {}))
    yes, no = (lambda: (*x(), {"skip": True})), (lambda: (*x(), {"skip": False}))
    agree(make, yes, no, yes, no, x, replays=2)
    numbers = [(2, 1.0), (2, 1.0), (2, 3.0), (2.0, 1.0), (True, 1)]
    batches = [(lambda n=n, s=s: (*x(), n, s)) for n, s in numbers]
    f = agree(lambda: lambda x, n, s: x * n + s, *batches, replays=1)
    assert len(f.programs) == 4


@on_ranks(2)
def test_one_tensor_as_two_arguments_is_another_kind_of_call():
    mesh = mesh_of(world())
    x, y = fed(mesh, 5, 6, at=(R, S0)), fed(mesh, 5, 6, at=(R, S0), seed=1)

    def same():
        (a,) = x()
        return a, a

    agree(lambda: (lambda a, b: a * 2 + b * b), same, lambda: x() + y(), same, lambda: x() + y(),
          replays=2)  # fmt: skip


@on_ranks(2)
def test_a_program_keeps_no_tensor_of_its_recording():
    mesh = mesh_of(2)

    def forward(x):
        y = (x * 2).redistribute(placements=[R, R])
        return torch.cat([y.sin(), y]).sum()

    fast = dt.replay(forward)
    (x,) = fed(mesh, 5, 6, at=(R, S1), grad=False)()
    fast(x)
    (program,) = fast.recorded()
    calls = [line.call for line in program.lines if line.call is not None]
    assert len(calls) >= 5 and not collect([line.value for line in program.lines], [])


class Reordered(NamedTuple("Fields", [("logits", torch.Tensor), ("loss", torch.Tensor)])):
    """A result whose constructor takes its fields in another order."""

    def __new__(cls, loss, logits):
        return super().__new__(cls, logits, loss)


class Name(NamedTuple):
    layer: int
    kind: str


def ends_at_a_tensor(x, t, n):
    return x * t[:n].sum()


RESULTS = {
    "a tuple with its own constructor": lambda x: Reordered(loss=x * 0, logits=x * 1),
    "a dict with tuples as keys": lambda x: {Name(0, "a"): x * 2, (1, None): x * 3, -1: x},
    "slices": lambda x: (x[1:] * 1, x[:, :-1] * 1, x[..., None] * 1),
}


@pytest.mark.parametrize("name", RESULTS)
@on_ranks(2)
def test_results_of_each_form(name):
    mesh, forward = dt.init_mesh((2,), ("tp",)), RESULTS[name]
    fast = dt.replay(forward)
    x = dt.shard_tensor(torch.arange(15.0).view(5, 3), mesh, [S1])
    for _ in range(4):
        got, want = fast(x), forward(x)
        assert type(got) is type(want)
        if isinstance(want, dict):
            assert [*got] == [*want]
            got, want = got.values(), want.values()
        for a, b in zip(got, want, strict=True):
            assert a.spec == b.spec and torch.equal(a.to_local(), b.to_local())
    assert fast.replays == 3 and not fast.why()


@on_ranks(2)
def test_a_slice_that_ends_at_a_tensor_is_read_in_each_call():
    mesh = dt.init_mesh((2,), ("tp",))
    x, fast = dt.ones(4, mesh=mesh, placements=[S0]), dt.replay(ends_at_a_tensor)
    for n in (1, 2, 3):
        assert fast(x, torch.ones(9), torch.tensor(n)).sum().item() == 4 * n
    assert fast.why() == ["a slice ends at a tensor, whose value torch reads"]
