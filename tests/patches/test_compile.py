"""torch.compile of programs on DistTensors: right on every rank, as no frame of ours is compiled,
or an error that says so where a whole graph is asked for."""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.func import grad, vmap

import disttensor as dt
from disttensor import Partial, Replicate, Shard, errors
from tests.support.oracle import line, place, randn
from tests.support.pool import on_ranks

# Python 3.13.0 has a flaw, of which Dynamo warns
pytestmark = [
    pytest.mark.filterwarnings("ignore:Guards may run slower"),
    pytest.mark.filterwarnings("ignore:torch.compile ends its graph"),
]

LAYOUTS = ([Replicate()], [Shard(0)], [Shard(1)], [Partial()])
MODES = {
    "eager": {"backend": "eager"},
    "dynamic": {"backend": "aot_eager", "dynamic": True},
}


def f32(*shape: int) -> Tensor:
    return randn(*shape, dtype=torch.float32)


def same(x: Any, expected: Tensor) -> None:
    whole = x.full_tensor() if isinstance(x, dt.DistTensor) else x
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)


def compiled(function: Any, **how: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, **how)


def branching(a: Any, b: Any) -> Any:
    total = {"sum": (a * b).sum()}
    if total["sum"].item() > 0:
        return total["sum"] * torch.arange(3.0).sum()
    return total["sum"] - a.shape[0]


def looping(a: Any, b: Any) -> Any:
    total = torch.zeros(3)
    for row in range(a.shape[0]):
        total = total + a[row] * b[row].max()
    return total


def mixed(a: Any, b: Any) -> Any:
    """Plain tensors, which are compiled, between calls on DistTensors."""
    scale = torch.linspace(0.0, 1.0, 3).exp().cumsum(0) * 2 - 1
    return ((a - b) * scale).relu().sum(1) + scale.sum().sin()


PROGRAMS = [
    lambda a, b: a.relu().sum(), lambda a, b: (a + b).sum() * (a - b).mean(), branching, looping,
    lambda a, b: torch.cat([a, b]).softmax(1).cos().sum(0), lambda a, b: a.clone().add_(b).mul_(2),
    mixed,
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, timeout=240)
def test_compiled_functions_give_what_plain_ones_do(mode: str) -> None:
    a, b = f32(5, 3), f32(5, 3).flip(0)
    for program in PROGRAMS:
        run = compiled(program, **MODES[mode])
        for layout in LAYOUTS:
            same(run(*[place(t, line(), layout) for t in (a, b)]), program(a, b))
        same(run(a, b), program(a, b))  # plain tensors as before
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(3, 5), nn.Linear(5, 3), nn.LayerNorm(3)

    def forward(self, x: Any) -> Any:
        return self.norm(x + self.down(torch.relu(self.up(x)))).square().mean()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2, timeout=240)
def test_a_compiled_model_trains_as_one_process(stage: int) -> None:
    x = f32(5, 3)
    nets = []
    for ours in (False, True):
        torch.manual_seed(0)
        net = Net()
        run: Any = net
        if ours and stage:
            dt.shard_data_parallel(net, line(), shard_axis="x", stage=stage)
        elif ours:
            dt.shard_module(net, line(), {"up.weight": [Shard(0)], "up.bias": [Shard(0)]})
        if ours:
            run = compiled(net, backend="aot_eager")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            run(place(x, line(), [Shard(0)]) if ours else x).backward()
            optimizer.step()
        nets.append(net)
    plain, ours = nets
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        same(q.detach(), p.detach())
    torch._dynamo.reset()


@on_ranks(2, timeout=240)
def test_a_whole_graph_is_refused_by_name_and_plain_tensors_have_theirs() -> None:
    a = f32(5, 3)
    for backend in ("eager", "aot_eager"):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?i)disttensor"):
            whole = compiled(lambda x: x.relu().sum(), fullgraph=True, backend=backend)
            whole(place(a, line(), [Shard(0)]))
    cosines = vmap(grad(lambda t: t.sin().sum()))
    same(compiled(cosines, fullgraph=True, backend="eager")(a), a.cos())
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")  # aten.linear has no rule
@on_ranks(2, timeout=240)
def test_an_exported_model_runs_on_other_values() -> None:
    torch.manual_seed(0)
    plain, ours, a = nn.Linear(3, 4), nn.Linear(3, 4), f32(5, 3)
    ours.load_state_dict(plain.state_dict())
    dt.shard_module(ours, line(), {"weight": [Shard(0)], "bias": [Shard(0)]})
    for layout in LAYOUTS[1::2]:
        program = torch.export.export(ours, (place(a, line(), layout),)).module()
        same(program(place(a.cos(), line(), layout)), plain(a.cos()))


def fused(x: Tensor, gate: Tensor) -> Tensor:
    return (x * gate.sigmoid()).square().mean(-1, keepdim=True) + x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules of torch, as they load
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@on_ranks(2, timeout=240)
def test_the_locals_of_local_map_compile_with_inductor() -> None:
    """Forward and backward, on pieces of 3 and 2 rows, in one graph each."""
    torch._dynamo.reset()
    counters.clear()
    run = dt.local_map(
        torch.compile(fused), in_placements=[[Shard(0)]] * 2, out_placements=[Shard(0)]
    )
    values = [f32(5, 3), f32(5, 3).flip(0)]
    ours = [place(t, line(), [Shard(0)]).requires_grad_() for t in values]
    plain = [t.clone().requires_grad_() for t in values]
    out, expected = run(*ours), fused(*plain)
    same(out, expected)
    out.sum().backward()
    expected.sum().backward()
    for t, p in zip(ours, plain, strict=True):
        same(t.grad, p.grad)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    torch._dynamo.reset()


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 1


@pytest.mark.parametrize("way", ["torch.compile", "compile", "function"])
@on_ranks(2)
def test_one_warning_names_dt_compile(way: str) -> None:
    net = dt.shard_module(Shifted(), line(), {"linear.weight": [Shard(0)]})
    x = place(f32(5, 3), line(), [Shard(0)])
    expected = net(x).full_tensor()
    errors.warned.discard("torch.compile")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net.to(torch.float32)  # asks for the parts of a tensor too
        dt.compile(lambda y: y + 1, backend="eager")(x)
        assert not caught
        run: Any = net
        if way == "compile":
            net.compile(backend="eager")
        else:
            run = compiled(net if way == "torch.compile" else net.forward, backend="eager")
        for _ in range(3):
            same(run(x), expected)
    (warning,) = caught
    assert "dt.compile(model)" in str(warning.message) and warning.filename == __file__
    torch._dynamo.reset()


@on_ranks(2)
def test_a_graph_that_breaks_at_every_call_is_made_once() -> None:
    """No frame of a model of DistTensors is looked at again."""
    torch._dynamo.reset()
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    dt.shard_module(net, line(), {})
    run, x = torch.compile(net, backend="eager"), place(f32(5, 3), line(), [Shard(0)])
    run(x)
    counters.clear()
    for _ in range(3):
        same(run(x), net(x).full_tensor())
    assert not counters["stats"] and not counters["graph_break"], dict(counters)
    torch._dynamo.reset()
