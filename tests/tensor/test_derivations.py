"""A derived value (a reshard, a view, a recomputed call) whose source changes before it is used
again, forward and backward, equals one process. So do hooks that come after uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import disttensor as dt
from disttensor import Replicate, Shard
from tests.support.pool import on_ranks

R, S0 = Replicate(), Shard(0)
W = torch.tensor([1.0, 2.0, 3.0, 4.0])
BIG = torch.arange(1.0, 13.0).view(3, 4)
OTHER = torch.tensor([-1.0, 0.5, 2.0, 3.0])
Program = Callable[[Any, Any], Any]


def _resharded(x: Any) -> Any:
    if not is_ours(x):
        return x.clone()
    return x.redistribute(placements=[R if x.placements == (S0,) else S0])


def _other(x: Any) -> Any:
    return dt.shard_tensor(OTHER, x.process_mesh, x.placements) if is_ours(x) else OTHER.clone()


def is_ours(x: Any) -> bool:
    return isinstance(x, dt.DistTensor)


# derived from x, of the shape of x
DERIVE: dict[str, Callable[[Any], Any]] = {
    "reshard": _resharded,
    "view": lambda x: x.view(2, 2).view(4),
    "transpose": lambda x: x.view(1, 4).t().squeeze(1),
    "copy": lambda x: x.view(2, 2).t().contiguous().t().reshape(4),
    "looked up": lambda x: F.embedding(torch.arange(4), x.view(4, 1)).view(4),
    "slice": lambda x: x[:],
}


def _no_grad(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(x: Any) -> None:
        with torch.no_grad():
            change(x)

    return run


def _data(x: Any) -> None:
    x.data = _other(x)


def _set_item(x: Any) -> None:
    x[0] = 7.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda x: None,
    "zero_": lambda x: x.zero_(),
    "mul_": lambda x: x.mul_(3.0),
    "neg_": lambda x: x.neg_(),
    "copy_": lambda x: x.copy_(_other(x)),
    "masked_fill_": lambda x: x.masked_fill_(x > 2.5, 9.0),
    "add_": lambda x: x.add_(1.0),
    "set item": _set_item,
    "a view is written": lambda x: x[1:].mul_(2.0),
    "detached is written": lambda x: x.detach().mul_(2.0),
    "detach_": lambda x: x.detach_(),
    "frozen": lambda x: x.requires_grad_(False),
    "frozen and unfrozen": lambda x: x.requires_grad_(False).requires_grad_(),
    "no_grad mul_": _no_grad(lambda x: x.mul_(3.0)),
    "no_grad copy_": _no_grad(lambda x: x.copy_(_other(x))),
    "data =": _data,
    "data is written": lambda x: x.data.mul_(2.0),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "hook": lambda x: x.register_hook(lambda g: g * 2) if x.requires_grad else None,
    "post hook": lambda x: (
        x.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(3)) if x.is_leaf else None
    ),
}


def program(leaf: bool, derive: str, change: str, used_before: bool) -> Program:
    def run(w: Any, big: Any) -> Any:
        x = w if leaf else w * 1.0
        h = DERIVE[derive](x)
        before = (h * big).sum() if used_before else 0.0
        CHANGES[change](x)
        loss = (h * big).sum() + (h * 2.0).sum() + before
        loss = loss + ((x * big).sum() if x.requires_grad else 0.0)
        loss.backward()
        return loss, w.grad

    return run


def outcome(run: Program, w: Any, big: Any) -> Any:
    try:
        loss, grad = run(w, big)
    except RuntimeError as error:
        return "RuntimeError", str(error)
    full = lambda t: None if t is None else (t.full_tensor() if is_ours(t) else t).detach().clone()  # noqa: E731
    return full(loss), full(grad)


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "inner"])
@pytest.mark.parametrize("placements", [[R], [S0]], ids=str)
@on_ranks(2)
def test_a_source_that_changes_between_uses(leaf: bool, placements: Any) -> None:
    mesh = dt.init_mesh((2,), ("dp",))
    wrong, compared = [], 0
    for derive in DERIVE:
        for change in CHANGES:
            for used_before in (False, True):
                run = program(leaf, derive, change, used_before)
                want = outcome(run, W.clone().requires_grad_(), BIG.clone())
                w = dt.shard_tensor(W, mesh, placements, requires_grad=True)
                got = outcome(run, w, dt.shard_tensor(BIG, mesh, [S0]))
                where = derive, change, used_before
                if isinstance(want[0], str):
                    continue  # torch refuses it
                if isinstance(got[0], str):
                    if not is_known_refusal(got[1]):
                        wrong.append((where, got))
                    continue
                compared += 1
                if not all(map(_same, want, got)):
                    wrong.append((where, want, got))
    assert not wrong, wrong[:4]
    assert compared > 80


def is_known_refusal(message: str) -> bool:
    """Errors that say what to do in place of it."""
    return "Register the hook before its first use" in message or "copy" in message


def _same(a: Any, b: Any) -> bool:
    return a is b if a is None or b is None else torch.allclose(a, b)


# Hooks --------------------------------------------------------------------------------------------


def _late(w: Any, big: Any, seen: list[Any]) -> None:
    loss = (w * big).sum() + (w * 2).sum()
    w.register_hook(lambda g: seen.append(_full(g)) or g.clamp(max=20))
    loss.backward()


def _twice(w: Any, big: Any, seen: list[Any]) -> None:
    w.register_hook(lambda g: seen.append(_full(g)) or g.clamp(max=20))
    ((w * big).sum() + (w * 2).sum()).backward()
    (w * big).sum().backward()


def _between(w: Any, big: Any, seen: list[Any]) -> None:
    ((w * big).sum() + (w * 2).sum()).backward()
    handle = w.register_hook(lambda g: seen.append(_full(g)) or g * 3)
    ((w * big).sum() + (w * 2).sum()).backward()
    handle.remove()
    (w * 2).sum().backward()


def _several(w: Any, big: Any, seen: list[Any]) -> None:
    for factor in (2.0, -1.0):
        w.register_hook(lambda g, f=factor: seen.append(_full(g)) or g * f)
    w.register_post_accumulate_grad_hook(lambda p: seen.append(_full(p.grad)))
    loss = (w * big).sum() + (w.view(2, 2).view(4) * big[0]).sum()
    loss.backward()


def _returned(w: Any, big: Any, seen: list[Any]) -> None:
    w.register_hook(lambda g: seen.append(_full(g)) or g * 2)
    loss = (w * big).sum() + (w * w).sum()
    [grad] = torch.autograd.grad(loss, [w], create_graph=True)
    seen.append(_full(grad))
    grad.square().sum().backward()


def _in_place(w: Any, big: Any, seen: list[Any]) -> None:
    w.register_hook(lambda g: g.mul_(5))
    ((w * big).sum() + w.sum()).backward()


def _post_frees(w: Any, big: Any, seen: list[Any]) -> None:
    def hook(p: Any) -> None:
        seen.append(_full(p.grad))
        p.grad = None

    w.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        ((w * big).sum() + w.sum()).backward()


def _unfrozen(w: Any, big: Any, seen: list[Any]) -> None:
    """A gradient that was read while frozen is not reduced twice."""
    (w * big).sum().backward()
    w.requires_grad_(False)
    seen.append(_full(w.grad))
    w.requires_grad_(True)
    ((w * big).sum() + w.sum()).backward()


def _retained(w: Any, big: Any, seen: list[Any]) -> None:
    h = w.view(2, 2).view(4)
    loss = (h * big).sum()
    h.retain_grad()
    (loss + (h * 2).sum() + (h * big).sum()).backward()
    seen.append(_full(h.grad))


def _inner(w: Any, big: Any, seen: list[Any]) -> None:
    h = w * 1.0
    loss = (h * big).sum() + (h * 2).sum()
    h.register_hook(lambda g: seen.append(_full(g)) or g.clamp(max=20))
    loss.backward()


def _full(x: Any) -> Tensor:
    return (x.full_tensor() if is_ours(x) else x).detach().clone()


HOOKS = (
    _late, _twice, _between, _several, _returned, _in_place, _post_frees, _unfrozen, _retained,
    _inner,
)  # fmt: skip


@pytest.mark.parametrize("placements", [[R], [S0]], ids=str)
@on_ranks(2)
def test_a_hook_gets_the_gradient_of_one_backward_once(placements: Any) -> None:
    mesh = dt.init_mesh((2,), ("dp",))
    for run in HOOKS:
        plain, ours = W.clone().requires_grad_(), dt.shard_tensor(W, mesh, placements).clone()
        ours = ours.detach().requires_grad_()
        want: list[Any] = []
        got: list[Any] = []
        run(plain, BIG, want)
        run(ours, dt.shard_tensor(BIG, mesh, [S0]), got)
        assert (plain.grad is None) == (ours.grad is None), run.__name__
        if plain.grad is not None:
            want.append(plain.grad)
            got.append(_full(ours.grad))
        assert len(want) == len(got), (run.__name__, want, got)
        torch.testing.assert_close(got, want, msg=lambda m, r=run: f"{r.__name__}: {m}")


@on_ranks(4)
def test_a_gradient_read_while_frozen_on_two_axes() -> None:
    """Uses vary over one axis, then over the other."""
    mesh = dt.init_mesh((2, 2), ("a", "b"))
    plain, ours = W.clone().requires_grad_(), dt.shard_tensor(W, mesh, [R, R], requires_grad=True)
    for w, x, y in (
        (plain, BIG, BIG),
        (ours, dt.shard_tensor(BIG, mesh, [S0, R]), dt.shard_tensor(BIG, mesh, [R, S0])),
    ):
        (w * x).sum().backward()
        w.requires_grad_(False)
        _full(w.grad)
        w.requires_grad_(True)
        (w * y).sum().backward()
        w.requires_grad_(False)
        _full(w.grad)
        w.requires_grad_(True)
        (w * x).sum().backward()
    torch.testing.assert_close(_full(ours.grad), plain.grad)


@on_ranks(2)
def test_requires_grad_of_an_inner_average_changes_nothing() -> None:
    mesh = dt.init_mesh((2,), ("dp",))
    w = dt.from_local(W.clone(), mesh, [dt.Partial("avg")], shape=(4,)).requires_grad_()
    x = (w * 1.0).requires_grad_().requires_grad_()
    (x * dt.shard_tensor(BIG, mesh, [S0])).sum().backward()
    torch.testing.assert_close(_full(w.grad), BIG.sum(0))
