"""Custom autograd functions that use DistTensors besides their arguments, as those of implicit
layers, adjoint methods and reversible networks do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import disttensor as dt
from disttensor import DistTensor, ProcessMesh, Replicate, Shard
from tests.support.oracle import fallbacks, grid, randn
from tests.support.pool import on_ranks
from tests.support.training import line

R, S0, S1 = Replicate(), Shard(0), Shard(1)
X = randn(5, 3, seed=3)


class Adjoint(torch.autograd.Function):
    """The backward differentiates the closure with respect to the saved arguments."""

    @staticmethod
    def forward(ctx: Any, f: Any, y: Tensor, *params: Tensor) -> Tensor:
        ctx.f = f
        ctx.save_for_backward(y, *params)
        return y + f(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        y, *params = ctx.saved_tensors
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            found = torch.autograd.grad(y + ctx.f(y), (y, *params), g, allow_unused=True)
        zeros = (torch.zeros_like(p) for p in (y, *params))
        return None, *(z if q is None else q for z, q in zip(zeros, found, strict=True))


class Read(torch.autograd.Function):
    """The closure reads the arguments itself. The other way to write a function."""

    @staticmethod
    def forward(f: Any, *params: Tensor) -> Tensor:
        return f()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.f = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def vjp(ctx: Any, g: Tensor) -> Any:
        with torch.enable_grad():
            out = ctx.f()
        wanted = ctx.saved_tensors
        return None, *torch.autograd.grad(out, wanted, g, allow_unused=True, retain_graph=True)


class Implicit(torch.autograd.Function):
    """The forward makes a graph, which the backward goes back."""

    @staticmethod
    def forward(ctx: Any, f: Any, x: Tensor, *params: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            ctx.wanted, ctx.out = (x, *params), f(x) * 2 + x
        extra = ctx.out.detach() * 3
        ctx.mark_non_differentiable(extra)
        return ctx.out.detach(), extra

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> Any:
        found = torch.autograd.grad(ctx.out, ctx.wanted, g, allow_unused=True, retain_graph=True)
        return None, *found


class Reversible(torch.autograd.Function):
    """Parameters that the closure reads get their gradients by a backward in the backward."""

    @staticmethod
    def forward(ctx: Any, f: Any, x: Tensor) -> Tensor:
        ctx.f = f
        ctx.save_for_backward(x)
        return x + f(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = x + ctx.f(x)
        torch.autograd.backward(y, g)
        return None, x.grad


def adjoint_twice(m: Any, h: Tensor) -> Tensor:
    params = tuple(m.parameters())
    return Adjoint.apply(m, Adjoint.apply(m, h, *params), *params[:2]) + m(h)


def read(m: Any, h: Tensor) -> Tensor:
    k = (m[0].weight * 2).view(-1)
    w = m[2].weight
    return Read.apply(lambda: (h @ k.view(4, 3).t()).sin() @ w.t(), h, k, w, m[0].weight)


def implicit(m: Any, h: Tensor) -> Tensor:
    out, extra = Implicit.apply(m, h, *m.parameters())
    assert out.requires_grad and not extra.requires_grad
    return out + extra


def implicit_without_parameters(m: Any, h: Tensor) -> Tensor:
    """What it asks for lies in the graph of a module, whose other results come after it."""
    out: Tensor = Implicit.apply(m, h)[0] + m(h)
    return out


def reversible(m: Any, h: Tensor) -> Tensor:
    return Reversible.apply(m, Reversible.apply(m, h)) + m(h)


class Model(nn.Module):
    def __init__(self, layer: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.m = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        self.w = nn.Parameter(torch.linspace(0.5, 1, 3).double())
        self.layer = layer

    def forward(self, x: Tensor, inner: bool = True) -> Tensor:
        return self.layer(self.m, x * self.w if inner else x).sin().mul(self.w).sum()


WITH_PARAMETERS = [adjoint_twice, read, implicit]
LAYERS = [*WITH_PARAMETERS, implicit_without_parameters, reversible]


def trained(model: Model, x: Any) -> list[Any]:
    """Losses and gradients of two steps, the second of two backwards."""
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    out: list[Any] = []
    for step in range(2):
        loss = model(x, inner=step == 0)
        loss.backward()
        if step == 1:
            model(x).backward()
        out += [loss.detach(), x.grad, *(p.grad for p in model.parameters())]
        opt.step()
        opt.zero_grad()
        x.grad = None
    return out


def same(shard: Callable[[Model], Any], layer: Any) -> None:
    """``shard`` makes a model one on a mesh, and gives its input."""
    want = trained(Model(layer), X.clone().requires_grad_())
    model = Model(layer)
    x = shard(model)
    with fallbacks():
        got = trained(model, x)
    if not model.w.is_initialized:
        return  # gradients are where the values are
    whole = [t.full_tensor() if isinstance(t, DistTensor) else t for t in got]
    assert [t is None for t in whole] == [t is None for t in want], layer
    torch.testing.assert_close(whole, want, msg=lambda m: f"{layer.__name__}: {m}")


def on_input(mesh: ProcessMesh, placements: Any) -> DistTensor:
    return dt.shard_tensor(X, mesh, placements, requires_grad=True)


@on_ranks(2)
def test_a_closure_that_is_differentiated_in_a_backward_has_all_gradients():
    def data_parallel(model: Model) -> Any:
        dt.shard_module(model, line(), {})
        return on_input(line(), [S0])

    def tensor_parallel(model: Model) -> Any:
        dt.shard_module(model, line(), {"m.0.*": [S0], "m.2.weight": [S1]})
        return on_input(line(), [R])

    def plain_input(model: Model) -> Any:
        dt.shard_module(model, line(), {})
        return X.clone().requires_grad_()

    for layer in LAYERS:
        same(data_parallel, layer)
        same(tensor_parallel, layer)
        if layer in WITH_PARAMETERS:  # else no argument is a DistTensor
            same(plain_input, layer)


@on_ranks(4, timeout=120.0)
def test_a_closure_on_a_grid_and_on_other_ranks_than_these():
    def on_grid(model: Model) -> Any:
        dt.shard_module(model, grid(), {"m.0.*": [R, S0], "m.2.weight": [R, S1]})
        return on_input(grid(), [S0, R])

    def outside(model: Model) -> Any:
        mesh = ProcessMesh([1, 2], ("x",))
        dt.shard_module(model, mesh, {"m.0.weight": [S0]})
        return on_input(mesh, [S0])

    for layer in LAYERS[::2]:
        same(on_grid, layer)
    for layer in (adjoint_twice, reversible):
        same(outside, layer)


@pytest.mark.parametrize(
    ("stage", "segments"), [(1, None), (2, ["m.0", "m.2"]), (3, None), (3, ["m.0", "m.2"])]
)
@on_ranks(2)
def test_a_closure_under_shard_data_parallel(stage: int, segments: Any):
    options: Any = {"segments": segments} if segments else {}

    def whole(model: Model) -> Any:
        dt.shard_module(model, line(), {})
        dt.shard_data_parallel(model, line(), stage=stage, **options)
        return on_input(line(), [S0])

    for layer in LAYERS:
        same(whole, layer)


@on_ranks(2)
def test_a_function_of_plain_tensors_that_gives_a_dist_tensor_is_refused():
    m = dt.shard_module(nn.Linear(3, 3).double(), line(), {})
    x = X.clone().requires_grad_()
    with pytest.raises(
        dt.errors.CustomFunctionError, match=r"Reversible.apply at .*no argument is a Dist"
    ):
        Reversible.apply(m, x)
    with torch.no_grad():
        assert isinstance(Reversible.apply(m, x), DistTensor)
    assert isinstance(Reversible.apply(m, X), DistTensor)
