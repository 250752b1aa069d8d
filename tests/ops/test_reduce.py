"""Reductions: uneven and empty pieces, integers and bools, ties, NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from disttensor.core.placement import Partial, Replicate, Shard
from ops import Arg, NoRule, infer
from tests.support.simulate import check_rule

S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
NAN, INF = math.nan, math.inf
DIMS: list[Any] = [None, 0, -1, (0, 2), (0, 1, 2), ()]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def check(*args: Any, **kwargs: Any) -> None:
    """On 2x2, and on four ranks of which the last has nothing of 5."""
    assert check_rule(*args, **kwargs)
    assert check_rule(*args, mesh_shape=(4,), tries=8, seed=1, **kwargs)


X = randn(5, 6, 3)
WITH_ZEROS = X.clone()
WITH_ZEROS[1:3, 2, 0] = 0
WITH_NAN = X.clone()
WITH_NAN[1, 2] = WITH_NAN[4, :, 1] = math.nan
TIES = torch.randint(0, 3, (5, 6, 3), generator=torch.Generator().manual_seed(3)).double()


@pytest.mark.parametrize("dim", DIMS, ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("func", [torch.sum, torch.mean, torch.nansum])
def test_sums_match_plain(func: Any, dim: Any, keepdim: bool) -> None:
    check(func, X, dim, keepdim)


@pytest.mark.parametrize("func", [torch.nansum, torch.nanmean, torch.sum, torch.mean])
@pytest.mark.parametrize("dim", [None, 1, (0, 2)])
def test_nan_counts_as_in_torch(func: Any, dim: Any) -> None:
    check(func, WITH_NAN, dim, grad=func in (torch.nansum, torch.nanmean))


@pytest.mark.parametrize("args", [(), (0,), (-1, True)])
@pytest.mark.parametrize("x", [X, WITH_ZEROS], ids=["plain", "zeros"])
def test_prod_matches_plain(x: torch.Tensor, args: Any) -> None:
    check(torch.prod, x, *args)


ROWS = [0], [5], [0, 2, 3], [0, 2, 0], [0, 0, 2, NAN, 3], [0, INF, 2, 3, 1], [2, INF, 4, 0, 8]


@pytest.mark.parametrize("args", [(), (0,)])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_gradient_of_prod_at_zeros_beside_infinity(row: Any, args: Any) -> None:
    """Also of one row on two ranks: one of them has no row."""
    x = torch.tensor(row, dtype=torch.float64)
    for of in (x, x[:, None].expand(-1, 2).contiguous()):
        for at in (R, S0):
            assert check_rule(torch.prod, of, *args, layouts=[[at]], mesh_shape=(2,))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("func", [torch.sum, torch.prod, torch.any, torch.all, torch.count_nonzero])
@pytest.mark.parametrize("dim", [None, 1])
def test_integers_and_bools(func: Any, dim: Any, dtype: Any) -> None:
    args = () if dim is None else (dim,)
    check(func, TIES.abs().to(dtype), *args)


def test_the_mean_of_half_precision_does_not_overflow() -> None:
    check(torch.mean, torch.full((5, 4), 60000.0, dtype=torch.float16), rtol=1e-3)


@pytest.mark.parametrize("func", [torch.sum, torch.mean])
def test_a_dtype_for_the_result(func: Any) -> None:
    check(func, TIES.int(), 1, dtype=torch.float32, rtol=1e-6)


def test_empty_and_0d_tensors() -> None:
    check(torch.sum, randn(0, 3))
    check(torch.sum, randn(0, 3), 0)
    check(torch.mean, randn(0, 3), 1)
    check(torch.prod, randn(0, 3), 0)
    check(torch.sum, randn())
    check(torch.mean, randn(), 0)
    check(torch.any, torch.zeros(0, 3))


@pytest.mark.parametrize(
    ("func", "args", "out"),
    [
        (torch.sum, (Arg((5, 6), [S0, S1]), 1), (S0, P)),
        (torch.sum, (Arg((5, 6), [S0, S1]),), (P, P)),
        (torch.sum, (Arg((5, 6), [P, S1]), 0), (P, S0)),
        (torch.mean, (Arg((5, 6), [S0, R]), [0]), (P, R)),
        (torch.mean, (Arg((5, 6), [P, R]), 0), (P, R)),
        (torch.prod, (Arg((5, 6), [S0, R]), 0), (R, R)),
        (torch.any, (Arg((5, 6), [S0, R]), 0), (Partial("any"), R)),
        (torch.all, (Arg((5, 6), [S0, R]), 1, True), (S0, R)),
        (torch.nansum, (Arg((5, 6), [P, S0]), 1), (R, S0)),
    ],
)
def test_placements_of_reductions(func: Any, args: Any, out: Any) -> None:
    assert infer(func, *args).outputs == (out,)


def test_the_names_of_numpy_are_torchs() -> None:
    x = Arg((5, 6), [S0, S1])
    assert infer(torch.sum, x, axis=1, keepdims=True) == infer(torch.sum, x, 1, True)
    assert infer(torch.sum, a=x, axis=0) == infer(torch.sum, x, 0)
    assert infer(torch.add, x1=x, x2=x) == infer(torch.add, x, x)


def test_histograms_between_bounds_are_pending_counts() -> None:
    x = randn(5, 6)
    assert check_rule(torch.histc, x, 4, -1.0, 1.0, grad=False, partial=())
    assert check_rule(torch.histc, x, min=-1.0, max=1.0, grad=False, partial=(), tries=4)
    assert infer(torch.histc, Arg((5, 6), [S0, S1]), 4, 0, 3).outputs == ((P, P),)
    with pytest.raises(NoRule, match="bounds"):
        check_rule(torch.histc, x, 4, grad=False)


INTS = torch.randint(0, 90, (5, 6, 3), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("to", [torch.int32, torch.uint8, torch.bool, torch.float32], ids=str)
def test_products_have_the_dtype_that_is_given(to: torch.dtype, dim: int) -> None:
    """Not that of torch's promotion: the numbers wrap around as in one process."""
    for x in (INTS, INTS.byte(), INTS > 1):
        check(torch.prod, x, dim, dtype=to, grad=False, rtol=1e-5)


@pytest.mark.parametrize("args", [(2,), (2, 0), (2, 0, False), ("fro",)], ids=str)
def test_the_method_norm_has_the_dtype_that_is_given(args: Any) -> None:
    """Its arguments are not those of torch.norm, which has ``out`` before ``dtype``."""
    x = X.float()
    check(torch.Tensor.norm, x, *args, dtype=torch.float64, rtol=1e-6)
    if len(args) == 3:
        check(torch.Tensor.norm, x, *args, torch.float64, rtol=1e-6)
