"""softmax and logsumexp over a split dim, and functions that go along a whole one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from disttensor.core.placement import Partial, Replicate, Shard
from ops import Arg, infer
from tests.support.simulate import check_rule

S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()

X = torch.randn(5, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
LOW = X.clone()
LOW[1, :, 2] = LOW[0, 1] = LOW[:, 3, 0] = -math.inf
LOW[2, 0, 1] = math.inf
TIES = torch.randint(0, 3, (5, 6, 3), generator=torch.Generator().manual_seed(3)).double()


def check(*args: Any, **kwargs: Any) -> None:
    """On 2x2, and on four ranks of which the last has nothing of 5."""
    assert check_rule(*args, **kwargs)
    assert check_rule(*args, mesh_shape=(4,), tries=8, seed=1, **kwargs)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize(
    "func",
    [F.softmax, torch.softmax, torch.Tensor.softmax, F.log_softmax, torch.log_softmax, F.softmin],
)
def test_softmax_over_a_split_dim(func: Any, dim: int) -> None:
    check(func, X, dim)
    check(func, X * 300, dim)


def test_softmax_to_another_dtype() -> None:
    check(torch.softmax, X.float(), 0, torch.float64, rtol=1e-6, atol=1e-6)
    check(F.log_softmax, X.float(), 0, dtype=torch.float64, rtol=1e-6, atol=1e-6)


def test_softmax_with_infinities_and_nan() -> None:
    check(F.softmax, LOW, 1, grad=False)
    check(F.log_softmax, LOW, 1, grad=False)
    check(F.softmax, LOW.masked_fill(LOW.isposinf(), math.nan), 1, grad=False)


@pytest.mark.parametrize("dim", [0, 1, -1, (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_logsumexp_over_split_dims(dim: Any, keepdim: bool) -> None:
    check(torch.logsumexp, X, dim, keepdim)
    check(torch.logsumexp, X * 300, dim, keepdim)
    check(torch.logsumexp, LOW.clamp(max=9), dim, keepdim)
    check(torch.logsumexp, LOW, dim, keepdim, grad=False)


ALONG: list[tuple[Any, ...]] = [
    (torch.cumsum, X, 1),
    (torch.cumprod, X, 0),
    (torch.logcumsumexp, X, -1),
    (torch.cummax, X, 1),
    (torch.cummin, X, 0),
    (torch.sort, X),
    (torch.sort, X, 0, True),
    (torch.Tensor.sort, X, 1),
    (torch.argsort, X, 1),
    (torch.msort, X),
    (torch.topk, X, 2, 1),
    (torch.Tensor.topk, X, 3),
    (torch.kthvalue, X, 2, 0),
    (torch.mode, TIES, 1),
    (torch.median, X),
    (torch.median, X, 1),
    (torch.median, X, 1, True),
    (torch.nanmedian, X, 0),
    (torch.quantile, X, 0.3),
    (torch.quantile, X, 0.3, 1),
    (torch.quantile, X, torch.tensor([0.1, 0.6], dtype=torch.float64), 1),
    (torch.quantile, X, torch.tensor([0.1, 0.6], dtype=torch.float64), 0, True),
    (torch.cosine_similarity, X, TIES + 1),
    (torch.cumsum, TIES.to(torch.uint8), 0),
]


@pytest.mark.parametrize(
    "case", ALONG, ids=lambda c: f"{c[0].__name__}{[a for a in c[2:] if isinstance(a, int)]}"
)
def test_functions_along_a_dim(case: Any) -> None:
    check(*case)


@pytest.mark.parametrize(
    ("func", "args", "outs"),
    [
        (F.softmax, (Arg((5, 6), [S0, S1]), 1), ((S0, S1),)),
        (torch.logsumexp, (Arg((5, 6), [S0, S1]), 1), ((S0, R),)),
        (torch.cumsum, (Arg((5, 6), [P, S1]), 0), ((P, S1),)),
        (torch.cumsum, (Arg((5, 6), [S0, R]), 0), ((S1, R),)),
        (torch.topk, (Arg((6, 6), [S0, S1]), 2), ((S0, S0), (S0, S0))),
    ],
)
def test_placements(func: Any, args: Any, outs: Any) -> None:
    assert infer(func, *args).outputs == outs
