"""local_map where ranks do different things with their pieces: what gradients communicate does not
depend on it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import disttensor as dt
from tests.support.pool import on_ranks


def mesh_and_input() -> tuple[dt.ProcessMesh, dt.DistTensor]:
    mesh = dt.init_mesh((2,), ("ep",))
    data = torch.arange(5.0).view(5, 1)
    return mesh, dt.shard_tensor(data, mesh, [dt.Shard(0)], requires_grad=True)


@pytest.mark.parametrize("leaf", [True, False], ids=["parameter", "result"])
@on_ranks(2)
def test_an_argument_that_one_rank_does_not_use_has_its_gradient_on_all(leaf):
    mesh, x = mesh_and_input()
    w = dt.ones(1, 4, mesh=mesh, requires_grad=True)
    used = w if leaf else w * 2

    def expert(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows @ weight if dist.get_rank() == 0 else rows.new_zeros(len(rows), 4)

    dt.local_map(expert, out_placements=[dt.Shard(0)])(x, used).sum().backward()
    assert w.grad.partial_status == ({0: "sum"} if leaf else {})
    assert w.grad.full_tensor().tolist() == [[3.0 * (1 if leaf else 2)] * 4]
    per_row = 4.0 * (1 if leaf else 2)
    assert x.grad.full_tensor().flatten().tolist() == [per_row] * 3 + [0.0] * 2


@dataclass
class Rows:
    rows: torch.Tensor


@on_ranks(2)
def test_a_tensor_in_a_dataclass_is_an_error():
    """Its piece would not be taken."""
    _, x = mesh_and_input()
    double = dt.local_map(lambda y, more: y + more.rows, out_placements=[dt.Shard(0)])
    with pytest.raises(TypeError, match="has a DistTensor in a dataclass"):
        double(x, more=Rows(x))
    assert double(x, more=Rows(torch.ones(1))).full_tensor().flatten().tolist() == [1, 2, 3, 4, 5]


@on_ranks(2)
def test_one_result_of_several_brings_back_the_gradients_of_all_arguments():
    mesh, x = mesh_and_input()
    a, b = (dt.ones(4, mesh=mesh, requires_grad=True) * 2 for _ in range(2))

    def two(rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = rows * a if dist.get_rank() == 0 else rows * 0.0 + rows.new_ones(4)
        return first, rows * b

    cut = [dt.Shard(0)]
    first, _ = dt.local_map(two, out_placements=[cut, cut])(x, a, b)
    first.sum().backward()
    assert x.grad.full_tensor().flatten().tolist() == [8.0] * 3 + [0.0] * 2


@on_ranks(2)
def test_arguments_that_are_used_leave_the_result_as_it_is():
    _, x = mesh_and_input()
    y = dt.local_map(lambda rows: rows * 2, out_placements=[dt.Shard(0)])(x)
    assert "Mul" in y.to_local().grad_fn.next_functions[0][0].name()


@on_ranks(2)
def test_more_kinds_of_calls_than_a_rank_outside_remembers():
    """Both sides forget the same kinds, so that a description is sent where it is waited for."""
    mesh = dt.ProcessMesh([0], ("x",))
    double = dt.local_map(lambda t, n: t * n, out_placements=[dt.Replicate()], out_shapes=(2,))
    x = dt.ones(2, mesh=mesh)
    for n in (*range(300), *range(0, 300, 7), *range(299, 200, -1)):
        assert double(x, n).shape == (2,)
    assert dt.reshard(double(x, 3), dt.ProcessMesh([1], ("x",))).shape == (2,)


@on_ranks(4)
def test_arguments_on_two_meshes_of_the_same_ranks():
    flat, grid = dt.init_mesh((4,), ("ep",)), dt.init_mesh((2, 2), ("dp", "tp"))
    rows, weight, bias = torch.randn(7, 3), torch.randn(3, 5), torch.randn(5)
    plain = [t.clone().requires_grad_() for t in (rows, weight, bias)]
    (plain[0] @ plain[1] + plain[2]).square().sum().backward()
    x = dt.shard_tensor(rows, flat, [dt.Shard(0)], requires_grad=True)
    w = dt.shard_tensor(weight, grid, [dt.Shard(0), dt.Replicate()], requires_grad=True)
    b = dt.shard_tensor(bias, grid, [dt.Replicate(), dt.Replicate()], requires_grad=True)
    linear = dt.local_map(
        lambda x, w, b: x @ w + b, in_placements=(None, [dt.Replicate()] * 2, None),
        out_placements=[dt.Shard(0)], device_mesh=flat,
    )  # fmt: skip
    y = linear(x, w, b)
    assert y.process_mesh is flat
    torch.testing.assert_close(y.full_tensor(), rows @ weight + bias)
    y.square().sum().backward()
    for ours, theirs in zip((x, w, b), plain, strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@on_ranks(4)
def test_arguments_on_two_meshes_where_no_gradient_follows():
    """Values that differ over one axis of one mesh: over which axes of the other?"""
    flat, grid = dt.init_mesh((4,), ("ep",)), dt.init_mesh((2, 2), ("dp", "tp"))
    x = dt.ones(2, mesh=flat, requires_grad=True)
    b = dt.shard_tensor(torch.arange(4.0), grid, [dt.Shard(0), dt.Replicate()])
    words = {"out_placements": [dt.Replicate()], "device_mesh": flat}

    def total(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x * 2 + 0 * b.sum()

    with pytest.raises(ValueError, match="give in_grad_placements"):
        dt.local_map(total, **words)(x, b)
    grads = ([dt.Replicate()], [dt.Shard(0), dt.Replicate()])
    dt.local_map(total, in_grad_placements=grads, **words)(x, b).sum().backward()
    assert x.grad.full_tensor().tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="on other ranks"):
        dt.local_map(total, out_placements=[dt.Replicate()], device_mesh=grid["dp"])(x, b)


@on_ranks(2)
def test_a_result_that_is_no_tensor():
    """Each rank has its own."""
    _, x = mesh_and_input()
    rows = dt.local_map(len, out_placements=None)(x)
    assert rows == len(x.to_local())
    both = dt.local_map(lambda t: (t * 2, len(t)), out_placements=([dt.Shard(0)], None))(x)
    assert both[1] == rows and both[0].full_tensor().flatten().tolist() == [0, 2, 4, 6, 8]


@on_ranks(2)
def test_a_dtensor_of_torch_is_an_error():
    """With device_mesh its piece would count as a value that is the same on all ranks."""
    mesh, x = mesh_and_input()
    double = dt.local_map(lambda *t: t[0] * 2, out_placements=[dt.Shard(0)], device_mesh=mesh)
    theirs = dt.to_dtensor(x.detach())
    for tensors in ((x, theirs), (theirs,)):
        with pytest.raises(ValueError, match=r"a torch DTensor.*from_dtensor"):
            double(*tensors)


@on_ranks(2)
def test_a_whole_result_beside_pieces_is_refused_unless_the_gradients_are_given():
    """Its gradient could count once or on each rank; what the error proposes is right."""
    mesh, whole, cut = dt.init_mesh((2,)), [dt.Replicate()], [dt.Shard(1)]
    values = torch.arange(6.0).reshape(2, 3), torch.arange(9.0).reshape(3, 3).cos()
    plain = [t.clone().requires_grad_() for t in values]
    (plain[0] * 2).sum().backward()
    ((plain[0] @ plain[1]).sum() * 3).backward()

    def given() -> list[dt.DistTensor]:
        return [
            dt.shard_tensor(t, mesh, p, requires_grad=True)
            for t, p in zip(values, (whole, cut), strict=True)
        ]

    def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, (x @ w).sum()

    x, w = given()
    with pytest.raises(ValueError, match=r"result 0 is Replicate over 'd0'.* a call of its own"):
        dt.local_map(both, out_placements=[whole, [dt.Partial()]])(x, w)
    with torch.no_grad():
        doubled, _ = dt.local_map(both, out_placements=[whole, [dt.Partial()]])(x, w)
    torch.testing.assert_close(doubled.full_tensor(), values[0] * 2)
    doubled = dt.local_map(lambda x: x * 2, out_placements=whole)(x)
    total = dt.local_map(lambda x, w: (x @ w).sum(), out_placements=[dt.Partial()])(x, w)
    (doubled.sum() + total * 3).backward()
    for ours, theirs in zip((x, w), plain, strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)

    class Sum(torch.autograd.Function):
        """An all-reduce whose backward takes the whole gradient on each rank."""

        @staticmethod
        def forward(ctx, t):
            t = t.clone()
            dist.all_reduce(t)
            return t

        @staticmethod
        def backward(ctx, grad):
            return grad

    x, w = given()
    grads = [[dt.Partial()], cut]
    summed = dt.local_map(
        lambda x, w: Sum.apply((x @ w).sum()), out_placements=whole, in_grad_placements=grads
    )(x, w)
    ((x * 2).sum() + summed * 3).backward()
    for ours, theirs in zip((x, w), plain, strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
