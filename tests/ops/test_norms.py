"""var, std and norms over split dims: uneven counts, zeros, ties of the inf-norm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from disttensor.core.placement import Replicate, Shard
from ops import Arg, infer
from ops.infer import decide
from tests.support.simulate import check_rule, simulate

S0, S1, R = Shard(0), Shard(1), Replicate()
NAN, INF = math.nan, math.inf

X = torch.randn(5, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
TIES = torch.randint(-1, 2, (5, 6, 3), generator=torch.Generator().manual_seed(3)).double()
ZEROS = X.clone()
ZEROS[:, 2] = ZEROS[1] = ZEROS[:, :, 2] = 0
INPUTS = pytest.mark.parametrize("x", [X, TIES, ZEROS], ids=["plain", "ties", "zeros"])


def check(*args: Any, **kwargs: Any) -> None:
    """On 2x2, and on four ranks of which the last has nothing of 5."""
    assert check_rule(*args, tries=12, **kwargs)
    assert check_rule(*args, mesh_shape=(4,), tries=6, seed=1, **kwargs)


@pytest.mark.parametrize("func", [torch.var, torch.std, torch.var_mean, torch.std_mean])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((False,), {}),
        ((0,), {}),
        ((1, False, True), {}),
        (((0, 2),), {"correction": 2}),
        ((), {"dim": -1, "keepdim": True, "correction": 0}),
    ],
)
def test_var_over_split_dims(func: Any, args: Any, kwargs: Any) -> None:
    check(func, X, *args, **kwargs)


ROWS = [1.5], [INF], [2, 2, INF], [INF, 2, 2], [2, -INF, INF], [2, NAN, 2], [1.5, 2, 4, 8, 9]


@pytest.mark.parametrize("kwargs", [{}, {"dim": 0}, {"dim": 0, "correction": 5}, {"correction": 5}])
@pytest.mark.parametrize("func", [torch.var_mean, torch.std_mean])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_mean_beside_a_variance_that_is_not_finite(func: Any, kwargs: Any) -> None:
    """Its value and its gradient alone; also of one row on two ranks: one of them has no row."""
    for row in ROWS:
        x = torch.tensor(row, dtype=torch.float64)[:, None].expand(-1, 2).contiguous()
        leaf = x.clone().requires_grad_()
        mean = func(leaf, **kwargs)[1]
        (grad,) = torch.autograd.grad(mean.sum(), leaf)
        for at in (R, S0, S1):
            got = simulate(
                func, x, layouts=[[at]], mesh_shape=(2,), grad=True,
                cotangents=[None, torch.ones_like(mean)], **kwargs,
            )  # fmt: skip
            assert got is not None
            torch.testing.assert_close(got.full[1], mean.detach(), equal_nan=True)
            torch.testing.assert_close(got.gradients[0], grad)


def test_var_far_from_zero_and_of_equal_elements() -> None:
    check(torch.var, X + 1e6, 0, rtol=1e-6)
    check(torch.std, torch.ones(5, 6, dtype=torch.float64), 0)
    check(torch.Tensor.std, X, 1)
    check(torch.var, X.half(), (0, 1), rtol=2e-3, atol=1e-2)


@INPUTS
@pytest.mark.parametrize("p", [2, 1, 0, math.inf, -math.inf, 3.0, 1.5, 0.5])
@pytest.mark.parametrize("dim", [None, 0, (0, 1)], ids=str)
def test_vector_norm_over_split_dims(dim: Any, p: Any, x: torch.Tensor) -> None:
    check(torch.linalg.vector_norm, x, p, dim)


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (torch.norm, (), {}),
        (torch.norm, (1,), {"dim": 1}),
        (torch.norm, (), {"p": math.inf, "dim": (0, 2), "keepdim": True}),
        (torch.Tensor.norm, (), {"dim": 0}),
        (torch.linalg.norm, (), {}),
        (torch.linalg.norm, (), {"dim": (0, 1)}),
        (torch.linalg.norm, (1,), {"dim": 0}),
        (torch.linalg.matrix_norm, (), {}),
        (torch.linalg.matrix_norm, (), {"dim": (0, 1), "keepdim": True}),
    ],
)
def test_other_names_of_norms(func: Any, args: Any, kwargs: Any) -> None:
    check(func, X, *args, **kwargs)


@INPUTS
@pytest.mark.parametrize("args", [(), (2.0, 0), (1.0, -1), (math.inf, 1)])
def test_normalize(x: torch.Tensor, args: Any) -> None:
    check(F.normalize, x, *args, grad=not (x is ZEROS and args))


def test_matrices_whose_norm_is_not_frobenius_are_whole() -> None:
    arg = Arg((5, 6), [S0, R]).placed(2, 0)
    for order in (2, "nuc"):
        _, decision = decide(torch.linalg.matrix_norm, (arg, order), {}, [arg], (2, 2))
        assert decision is not None
        assert [w.placements(2) for w in decision.input_layouts] == [(R, R)]


@pytest.mark.parametrize(
    ("func", "args", "out"),
    [
        (torch.var, (Arg((5, 6), [S0, S1]), 1), (S0, R)),
        (torch.linalg.vector_norm, (Arg((5, 6), [S0, S1]),), (R, R)),
        (F.normalize, (Arg((5, 6), [S0, S1]),), (S0, S1)),
    ],
)
def test_placements_of_norms(func: Any, args: Any, out: Any) -> None:
    assert infer(func, *args).outputs == (out,)
