"""``leaf.data = value`` of another layout: uses of the new value have the right gradients, and a
graph from before is refused on all ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import disttensor as dt
from disttensor import DistTensor, Partial, Replicate, Shard
from tests.support.layouts import grid
from tests.support.oracle import randn
from tests.support.pool import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
OLD: list[Any] = [(R, R), (S0, R), (S1, S0)]
NEW: list[Any] = [(R, R), (S0, R), (R, S1), (S0, S0), (Partial(), R)]
W, V, B = randn(5, 3, seed=1), randn(5, 3, seed=2), randn(4, 5, 3, seed=3)


def placed(t: Tensor, placements: Any) -> Tensor:
    if placements is None:
        return t.clone()
    return dt.reshard(dt.shard_tensor(t, grid()), grid(), placements).detach()


def loss(w: Tensor, b: Tensor) -> Tensor:
    return (w * b).sum() + (w * 2).sum()


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DistTensor) else x


def renewed(old: Any, new: Any, data: Any, hooked: bool) -> list[Any]:
    """The gradients before and after the change, summed, and of the new value alone."""
    w, b = placed(W, old).requires_grad_(), placed(B, data)
    seen: list[Any] = []
    if hooked:
        w.register_hook(lambda g: seen.append(whole(g).clone()))
    loss(w, b).backward()
    w.data = placed(V, new)
    loss(w.sin(), b).backward()
    both = whole(w.grad).clone()
    w.grad = None
    loss(w.sin(), b).backward()
    return [both, whole(w.grad), whole(w).detach(), *seen]


@on_ranks(4)
@pytest.mark.parametrize("hooked", [False, True])
def test_the_new_value_has_the_right_gradients(hooked: bool) -> None:
    expected = renewed(None, None, None, hooked)
    for old, new in itertools.product(OLD, NEW):
        got = renewed(old, new, (S0, R), hooked)
        torch.testing.assert_close(got, expected, msg=lambda m, a=old, b=new: f"{a} {b}: {m}")


@on_ranks(4)
def test_a_graph_of_the_old_layout_is_refused_on_all_ranks() -> None:
    b = placed(B, (S0, R))
    ways = {
        "backward": lambda total, w: total.backward(),
        "inputs": lambda total, w: total.backward(inputs=[w]),
        "grad": lambda total, w: torch.autograd.grad(total, w),
        "allow_unused": lambda total, w: torch.autograd.grad(total, w, allow_unused=True),
        "of a result": lambda total, w: loss(total, b).backward(),
    }
    for old, new in itertools.product(OLD, NEW):
        for name, way in ways.items():
            w = placed(W, old).requires_grad_()
            total = w.sin() if name == "of a result" else loss(w, b)
            w.data = placed(V, new)
            if old == new:
                way(total, w)
                continue
            with pytest.raises(RuntimeError, match=r"another layout.*Run the backward"):
                way(total, w)
            loss(w, b).backward()
            w.grad.full_tensor()
