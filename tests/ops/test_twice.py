"""Second derivatives of local functions that communicate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.simulate import check_rule

X = torch.randn(5, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
W = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(8))

CASES: list[tuple[Any, ...]] = [
    (torch.matmul, X[:, :, 0].contiguous(), W),
    (torch.sum, X, 1),
    (torch.mean, X),
    (torch.prod, X, 0),
    (torch.amax, X, (0, 1)),
    (torch.max, X),
    (torch.max, X, 1),
    (torch.var, X, 0),
    (torch.std, X),
    (torch.linalg.vector_norm, X),
    (torch.linalg.vector_norm, X, 3.0, 1),
    (torch.linalg.vector_norm, X, math.inf, (0, 1)),
    (F.normalize, X, 2.0, 1),
    (F.softmax, X, 1),
    (F.log_softmax, X, 0),
    (torch.logsumexp, X, (0, 1)),
    (F.batch_norm, X, None, None, None, None, True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].__name__}{c[2:3]}")
def test_second_derivatives(case: Any) -> None:
    assert check_rule(*case, twice=True, rtol=1e-8, atol=1e-8)
