"""The norm of gradients in every layout: the number that torch gives in one process, for one small
reduction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import disttensor as dt
from disttensor import Partial, ProcessMesh, Replicate, Shard
from tests.support.oracle import compare_replicas, grid, line, place, randn
from tests.support.pool import on_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
ORDERS = (0.0, 0.5, 1.0, 2.0, 3.0, math.inf, -math.inf)
LAYOUTS: list[Sequence[Any]] = [
    [R, R], [S0, R], [R, S1], [S0, S1], [S0, S0], [Shard(0, order=1), Shard(0, order=0)],
    [P, R], [P, P], [S1, P],
]  # fmt: skip


def torchs_clip_norm(*args, **kwargs):
    return torch.nn.utils.clip_grad_norm_.__wrapped__(*args, **kwargs)


def make(
    grads: Sequence[Tensor], layouts: Sequence[Any], mesh: ProcessMesh
) -> tuple[list[Any], list[Any]]:
    """(plain, ours): leaves with these gradients; a Partial in a layout is one of the gradient
    alone."""
    plain, ours = [], []
    for g, layout in zip(grads, layouts, strict=True):
        plain.append(torch.zeros_like(g).requires_grad_())
        plain[-1].grad = g.clone()
        at = [R if isinstance(p, Partial) else p for p in layout]
        ours.append(place(torch.zeros_like(g), mesh, at).requires_grad_())
        ours[-1].grad = place(g, mesh, layout)
    return plain, ours


def same_grads(plain: Sequence[Any], ours: Sequence[Any]) -> None:
    compare_replicas([w.grad for w in ours])
    for w, p in zip(ours, plain, strict=True):
        torch.testing.assert_close(w.grad.full_tensor(), p.grad, rtol=1e-6, atol=1e-12)


def some(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """A gradient for each layout; 3 rows over 4 ranks leave one empty. One has zeros, one nothing
    else."""
    grads = [randn(3 if i % 2 else 5, 4, seed=i, dtype=dtype) for i in range(len(LAYOUTS))]
    grads[1][0] = 0.0
    grads[4].zero_()
    return grads


@pytest.mark.parametrize(
    ("dtype", "foreach"),
    [(torch.float64, f) for f in (None, True, False)]
    + [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, False)],
)
@on_ranks(4)
def test_norms_of_every_order_over_every_layout(dtype, foreach):
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for order in ORDERS:
        plain, ours = make(some(dtype), LAYOUTS, grid())
        expected = torchs_clip_norm(plain, 0.1, order, foreach=foreach)
        norm = dt.clip_grad_norm_(ours, 0.1, order, foreach=foreach)
        assert type(norm) is Tensor and norm.dtype is expected.dtype
        torch.testing.assert_close(norm, expected, rtol=close, atol=0.0)
        compare_replicas([norm])
        if dtype is torch.float64 and order in (0.5, 2.0):
            same_grads(plain, ours)


@on_ranks(4)
def test_torchs_own_functions_give_the_same_number():
    for order in ORDERS:
        plain, ours = make(some(), LAYOUTS, grid())
        expected = torchs_clip_norm(plain, 0.1, order)
        norm = nn.utils.clip_grad_norm_((w for w in ours), 0.1, order)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0.0)
        if order in (0.5, 2.0):
            same_grads(plain, ours)
            plain, ours = make(some(), LAYOUTS, grid())
            total = nn.utils.get_total_norm([w.grad for w in ours], order).full_tensor()
            torch.testing.assert_close(total, expected, rtol=1e-9, atol=0.0)
            nn.utils.clip_grads_with_norm_(plain, 0.1, expected)
            nn.utils.clip_grads_with_norm_(ours, 0.1, expected)
            same_grads(plain, ours)


@pytest.mark.parametrize("order", [0.0, 2.0, math.inf])
@pytest.mark.parametrize("foreach", [None, False])
@on_ranks(4)
def test_one_small_reduction_over_the_axes_that_split(foreach, order):
    for layouts, axis in (
        ([[R, R]] * 3, None), ([[S0, R], [R, R], [S1, R]], "dp"), ([[R, S1], [R, S0]], "tp"),
        ([[S0, R], [R, S0]], "dp+tp"), ([[S0, S1], [S0, S0], [R, R], [S0, R]], "dp+tp"),
    ):  # fmt: skip
        plain, ours = make([randn(5, 3, seed=i) for i in range(len(layouts))], layouts, grid())
        with dt.debugging.record_comms() as log:
            norm = dt.clip_grad_norm_(ours, 0.1, order, foreach=foreach)
        assert [(r.kind, r.axis) for r in log] == ([("all_reduce", axis)] if axis else [])
        assert log.total_bytes < 100
        torch.testing.assert_close(norm, torchs_clip_norm(plain, 0.1, order))


@on_ranks(4)
def test_several_meshes_of_other_shapes_are_one_reduction():
    """Two shapes and another order of the whole world, and a part of it."""
    meshes = [grid(), line(), ProcessMesh([[3, 1], [2, 0]], ("a", "b"))]
    layouts = [[S0, S1], [S0], [R, S0]]
    grads = [randn(5, 4, seed=i) for i in range(3)]
    for part in (False, True):
        for order in ORDERS:
            plain, ours = [], []
            for g, mesh, layout in zip(grads, meshes, layouts, strict=True):
                for lists, made in zip((plain, ours), make([g], [layout], mesh), strict=True):
                    lists += made
            if part:
                half = ProcessMesh([2, 3], ("x",))
                plain.append(torch.ones(3, 3, dtype=torch.float64, requires_grad=True))
                plain[-1].grad = randn(3, 3) * 4
                w = dt.shard_tensor(torch.ones(3, 3).double(), half, [S1], requires_grad=True)
                w.grad = dt.shard_tensor(randn(3, 3) * 4, half, [S1])
                ours.append(w)
            expected = torchs_clip_norm(plain, 0.1, order)
            with dt.debugging.record_comms() as log:
                norm = dt.clip_grad_norm_(ours, 0.1, order)
            assert [(r.kind, r.axis) for r in log] == [("all_reduce", "world")]
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0.0)
            if order == 3.0:
                same_grads(plain[:3], ours[:3])


@pytest.mark.parametrize(
    ("bad", "foreach"), [(math.nan, None), (math.nan, False), (math.inf, True), (-math.inf, None)]
)
@on_ranks(4)
def test_one_bad_element_of_one_piece(bad, foreach):
    """Every rank raises before anything is scaled; without the flag every rank has the same norm,
    nan or inf."""
    for order in (0.5, 2.0, math.inf):
        grads = some()
        grads[3][1, 3] = bad
        plain, ours = make(grads, LAYOUTS, grid())
        with pytest.raises(RuntimeError, match=rf"norm of order {order} over 9 .* is (nan|inf)"):
            dt.clip_grad_norm_(ours, 0.1, order, error_if_nonfinite=True, foreach=foreach)
        whole = ours[0].grad.full_tensor()
        assert torch.equal(whole, grads[0])
        norm = nn.utils.clip_grad_norm_(ours, 0.1, order, foreach=foreach)
        expected = torchs_clip_norm(plain, 0.1, order, foreach=foreach)
        torch.testing.assert_close(norm, expected, equal_nan=True)
        compare_replicas([norm])


@on_ranks(2)
def test_more_ranks_than_rows_and_parameters_without_a_gradient():
    grads = [randn(1, 3), randn(1), randn(1, 1)]
    layouts = [[S0], [S0], [S1]]
    for order in ORDERS:
        plain, ours = make(grads, layouts, line())
        for ws in (plain, ours):
            ws[1].grad = None
        expected = torchs_clip_norm(plain, 0.1, order)
        torch.testing.assert_close(dt.clip_grad_norm_(ours, 0.1, order), expected)
        for w in ours:
            w.grad = None
        assert dt.clip_grad_norm_(ours, 0.1, order).item() == 0.0


@on_ranks(2)
def test_large_and_mixed_numbers():
    """Squares that float16 cannot hold, and dtypes beside each other."""
    grads = [torch.full((3, 2), 3e3), torch.full((5,), 2e4, dtype=torch.float16)]
    plain, ours = make(grads, [[S0], [S0]], line())
    norm = dt.clip_grad_norm_(ours, 1.0)
    assert norm.dtype is torch.float32
    torch.testing.assert_close(norm, torch.tensor((6 * 9e6 + 5 * 4e8) ** 0.5))
    pair = torch.complex(randn(3), randn(3, seed=1))
    plain, ours = make([pair, randn(3)], [[S0], [R]], line())
    torch.testing.assert_close(dt.clip_grad_norm_(ours, 1.0), torchs_clip_norm(plain, 1.0))
    same_grads(plain, ours)
