"""Functions along some dims, for each index of the others; copies of views; images; distances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from disttensor.core.placement import Replicate, Shard
from ops import Arg, infer
from ops.infer import decide
from tests.support.simulate import check_rule

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")

S, R = Shard, Replicate()
T = torch.Tensor


def randn(*shape: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=draw)


X, V = randn(5, 6, 7), randn(7)
IMAGE, GRID = randn(5, 4, 6, 4), torch.tanh(randn(5, 3, 6, 2))
POOLED, PLACES = F.max_pool2d(IMAGE, 2, return_indices=True)
IDS = torch.arange(15).view(5, 3) % 6
LINE, SPOTS = F.max_pool1d(X[..., :6], 2, return_indices=True)
A, B = randn(5, 3, 4, 4), randn(5, 3, 4, 2)
LU, PIVOTS = torch.linalg.lu_factor(randn(3, 3, 3))

# (function, arguments, words, a dim of the first tensor that keeps its shards, the dim of each
# result or None)
CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any], int, int | None]] = [
    (torch.diff, (X,), {}, 1, 1),
    (torch.diff, (X, 2, 1), {"prepend": X[:, :2], "append": X[:, :1]}, 2, 2),
    (T.diff, (X,), {"dim": 0}, 1, 1),
    (torch.gradient, (X,), {"dim": (1, 2)}, 0, 0),
    (torch.gradient, (X,), {"dim": 2, "spacing": (V,)}, 1, 1),
    (torch.trapezoid, (X,), {"dim": 1}, 2, 1),
    (torch.trapz, (X, V), {}, 0, 0),
    (torch.trapezoid, (X, X * X), {"dim": 0}, 2, 1),
    (torch.cumulative_trapezoid, (X, V), {}, 1, 1),
    (torch.cumulative_trapezoid, (X,), {"dx": 0.5, "dim": 0}, 1, 1),
    (torch.renorm, (X, 2, 1, 0.5), {}, 1, 1),
    (torch.cross, (randn(5, 3, 4), randn(5, 3, 4)), {}, 0, 0),
    (torch.cross, (randn(5, 3, 4), randn(5, 3, 4), 1), {}, 2, 2),
    (torch.linalg.cross, (randn(5, 4, 3), randn(1, 4, 3)), {}, 0, 0),
    (torch.isin, (X.round(), V.round()), {}, 1, 1),
    (torch.bucketize, (X, V.sort()[0]), {}, 2, 2),
    (F.pixel_shuffle, (IMAGE, 2), {}, 0, 0),
    (F.pixel_unshuffle, (IMAGE, 2), {}, 0, 0),
    (F.channel_shuffle, (IMAGE, 2), {}, 2, 2),
    (F.local_response_norm, (IMAGE, 3), {}, 3, 3),
    (F.unfold, (IMAGE, 2), {"padding": 1}, 0, 0),
    (F.fold, (randn(5, 8, 9), (4, 4), 2), {}, 0, 0),
    (F.max_unpool2d, (POOLED, PLACES, 2), {}, 1, 1),
    (F.max_unpool1d, (LINE, SPOTS, 2), {}, 0, 0),
    (F.grid_sample, (IMAGE, GRID), {"align_corners": False}, 1, 1),
    (torch.grid_sampler_2d, (IMAGE, GRID, 0, 0, True), {}, 0, 0),
    (torch.pinverse, (A,), {}, 1, 1),
    (torch.linalg.pinv, (A,), {"rtol": 1e-12}, 0, 0),
    (torch.linalg.cond, (A,), {}, 0, 0),
    (torch.linalg.matrix_rank, (A,), {}, 1, 1),
    (torch.linalg.lu, (A,), {}, 0, 0),
    (torch.linalg.vander, (randn(5, 4),), {"N": 3}, 1, 1),
    (torch.linalg.vander, (randn(5, 4),), {}, 1, 1),
    (F.adaptive_max_pool2d_with_indices, (IMAGE, (2, 3)), {}, 0, 0),
    (torch.adaptive_max_pool1d, (X, 2), {}, 1, 1),
    (torch.searchsorted, (X.sort()[0], X), {}, 1, 1),
    (F.embedding_bag, (IDS, randn(6, 4)), {"mode": "sum"}, 0, 0),
    (F.embedding_bag, (IDS, randn(6, 4)), {"mode": "max"}, 0, 0),
    (F.embedding_bag, (IDS, randn(6, 4)), {"mode": "sum", "per_sample_weights": randn(5, 3)}, 0, 0),
    (torch.linalg.matrix_norm, (A, "nuc"), {}, 1, 1),
    (torch.linalg.matrix_norm, (A, float("inf")), {"dim": (0, 2), "keepdim": True}, 1, 1),
    (torch.lu_solve, (randn(3, 3, 2), LU, PIVOTS), {}, 0, 0),
    (torch.linalg.multi_dot, ([randn(5, 4), randn(4, 6), randn(6, 3)],), {}, 0, 0),
    (torch.linalg.multi_dot, ([randn(5), randn(5, 6), randn(6)],), {}, 0, None),
    (torch.kron, (randn(4, 3), randn(2, 5)), {}, 0, 0),
    (torch.kron, (randn(4), randn(2, 5)), {}, 0, 1),
    (torch.cdist, (randn(5, 4, 3), randn(6, 3)), {}, 1, 1),
    (F.pairwise_distance, (X, V), {"keepdim": True}, 1, 1),
    (F.pairwise_distance, (X, randn(6, 7)), {"p": 1.0}, 0, 0),
    (torch.native_layer_norm, (X, (7,), V, None, 1e-5), {}, 1, 1),
    (torch.native_layer_norm, (X, (6, 7), None, None, 1e-5), {}, 0, 0),
    (torch.stft, (randn(5, 20), 6), {"window": randn(6), "return_complex": True}, 0, 0),
    (torch.diagonal_scatter, (A, randn(3, 4, 3), 1, 0, 2), {}, 1, 1),
    (torch.expand_copy, (randn(5, 1), (5, 4)), {}, 0, 0),
    (torch.diagonal_copy, (X, 0, 1, 2), {}, 0, 0),
    (torch.alias_copy, (X,), {}, 1, 1),
    (torch.permute_copy, (X, (2, 0, 1)), {}, 0, 1),
    (torch.split_with_sizes_copy, (X, (2, 4), 1), {}, 0, 0),
    (torch.unbind_copy, (X,), {}, 1, 0),
    (torch.unfold_copy, (X, 1, 2, 2), {}, 2, 2),
    (torch.squeeze_copy, (randn(5, 1, 4),), {}, 2, 1),
    (torch.unsqueeze_copy, (X, 0), {}, 0, 1),
    (torch.transpose_copy, (X, 0, 1), {}, 0, 1),
    (torch.t_copy, (randn(5, 4),), {}, 0, 1),
    (torch.atleast_1d, (X,), {}, 0, 0),
    (torch.atleast_2d, (V,), {}, 0, 1),
    (torch.atleast_3d, (V,), {}, 0, 1),
    (torch.atleast_3d, (randn(5, 4),), {}, 1, 1),
    (torch.broadcast_tensors, (X, randn(6, 1)), {}, 0, 0),
    (torch.linalg.diagonal, (A,), {}, 1, 1),
]  # fmt: skip


def arg(value: Any, first: Any, dim: int) -> Any:
    """An Arg for each tensor, replicated but for ``first``."""
    if isinstance(value, T):
        return Arg(value.shape, [S(dim) if value is first else R], value.dtype)
    return [arg(v, first, dim) for v in value] if type(value) is list else value


def name(case: Any) -> str:
    return str(case[0].__name__)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_what_is_independent_keeps_its_shards(case: Any) -> None:
    func, args, words, dim, out = case
    first = args[0] if isinstance(args[0], T) else args[0][0]
    words = {
        k: tuple(arg(t, first, dim) for t in v) if k == "spacing" else arg(v, first, dim)
        for k, v in words.items()
    }
    answer = infer(func, *(arg(a, first, dim) for a in args), mesh_shape=(2,), **words)
    assert answer.inputs[0] == (S(dim),)
    if out is not None:
        assert set(answer.outputs) == {(S(out),)}


@pytest.mark.parametrize("case", CASES, ids=name)
def test_values_and_gradients_are_those_of_plain_torch(case: Any) -> None:
    func, args, words, _, _ = case
    assert check_rule(func, *args, tries=5, **words)
    assert check_rule(func, *args, mesh_shape=(4,), tries=3, seed=1, **words)


def test_bags_of_different_lengths_split_the_columns() -> None:
    ids, table, starts, w = IDS.view(-1), randn(6, 5), torch.tensor([0, 4, 5]), randn(15)
    assert check_rule(F.embedding_bag, ids, table, starts, mode="mean", tries=8)
    assert check_rule(
        F.embedding_bag, ids, table, per_sample_weights=w, offsets=starts, mode="sum", tries=8
    )
    args = Arg((15,), [R], ids.dtype), Arg((6, 5), [S(1)]), Arg((3,), [R], ids.dtype)
    assert infer(F.embedding_bag, *args, mesh_shape=(2,)).outputs == ((S(1),),)


def test_copies_share_no_memory() -> None:
    x = Arg((5, 6), [S(0)], torch.float64).placed(1, 0)
    assert decide(torch.t, [x], {}, [x], (2,))[0].views == (0,)
    assert not decide(torch.t_copy, [x], {}, [x], (2,))[0].view
