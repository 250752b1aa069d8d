"""What follows tensors through C++ or by their class: transforms, tracers, custom
autograd functions. Right on every rank, or refused by name, and never a wrong number."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import disttensor as dt
from disttensor import Partial, Replicate, Shard
from tests.support.oracle import line, place, randn
from tests.support.pool import on_ranks

LAYOUTS = ([Replicate()], [Shard(0)], [Shard(1)], [Partial()])


def f32(*shape: int) -> Tensor:
    return randn(*shape, dtype=torch.float32)


def same(x: Any, expected: Tensor) -> None:
    whole = x.full_tensor() if isinstance(x, dt.DistTensor) else x
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)


# Transforms and tracers ---------------------------------------------------------------------------


@on_ranks(2, timeout=120)  # imports torch's compiler
def test_transforms_take_a_distributed_constant_whole_or_refuse_it() -> None:
    x, w = f32(5, 3), f32(5, 3).cos()

    def scaled(by: Any) -> Any:
        return lambda t: (t * by).sin().sum()

    def dual(t: Any) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(scaled(t)(forward_ad.make_dual(x, x))).tangent

    constants = {
        "grad": lambda by: grad(scaled(by))(x),
        "vjp": lambda by: vjp(scaled(by), x)[1](torch.tensor(1.0))[0],
        "jacrev": lambda by: jacrev(lambda t: (t * by).sum(0))(x),
        "vmap": lambda by: vmap(lambda i: by[i])(torch.tensor([4, 0, 2])),
        "vmap of grad": lambda by: vmap(grad(scaled(by)))(x.expand(2, 5, 3)),
        "jvp": lambda by: jvp(scaled(by), (x,), (x,))[1],
        "jvp of an input": lambda by: jvp(scaled(x), (by,), (by * 2,))[1],
        "jacfwd": lambda by: jacfwd(scaled(by))(x),
        "hessian": lambda by: hessian(scaled(by))(x),
        "dual_level": dual,
    }
    refused = {
        "linearize": lambda by: linearize(scaled(by), x),
        "functionalize": lambda by: functionalize(scaled(by))(x),
        "make_fx": lambda by: make_fx(scaled(by))(x),
        "jit.trace": lambda by: torch.jit.trace(scaled(by), (x,)),
        "grad of an input": lambda by: grad(scaled(x))(by),
        "vjp of an input": lambda by: vjp(scaled(x), by),
        "vmap of an input": lambda by: vmap(scaled(x[0]))(by),
        "make_fx of an input": lambda by: make_fx(scaled(x))(by),
        "jit.trace of an input": lambda by: torch.jit.trace(scaled(x), (by,)),
        "a write": lambda by: vmap(lambda t: by.add_(1.0))(x),
    }
    for layout in LAYOUTS[1::2]:
        mine = place(w, line(), layout)
        for run in constants.values():
            with warnings.catch_warnings():  # torch.jit, by the first use of forward mode
                warnings.simplefilter("ignore", DeprecationWarning)
                same(run(mine), run(w))
        for name, run in refused.items():
            with warnings.catch_warnings():
                for kind in (DeprecationWarning, FutureWarning):  # of torch.jit
                    warnings.simplefilter("ignore", kind)
                with pytest.raises(NotImplementedError, match=r"inside .*full_tensor"):
                    run(mine)
                    pytest.fail(name)
        same(mine * 1.0, w)  # as it was
    mine = place(w, line(), [Shard(0)])
    product = lambda t: t.sin() * t.sum()  # noqa: E731
    jvp_by_grad = torch.autograd.functional.jvp
    same(jvp_by_grad(product, mine, mine)[1], jvp_by_grad(product, w, w)[1])


# Custom functions ---------------------------------------------------------------------------------


class Old(torch.autograd.Function):
    """Two results, a constant, saved tensors; its backward is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        ctx.by = by
        assert type(x) is Tensor and type(w) is Tensor and x.shape == (5, 3)
        return x * w * by, x.sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w * ctx.by + h, None, (g * x * ctx.by).sum(0)


class New(torch.autograd.Function):
    """With setup_context; differentiable twice; one result is marked."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Any:
        return x.square() * w, x.argmax(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        x, w = ctx.saved_tensors
        return 2 * g * x * w, (g * x.square()).sum(0) if ctx.needs_input_grad[1] else None


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3


def old(x: Any, w: Any) -> Any:
    a, b = Old.apply(x, 2.0, w)
    return a.sin().sum() + (b * b).sum()


def new(x: Any, w: Any) -> Any:
    a, index = New.apply(x.sin(), w)
    (g,) = torch.autograd.grad(a.sum() + index.sum(), x, create_graph=True)
    return (g * a).sum()


def dirty(x: Any, w: Any) -> Any:
    y = x * w
    before = (y * 1.0).sum()
    z = Dirty.apply(y)
    assert z is y
    return (z * w).cos().sum() + (y * y).sum() + before


@on_ranks(2)
def test_custom_functions_run_on_whole_locals() -> None:
    x, w = f32(5, 3), f32(3)
    for program in (old, new, dirty):
        plain = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        loss = program(*plain)
        loss.backward()
        for i, layout in enumerate(LAYOUTS):
            mine = [
                place(x, line(), layout).requires_grad_(),
                place(w, line(), [Shard(0)] if i % 2 else [Replicate()]).requires_grad_(),
            ]
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                got = program(*mine)
                program(*mine)
            assert sum("local_map" in str(s.message) for s in said) == (i == 0)
            got.backward()
            same(got.detach(), loss.detach())
            for a, b in zip(mine, plain, strict=True):
                same(a.grad, b.grad)
    y = place(x, line(), [Shard(0)])
    piece = dt.local_map(Dirty.apply, out_placements=[Shard(0)])(y * 1.0)
    same(piece, x * 3)
