"""Convolutions and pooling: batch and channels may be split, groups stay together.

Dims that a convolution slides over: tests/ops/test_halo.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from disttensor.core.placement import Partial, Replicate, Shard
from ops import Arg, infer
from tests.support.simulate import check_rule

S0, S1, S2, R, P = Shard(0), Shard(1), Shard(2), Replicate(), Partial()


def t(*shape: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=seed)


def check(*args: Any, **kwargs: Any) -> None:
    """On 2x2, and on four ranks of which the last has nothing of 5."""
    assert check_rule(*args, atol=1e-8, **kwargs)
    assert check_rule(*args, mesh_shape=(4,), tries=8, seed=1, atol=1e-8, **kwargs)


CONVOLUTIONS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((F.conv1d, t(5, 3, 7), t(6, 3, 3), t(6)), {"padding": 1}),
    ((F.conv1d, t(3, 7), t(5, 3, 3)), {"stride": 2}),
    ((F.conv2d, t(5, 3, 7, 6), t(6, 3, 3, 2), t(6)), {}),
    ((F.conv2d, t(5, 3, 7, 6), t(5, 3, 3, 3)), {"stride": (2, 1), "padding": [1, 0]}),
    ((F.conv2d, t(5, 3, 7, 6), t(6, 3, 3, 3), t(6)), {"padding": "same", "dilation": 2}),
    ((F.conv2d, t(5, 3, 7, 6), t(6, 3, 3, 3), t(6)), {"padding": "valid"}),
    ((F.conv2d, t(5, 4, 5, 6), t(6, 2, 3, 3), t(6)), {"groups": 2}),
    ((F.conv2d, t(5, 4, 5, 6), t(4, 1, 3, 3), t(4)), {"groups": 4}),
    ((F.conv3d, t(2, 3, 4, 3, 3), t(4, 3, 2, 2, 2), t(4)), {}),
    ((F.conv_transpose1d, t(5, 3, 7), t(3, 6, 3), t(6)), {"stride": 2, "output_padding": 1}),
    ((F.conv_transpose2d, t(5, 3, 4, 3), t(3, 6, 3, 2)), {"padding": 1, "dilation": 2}),
    ((F.conv_transpose2d, t(5, 4, 4, 3), t(4, 3, 3, 2), t(6)), {"groups": 2}),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda c: f"{c[0][0].__name__}{c[1]}")
def test_convolutions(case: Any) -> None:
    check(*case[0], **case[1])


POOLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((F.max_pool1d, t(5, 3, 7), 3), {}),
    ((F.max_pool2d, t(5, 3, 7, 6), 2), {"stride": 1, "padding": 1}),
    ((F.max_pool2d, t(5, 3, 7, 6), (3, 2)), {"ceil_mode": True}),
    ((F.max_pool2d, t(5, 3, 7, 6), 2), {"return_indices": True}),
    ((F.max_pool2d, t(3, 7, 6), 2), {"dilation": 2}),
    ((torch.max_pool2d, t(5, 3, 7, 6), [2, 2]), {}),
    ((F.avg_pool1d, t(5, 3, 7), 2), {"ceil_mode": True}),
    ((F.avg_pool1d, t(0, 3, 7), 2), {}),  # no batch, and three channels over four ranks
    ((F.avg_pool2d, t(5, 3, 7, 6), 3), {"stride": 2, "padding": 1, "ceil_mode": True}),
    ((F.avg_pool2d, t(5, 3, 7, 6), 2), {"divisor_override": 3}),
    ((F.avg_pool3d, t(5, 3, 4, 4, 4), 2), {}),
    ((F.adaptive_avg_pool1d, t(5, 3, 7), 2), {}),
    ((F.adaptive_avg_pool2d, t(5, 3, 7, 6), (3, None)), {}),
    ((F.adaptive_avg_pool2d, t(5, 3, 7, 6), 1), {}),
    ((F.adaptive_max_pool2d, t(5, 3, 7, 6), 2), {}),
    ((F.adaptive_max_pool1d, t(5, 3, 7), 2), {"return_indices": True}),
]


@pytest.mark.parametrize("case", POOLS, ids=lambda c: f"{c[0][0].__name__}{c[1]}")
def test_pools(case: Any) -> None:
    check(*case[0], **case[1])


@pytest.mark.parametrize(
    ("func", "args", "out"),
    [
        (F.conv2d, (Arg((4, 6, 8, 8), [S0, R]), Arg((6, 6, 3, 3), [R, S0])), (S0, S1)),
        (F.conv2d, (Arg((4, 6, 8, 8), [R, S1]), Arg((6, 6, 3, 3), [R, S1])), (R, P)),
        (F.conv2d, (Arg((4, 6, 8, 8), [S2, R]), Arg((6, 6, 3, 3), [R, R])), (S2, R)),
        (F.max_pool2d, (Arg((4, 6, 8, 8), [S0, S1]), 2), (S0, S1)),
        (F.avg_pool2d, (Arg((4, 6, 8, 8), [S0, P]), 2), (S0, P)),
    ],
)
def test_placements(func: Any, args: Any, out: Any) -> None:
    assert infer(func, *args).outputs == (out,)
