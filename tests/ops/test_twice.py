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


IMAGE = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
TAPS = torch.randn(3, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10))
EMPTY: list[tuple[Any, ...]] = [
    (F.conv1d, IMAGE, TAPS, TAPS[0, :3, 0].contiguous()), (F.conv1d, IMAGE, TAPS),
    (F.conv1d, IMAGE[:, :3].contiguous(), TAPS[:, :3].contiguous(), None, 1, 1),
    (F.conv_transpose1d, IMAGE, TAPS.transpose(0, 1).contiguous(), TAPS[0, :3, 0].contiguous()),
    (F.conv2d, IMAGE[:, :, None].repeat(1, 1, 6, 1), TAPS[..., None].repeat(1, 1, 1, 3)),
    (F.linear, IMAGE[:, 0], W.t()), (torch.matmul, IMAGE[:, 0], W), (F.layer_norm, X, (3,)),
    (torch.softmax, IMAGE, 0), (torch.std, IMAGE, 0),
    (F.bilinear, X[:3, 0], IMAGE[:, 0, :2].contiguous(), X[:, :3, :2].contiguous(), X[:, 0, 0]),
    (F.max_pool1d, IMAGE, 2), (F.adaptive_avg_pool1d, IMAGE, 2), (F.pad, IMAGE, (1, 1), "reflect"),
    (F.grid_sample, IMAGE[:, :, None], IMAGE[:, None, :3, :2].contiguous().tanh(),
     "bilinear", "zeros", True),
    (F.local_response_norm, IMAGE, 3), (F.batch_norm, IMAGE, None, None, *X[:4, 0, :2].T, True),
    (torch.cumprod, IMAGE, 0), (torch.logcumsumexp, IMAGE, 0), (torch.linalg.det, IMAGE[..., :4]),
    (torch._weight_norm, IMAGE, TAPS[:, :1, :1].contiguous(), 0),
]  # fmt: skip


@pytest.mark.parametrize("case", EMPTY, ids=lambda c: f"{c[0].__name__} {len(c)}")
def test_ranks_with_empty_pieces_agree_which_first_gradient_has_a_graph(case: Any) -> None:
    tensors = [v for v in case if isinstance(v, torch.Tensor)]
    for frozen in ((), *([(i,) for i in range(len(tensors))] if len(tensors) > 1 else [])):
        check_rule(
            *case, twice=True, mesh_shape=(4,), tries=8, partial=(), frozen=frozen, rtol=1e-8,
            atol=1e-8,
        )  # fmt: skip
