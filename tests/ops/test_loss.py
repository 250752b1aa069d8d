"""Rules of losses: values and gradients over uneven shards; split classes, logits not gathered."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ops
from disttensor.core.placement import Partial, Replicate, Shard
from ops import Arg
from ops.registry import RULES
from tests.support.simulate import check_rule, simulate

R, P = Replicate(), Partial()
S = Shard


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def constant(func: Any, first: int) -> Iterator[Any]:
    """``func`` whose tensors from ``first`` on are given as integers: torch has no gradient for
    them, and the oracle asks for one of each float."""

    kept = [*inspect.signature(func).parameters][:first]

    def wrapped(*args: Any, **words: Any) -> Any:
        def real(v: Any) -> Any:
            return v.double() if isinstance(v, torch.Tensor) and not v.is_floating_point() else v

        args = (*args[:first], *(real(a) for a in args[first:]))
        return func(*args, **{k: v if k in kept else real(v) for k, v in words.items()})

    wrapped.__name__ = func.__name__
    RULES[wrapped] = RULES[func]
    yield wrapped
    del RULES[wrapped]


X, Y, Z = randn(5, 7), randn(5, 7, seed=1), randn(7, seed=2)
SIGN = X.sign()
COUNTS = torch.tensor([1, 2, 3, 1, 2, 1, 3])
UNIT = X.sigmoid()
LOSSES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (F.mse_loss, (X, Y), {}),
    (F.l1_loss, (X, Y), {}),
    (F.smooth_l1_loss, (X, Y), {"beta": 0.5}),
    (F.huber_loss, (X, Y), {"delta": 0.3}),
    (F.kl_div, (X, UNIT), {}),
    (F.kl_div, (X, X), {"log_target": True}),
    (F.soft_margin_loss, (X, SIGN.long()), {}),
    (F.hinge_embedding_loss, (X, SIGN), {}),
    (F.poisson_nll_loss, (X, Y), {"full": False}),
    (F.gaussian_nll_loss, (X, Y, UNIT), {}),
    (F.binary_cross_entropy, (UNIT, Y.sigmoid()), {}),
    (F.binary_cross_entropy, (UNIT, Y.sigmoid(), COUNTS), {}),
    (F.binary_cross_entropy_with_logits, (X, UNIT), {}),
    (F.binary_cross_entropy_with_logits, (X, UNIT), {"pos_weight": COUNTS}),
    (F.margin_ranking_loss, (X, Y, SIGN), {"margin": 0.1}),
    (F.multi_margin_loss, (X, torch.tensor([0, 3, 6, 2, 1])), {}),
    (F.multilabel_soft_margin_loss, (X, (Y > 0).double()), {}),
    (F.cosine_embedding_loss, (X, Y, SIGN[:, 0]), {}),
    (F.triplet_margin_loss, (X, Y, X * Y), {}),
]


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("behind", [True, False], ids=["one behind the other", "rows"])
@pytest.mark.parametrize("listed", [True, False])
def test_sequences_of_a_split_batch(listed: bool, behind: bool, reduction: int) -> None:
    times, sizes = torch.full((5,), 6), torch.tensor([2, 1, 2, 0, 2])
    if listed:
        times, sizes = tuple(times.tolist()), tuple(sizes.tolist())
    probs = torch.log_softmax(randn(6, 5, 4), 2)
    targets = torch.tensor([[1, 2], [3, 1], [2, 2], [1, 1], [3, 2]])
    if behind:
        targets = torch.tensor([1, 2, 3, 2, 2, 3, 2])
    for mesh in ((2, 2), (4,)):  # of five sequences the last rank has none
        assert check_rule(
            torch.ctc_loss, probs, targets, times, sizes, 0, reduction, mesh_shape=mesh, tries=8
        )
    lengths = (6,) * 6, (2,) * 6
    arg = Arg((6, 6, 4), [S(1)]), Arg((6, 2), [R], torch.int64)
    (out,) = ops.infer(torch.ctc_loss, *arg, *lengths, 0, reduction, mesh_shape=(2,)).outputs
    assert out == ((S(0),) if not reduction else (P,))
    with pytest.raises(RuntimeError, match="lengths must be of size batch_size"):
        ops.infer(torch.ctc_loss, *arg, (6,) * 5, (2,) * 6, mesh_shape=(2,))


@pytest.mark.parametrize("case", LOSSES, ids=lambda c: c[0].__name__)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "batchmean"])
def test_losses_match_plain(case: Any, reduction: str) -> None:
    func, args, options = case
    if reduction == "batchmean" and func is not F.kl_div:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kl_div's advice
        for mesh_shape in [(2, 2), (4,)]:
            for f in constant(func, 1 if func is F.soft_margin_loss else 2):
                check_rule(
                    f, *args, reduction=reduction, mesh_shape=mesh_shape, tries=12, **options
                )


def test_mean_over_uneven_shards_is_a_pending_sum() -> None:
    got = ops.infer(F.mse_loss, Arg((5, 7), [S(0), S(1)]), Arg((5, 7), [S(0), R]))
    assert got.outputs == ((P, P),)
    assert got.shapes == ((),)
    done = simulate(F.mse_loss, X, Y, layouts=[[S(0)], [S(0)]], mesh_shape=(4,))
    assert done is not None and not done.log  # the count is known: nothing is sent


def test_mse_weights() -> None:
    w = UNIT.clone()
    for reduction in ("sum", "none"):
        check_rule(F.mse_loss, X, Y, weight=w, reduction=reduction)


LOGITS = {
    "n c": (X, torch.tensor([0, 3, 6, -100, 3])),
    "c": (Z, torch.tensor(4)),
    "n c d": (randn(3, 7, 4), torch.randint(7, (3, 4), generator=torch.Generator().manual_seed(0))),
    "n c d e": (randn(2, 7, 3, 2), torch.arange(12).reshape(2, 3, 2) % 7),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", [None, COUNTS], ids=["plain", "weight"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", LOGITS)
def test_cross_entropy_matches_plain(
    shape: str, smoothing: float, weight: Any, reduction: str
) -> None:
    x, target = LOGITS[shape]
    for mesh_shape in [(2, 2), (4,)]:
        for f in constant(F.cross_entropy, 2):
            check_rule(
                f,
                x,
                target,
                weight,
                reduction=reduction,
                label_smoothing=smoothing,
                mesh_shape=mesh_shape,
                tries=10,
            )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", [None, COUNTS], ids=["plain", "weight"])
@pytest.mark.parametrize("shape", LOGITS)
def test_nll_loss_matches_plain(shape: str, weight: Any, reduction: str) -> None:
    x, target = LOGITS[shape]
    target = target.clamp(min=0)
    for mesh_shape in [(2, 2), (4,)]:
        for f in constant(F.nll_loss, 2):
            check_rule(
                f,
                x,
                target,
                weight,
                reduction=reduction,
                ignore_index=3,
                mesh_shape=mesh_shape,
                tries=10,
            )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, COUNTS], ids=["plain", "weight"])
def test_class_probabilities_match_plain(weight: Any, smoothing: float, reduction: str) -> None:
    for shape in ((5, 7), (3, 7, 2), (7,)):
        target = randn(*shape, seed=1).softmax(0)
        for f in constant(F.cross_entropy, 2):
            check_rule(
                f,
                randn(*shape),
                target,
                weight,
                reduction=reduction,
                label_smoothing=smoothing,
                tries=10,
            )


def test_split_classes_send_two_numbers_for_each_target() -> None:
    x, target = LOGITS["n c"]
    layouts = [[S(0), S(1)], [S(0), R]]
    done = simulate(
        F.cross_entropy,
        x,
        target,
        layouts=layouts,
        mesh_shape=(2, 2),
        grad=True,
        cotangents=[torch.ones(())],
    )
    assert done is not None
    assert done.outputs(2) == ((P, R),)
    assert done.log == [
        ("all_reduce max", (1,), 3),
        ("all_reduce sum", (1,), 6),
        ("all_reduce sum", (0,), 1),
    ]


def test_all_targets_ignored_is_nan_as_in_torch() -> None:
    check_rule(F.cross_entropy, X, torch.full((5,), -100), tries=8)


def test_logits_masked_by_infinity() -> None:
    x = X.clone()
    x[:, 3:] = -torch.inf
    check_rule(F.cross_entropy, x, torch.tensor([0, 1, 2, 0, 1]), tries=12, partial=())


def test_extreme_logits_do_not_overflow() -> None:
    check_rule(F.cross_entropy, X * 1e4, torch.tensor([0, 1, 2, 6, 5]), tries=12, partial=())


@pytest.mark.parametrize("wrong", [-1, 7])
def test_a_wrong_class_is_torchs_error(wrong: int) -> None:
    target = torch.tensor([0, 1, 2, 3, wrong])
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        simulate(F.cross_entropy, X, target, layouts=[[S(1)], [R]], mesh_shape=(2,))


def test_half_precision_sums_in_single() -> None:
    x = randn(4096, 8).to(torch.bfloat16)
    target = torch.arange(4096) % 8
    for layouts in ([[S(0)], [S(0)]], [[S(1)], [R]]):
        check_rule(
            F.cross_entropy, x, target, layouts=layouts, mesh_shape=(2,), rtol=2e-2, atol=1e-2
        )


@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_are_torchs(autocast: bool) -> None:
    x, target = X.to(torch.bfloat16), torch.tensor([0, 3, 6, 1, 3])
    probabilities = Y.softmax(1).float()
    for layouts in ([[S(0)], [S(0)]], [[S(1)], [R]]):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for second in (target, probabilities):
                plain = F.cross_entropy(x, second).dtype
                done = simulate(F.cross_entropy, x, second, layouts=layouts, mesh_shape=(2,))
                assert done is not None and done.full[0].dtype == plain
