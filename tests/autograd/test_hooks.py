"""Hooks on gradients: the objects that they are given, and what a failed backward leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import disttensor as dt
from disttensor import DistTensor, Partial, Replicate, Shard
from tests.support.oracle import line, randn
from tests.support.pool import on_ranks

X = randn(5, 3, seed=1)
LAYOUTS: list[Any] = [None, [Shard(0)], [Replicate()], [Partial()], [Partial("avg")]]


def placed(placements: Any) -> Tensor:
    if placements is None:
        return X.clone().requires_grad_()
    if isinstance(placements[0], Partial):
        scale = 1 if placements[0].reduce_op == "avg" else 2
        return dt.from_local(X / scale, line(), placements).requires_grad_()
    return dt.shard_tensor(X, line(), placements, requires_grad=True)


def whole(x: Any) -> Tensor:
    return (x.full_tensor() if isinstance(x, DistTensor) else x).detach().clone()


def hooked(x: Tensor, inner: bool, change: Any) -> tuple[list[bool], list[Tensor]]:
    """Is it one object that three hooks get, the second of which may change it? The gradients."""
    h = x * 2 if inner else x
    seen: list[Tensor] = []
    values: list[Tensor] = []

    def first(g: Tensor) -> None:
        seen.append(g)

    def second(g: Tensor) -> Any:
        seen.append(g)
        out = change(g)
        values.extend([] if out is None else [out])
        return out

    def third(g: Tensor) -> None:
        seen.append(g)

    h.retain_grad()
    for hook in (first, second, third):
        h.register_hook(hook)
    (h.sin() * 3).sum().backward()
    same = [seen[0] is seen[1], seen[2] is (values[0] if values else seen[0])]
    return same, [whole(g) for g in (*seen, x.grad, h.grad)]


def in_place(g: Tensor) -> None:
    g.mul_(5)


CHANGES: dict[str, Any] = {
    "nothing": lambda g: None, "another": lambda g: g * 5, "in place": in_place,
}  # fmt: skip


@on_ranks(2)
def test_hooks_on_one_tensor_get_one_object():
    for inner in (False, True):
        for name, change in CHANGES.items():
            want = hooked(placed(None), inner, change)
            assert want[0] == [True, True]
            for placements in LAYOUTS[1:]:
                got = hooked(placed(placements), inner, change)
                where = f"{name} {inner} {placements}"
                assert got[0] == want[0], where
                torch.testing.assert_close(got[1], want[1], msg=lambda m, w=where: f"{w}: {m}")


def hooked_parts(x: Tensor) -> list[Any]:
    """What hooks on the parts of x get, of which one alone is used, and the gradient."""
    seen: list[Any] = []
    parts = (x * 2).unbind(1)
    for part in parts[:2]:
        part.register_hook(lambda g: seen.append(None if g is None else whole(g)))
    (parts[1] * 3).sum().backward()
    return [*seen, whole(x.grad)]


@on_ranks(2)
def test_hooks_on_parts_without_a_use_get_none():
    want = hooked_parts(placed(None))
    assert any(g is None for g in want)
    for placements in LAYOUTS[1:]:
        got = hooked_parts(placed(placements))
        torch.testing.assert_close(got, want, msg=lambda m, p=placements: f"{p}: {m}")


def module_hooks(x: Tensor) -> list[bool]:
    """Two hooks of each kind on one module."""
    module = nn.Tanh()
    seen: dict[str, list[Any]] = {"pre": [], "full": []}
    for _ in range(2):
        module.register_full_backward_pre_hook(lambda _, out: seen["pre"].append(out[0]))
        module.register_full_backward_hook(lambda _, given, out: seen["full"].extend(given + out))
    (module(x * 2) * 3).sum().backward()
    pre, full = seen["pre"], seen["full"]
    return [pre[0] is pre[1], full[0] is full[2], full[1] is full[3], pre[0] is full[1]]


@on_ranks(2)
def test_hooks_of_a_module_get_one_object():
    want = module_hooks(placed(None))
    for placements in LAYOUTS[1:]:
        assert module_hooks(placed(placements)) == want, placements


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise ValueError("on purpose")


@on_ranks(2)
def test_hooks_are_called_again_after_a_backward_that_failed():
    for placements in LAYOUTS:
        x = placed(placements)
        called: list[str] = []
        x.register_post_accumulate_grad_hook(lambda p, c=called: c.append("post"))
        x.register_hook(lambda g, c=called: c.append("hook"))
        # x has its gradient before the other node fails, or after
        fail = dt.local_map(Fails.apply, out_placements=placements) if placements else Fails.apply
        with pytest.raises(ValueError, match="on purpose"):
            (fail(x * 2) + (x * 3).exp()).sum().backward()
        x.grad = None
        called.clear()
        for _ in range(3):
            (x * x).sum().backward()
        assert called.count("post") == 3, placements
        torch.testing.assert_close(whole(x.grad), 6 * X)


@on_ranks(2)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_a_hook_on_a_leaf_frozen_after_the_forward_gets_its_gradient(
    is_first: bool, again: bool
) -> None:
    """Autograd calls the hook and accumulates nothing, as in plain torch; ``again``: the leaf
    requires grad again before the backward."""

    def run(placements: Any) -> list[Any]:
        w, got = placed(placements), []
        rows = randn(4, 5, 3, seed=2)
        split = rows if placements is None else dt.shard_tensor(rows, line(), [Shard(0)])
        hook = got.append
        for when in (True, False):
            if is_first is when:
                w.register_hook(hook)
            if when:
                total = (w * split).sum() + (w * 2).sum()
        w.requires_grad_(False)
        if again:
            w.requires_grad_()
        total.backward()
        total = (placed(placements) * split).sum()
        total.backward()
        return [whole(g) for g in got] + [None if w.grad is None else whole(w.grad)]

    expected = run(None)
    assert len(expected) == 2 and (expected[1] is None) is not again
    for placements in LAYOUTS[1:]:
        torch.testing.assert_close(run(placements), expected) if again else (
            torch.testing.assert_close(run(placements)[0], expected[0])
        )
        assert (run(placements)[1] is None) is not again


@on_ranks(2)
@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_a_gradient_that_a_hook_keeps_does_not_change(placements: Any) -> None:
    w, kept = placed(placements), []
    w.register_hook(kept.append)
    for _ in range(2):
        (w * 3).sum().backward()
    assert all(torch.equal(whole(g), torch.full_like(X, 3)) for g in kept)
