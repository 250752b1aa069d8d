"""Gradient edges and hooks of several tensors, as in one plain process: the gradient over all uses
of a tensor, in all layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import disttensor as dt
from disttensor import DistTensor, Partial, ProcessMesh, Replicate, Shard
from tests.support.layouts import grid
from tests.support.oracle import line, randn
from tests.support.pool import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
X, B, C = randn(5, 3, seed=1), randn(5, 3, seed=2), randn(4, 5, 3, seed=3)
LAYOUTS: list[Any] = [[R, R], [S0, R], [R, S1], [S0, S1], [S0, S0], [Partial(), R], [S1, Partial()]]


def placed(placements: Any) -> Callable[[Tensor, bool], Tensor]:
    """Returns what places a tensor: plain, or a leaf in this layout, or data split in dim 0."""
    if placements is None:
        return lambda t, is_leaf: t.clone().requires_grad_(is_leaf)
    mesh = grid()

    def place(t: Tensor, is_leaf: bool) -> Tensor:
        if not is_leaf:
            return dt.shard_tensor(t, mesh, [S0, R])
        return dt.reshard(dt.shard_tensor(t, mesh), mesh, placements).detach().requires_grad_()

    return place


Place = Callable[[Tensor, bool], Tensor]


def loss(w: Tensor, place: Place) -> Tensor:
    """Uses that vary over the axes of the data, and a use that does not."""
    return (w * place(B, False)).sum() + (w * place(C, False)).sum() + (w * 2).sum()


def of_a_leaf(place: Place) -> Any:
    w = place(X, True)
    return grad(loss(w, place), get_gradient_edge(w))


def of_varying_uses(place: Place) -> Any:
    w = place(X, True)
    return grad((w * place(C, False)).sum(), [get_gradient_edge(w)])


def after_the_uses(place: Place) -> Any:
    w = place(X, True)
    total = loss(w, place)
    return grad(total, [get_gradient_edge(w), w])


def of_a_result(place: Place) -> Any:
    w = place(X, True)
    y = w.sin()
    edge = get_gradient_edge(y)
    return grad(loss(y, place), [edge, w])


def before_a_write(place: Place) -> Any:
    w = place(X, True)
    y = w.sin()
    edge = get_gradient_edge(y)
    y.mul_(2)
    return grad(loss(y, place), [edge, y])


def of_a_view(place: Place) -> Any:
    w = place(X, True)
    y = w.view(1, 5, 3)
    edge = get_gradient_edge(y)
    return grad(loss(y, place), [edge, w])


def of_a_used_view(place: Place) -> Any:
    w = place(X, True).sin()
    y = w.t().t()
    first = loss(y, place)
    edge = get_gradient_edge(y)
    return grad(first + loss(y, place), [edge, w])


def of_a_reshard(place: Place) -> Any:
    w = place(X, True)
    y = dt.reshard(w, grid(), [R, R]) if isinstance(w, DistTensor) else w * 1
    first = loss(y, place)
    edge = get_gradient_edge(y)
    return grad(first + loss(y, place), [edge, w])


def in_backward(place: Place) -> Any:
    w, u = place(X, True), place(X, True)
    torch.autograd.backward(loss(w, place) + loss(u, place), inputs=[get_gradient_edge(w)])
    loss(w, place).backward(inputs=[get_gradient_edge(w)])
    return w.grad, u.grad


def of_a_result_in_backward(place: Place) -> Any:
    w = place(X, True)
    y = w * 1
    torch.autograd.backward(loss(y, place), inputs=[get_gradient_edge(y)])
    return w.grad


def as_outputs(place: Place) -> Any:
    w = place(X, True)
    y, total = w.sin(), loss(w.sin(), place)
    given = grad(get_gradient_edge(y), w, B, retain_graph=True)
    both = grad(get_gradient_edge(y), get_gradient_edge(w), B, retain_graph=True)
    torch.autograd.backward([get_gradient_edge(y), get_gradient_edge(total)], [B, None])
    return *given, *both, w.grad


def twice(place: Place) -> Any:
    w = place(X, True)
    total = (w**3 * place(C, False)).sum()
    (g,) = grad(total, get_gradient_edge(w), create_graph=True)
    return grad((g * place(B, False)).sum(), get_gradient_edge(w))


def batched(place: Place) -> Any:
    w = place(X, True)
    return grad(w * place(B, False), get_gradient_edge(w), C, is_grads_batched=True)


def unused(place: Place) -> Any:
    w, u = place(X, True), place(X, True)
    edges = [get_gradient_edge(u), get_gradient_edge(u.sin()), get_gradient_edge(w)]
    return grad(loss(w, place), edges, allow_unused=True)


def hooks_of_several(place: Place, mode: str, kinds: str) -> Any:
    w, u, idle = place(X, True), place(X, True), place(X, True)
    y = w * 3
    tensors = {"w": w, "u": u, "y": y, "i": idle}
    got: list[Any] = []

    def hook(grads: Any) -> None:
        got.append(list(grads) if mode == "all" else torch.ones(1))

    handle = register_multi_grad_hook([tensors[k] for k in kinds], hook, mode=mode)  # type: ignore[call-overload]
    for _ in range(2):
        total = loss(w, place) + loss(y, place) + (u * place(C, False)).sum()
        total.backward(retain_graph=True)
    handle.remove()
    loss(w, place).backward()
    return *got, w.grad, u.grad


PROGRAMS: dict[str, Callable[[Place], Any]] = {
    f.__name__: f
    for f in (
        of_a_leaf, of_varying_uses, after_the_uses, of_a_result, before_a_write, of_a_view,
        of_a_used_view, of_a_reshard, in_backward, of_a_result_in_backward, as_outputs, twice,
        batched, unused,
    )
} | {
    f"hooks {mode} {kinds}": lambda place, mode=mode, kinds=kinds: hooks_of_several(
        place, mode, kinds
    )
    for mode in ("all", "any")
    for kinds in ("w", "wu", "wuy", "uy", "y", "wi", "ui")
}  # fmt: skip


def whole(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [whole(v) for v in value]
    return value.full_tensor() if isinstance(value, DistTensor) else value


@on_ranks(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_over_all_uses(name: str) -> None:
    expected = whole(PROGRAMS[name](placed(None)))
    for placements in LAYOUTS:
        torch.testing.assert_close(
            whole(PROGRAMS[name](placed(placements))), expected, msg=lambda m: f"{placements}: {m}"
        )


@on_ranks(2)
def test_errors_are_those_of_torch_or_name_the_way_out() -> None:
    w, u = (dt.shard_tensor(X, line(), [S0], requires_grad=True) for _ in range(2))
    total = (w * 2).sum()
    for x in (w, w.sin(), w.view(15)):
        edge = get_gradient_edge(x)
        for register in (edge.node.register_hook, edge.node.register_prehook):
            with pytest.raises(RuntimeError, match=r"piece of this rank.*x\.register_hook"):
                register(print)
    with pytest.raises(RuntimeError, match="input 0 was not used"):
        grad(total, get_gradient_edge(u), retain_graph=True)
    with pytest.raises(RuntimeError, match="materialize_grads cannot be used"):
        grad(total, get_gradient_edge(u), materialize_grads=True, retain_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        get_gradient_edge(w.detach())
    with pytest.raises(RuntimeError, match="one element"):
        grad(get_gradient_edge(w.sin()), w)


@on_ranks(2)
def test_edges_are_equal_where_those_of_torch_are() -> None:
    w = dt.shard_tensor(X, line(), [S0], requires_grad=True)
    y = w.sin()
    assert get_gradient_edge(y) == get_gradient_edge(y) != get_gradient_edge(w)
    assert {get_gradient_edge(w): 1}[get_gradient_edge(w)] == 1
    assert get_gradient_edge(y).node.name() == "SinBackward0"


@on_ranks(2)
def test_an_edge_on_another_mesh_gets_its_gradient_there() -> None:
    first, second = ProcessMesh([0]), ProcessMesh([1])
    w = dt.shard_tensor(X, first, requires_grad=True)
    y = w.sin()
    edges = get_gradient_edge(w), get_gradient_edge(y)
    z = dt.reshard(y, second, [R])
    got = grad((z * dt.shard_tensor(B, second)).sum(), edges)
    plain = X.clone().requires_grad_()
    (plain.sin() * B).sum().backward()
    torch.testing.assert_close(got[0].full_tensor(everywhere=True), plain.grad)
    torch.testing.assert_close(got[1].full_tensor(everywhere=True), B)
