"""The collectives of local functions: differentiable, and in step with recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import wrap_torch_function
from torch.utils.checkpoint import checkpoint

import disttensor as dt
import ops
from tests.support.layouts import S1
from tests.support.pool import on_ranks

Tensor = torch.Tensor


@wrap_torch_function(lambda x: (x,))
def centered(x: Tensor) -> Tensor:
    """f64[n, d]: each row minus its mean"""
    return x - x.mean(-1, keepdim=True)


def centered_pieces(call: Any) -> Callable[..., Tensor]:
    axes, size = call.axes("d"), call.inputs[0].shape[-1]

    def local(x: Tensor) -> Tensor:
        mean = call.collectives.psum(x.sum(-1, keepdim=True), axes) / size
        # twice as wide, so that the collective of the backward can be told from the forward's
        return x - call.collectives.pvary(mean.repeat(1, 2), axes)[:, :1]

    return local


ops.rule(centered, "n d -> n d", local=centered_pieces)


def split_in_two() -> tuple[dt.DistTensor, Tensor]:
    torch.manual_seed(0)
    plain = torch.randn(3, 5, dtype=torch.float64)
    mesh = dt.ProcessMesh([0, 1], ("tp",))
    return dt.shard_tensor(plain, mesh, [S1], requires_grad=True), plain.requires_grad_()


@on_ranks(2)
def test_a_region_is_recomputed_before_its_backward_communicates():
    """Nothing after pvary saves a tensor: pvary itself has the region computed again."""
    x, plain = split_in_two()
    with dt.debugging.record_comms() as log:
        checkpoint(lambda x: centered(x * x), x, use_reentrant=False)[:, :2].sum().backward()
    centered(plain * plain)[:, :2].sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
    reduced = [r.shape for r in log if r.kind == "all_reduce"]
    assert reduced == [(3, 1), (3, 1), (3, 2)]  # forward, recomputation, backward


@on_ranks(2)
def test_a_gathered_value_is_differentiable_twice():
    x, plain = split_in_two()
    for value in (x, plain):
        (grad,) = torch.autograd.grad(value.prod(1).square().sum(), value, create_graph=True)
        grad.square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@on_ranks(2)
def test_a_reduction_without_a_gradient_is_refused_where_one_is_needed():
    @wrap_torch_function(lambda x: (x,))
    def largest(x: Tensor) -> Tensor:
        return x.amax(1)

    def pieces(call: Any) -> Callable[..., Tensor]:
        return lambda x: call.collectives.all_reduce(x.amax(1), "max", call.axes("d"))

    ops.rule(largest, "n d -> n", reduced={"d": "inner"}, local=pieces)
    x, plain = split_in_two()
    with pytest.raises(RuntimeError, match="all_reduce of 'max' has no gradient"):
        largest(x)
    torch.testing.assert_close(largest(x.detach()).full_tensor(), plain.detach().amax(1))
