"""What a rule does not cover: it says so, and the call is right all the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from disttensor.core.placement import Replicate, Shard
from ops import NoRule, signatures
from tests.support.oracle import check_op, fallbacks, line, place, randint, randn
from tests.support.pool import on_ranks
from tests.support.simulate import plan
from tests.support.structure import replace_tensors, tensors_in

T = torch.Tensor
get = T.__getitem__
A = slice(None)
X, C, V, ONE = randn(4, 6, 5), randn(5, 6), randn(6), randn()
IDS, TWO = torch.tensor([0, 3, 3, 1]), torch.tensor(2)
MASK, ROWS = C > 0, C[:, 0] > 0
Q, K = randn(2, 4, 5, 3), randn(2, 4, 7, 3)

# (what is said, function, its arguments, words)
PICKED: list[tuple[Any, ...]] = [
    ("a mask among", get, C, (A, V > 0)),
    ("a mask among", get, C, (ROWS, 2)),
    ("depends on the data", get, C, MASK),
    ("depends on the data", get, C, ROWS),
    ("indexing with bool", get, C, True),
    ("a nested list", get, C, [[0, 1]]),
    ("a slice of tensors", get, C, slice(torch.tensor(1), torch.tensor(3))),
    ("select by a tensor", torch.select, C, 0, TWO),
    ("narrow by a tensor", torch.narrow, C, 0, TWO, 2),
    ("of a number", torch.index_select, ONE, 0, torch.tensor([0])),
    ("of a number", torch.gather, ONE, 0, torch.tensor(0)),
    ("the flat tensor", torch.take_along_dim, C, IDS),
    ("a number among", torch.isin, 3.0, C),
    ("the bucket of a number", torch.bucketize, 0.5, V.sort()[0]),
    ("the place of a number", torch.searchsorted, V.sort()[0], 0.5),
    ("by a sorter", torch.searchsorted, V, C, {"sorter": V.argsort()}),
    ("into a number", torch.scatter, ONE, 0, torch.tensor(0), ONE),
    ("depends on data", torch.where, MASK),
    ("number of classes", F.one_hot, IDS),
]
SHAPED: list[tuple[Any, ...]] = [
    ("several tensors", torch.atleast_1d, ONE, V),
    ("several tensors", torch.atleast_2d, ONE, V),
    ("cuts given by a tensor", torch.tensor_split, C, torch.tensor([2, 3])),
    ("given by a tensor", torch.repeat_interleave, C, torch.tensor([1, 2, 0, 1, 3]), 0),
    ("no repeats", torch.repeat_interleave, C, 0, 1),
    ("unfold of a number", T.unfold, ONE, 0, 1, 1),
    ("another size", T.view, C.float(), torch.int16),
    ("a fill_value", T.new_full, C, (2, 3), ONE),
    ("data that are or hold a tensor", T.new_tensor, C, V.clone()),
    ("bounds that are tensors", torch.randint_like, C, torch.tensor(1)),
]
REDUCED: list[tuple[Any, ...]] = [
    ("with dims kept", torch.quantile, C, 0.3, None, True),
    ("without a dim", F.softmax, C),
    ("logsumexp of integers", torch.logsumexp, randint(-4, 9, (5, 3)), 1),
    ("bounds that depend", torch.histc, C, 4),
    ("of order", torch.norm, C, -1.0),
    ("not real", torch.norm, torch.complex(C, C)),
    ("matrix norm", torch.linalg.norm, C, "nuc"),
    ("var of torch.complex128", torch.var, torch.complex(C, C)),
    ("of order", torch._foreach_norm, [C, V], -1.0),
    ("powers of order", torch._foreach_powsum, [C, V], math.inf),
]
MULTIPLIED: list[tuple[Any, ...]] = [
    ("cross without a dim", torch.cross, randn(5, 3), randn(1, 3)),
    ("that broadcast", torch.linalg.vecdot, C, V),
    ("that broadcast", torch.cosine_similarity, C, V.unsqueeze(0)),
    ("dims that differ", torch.tensordot, C, randn(1, 4), ([1], [0])),
    ("no vector of the outputs", F.linear, C, randn(3, 6), randn(1)),
    ("one signal", torch.stft, randn(20), 6, {"window": randn(6), "return_complex": True}),
    ("distance of numbers", F.pairwise_distance, ONE, ONE + 1),
    ("tolerances", torch.linalg.pinv, C, torch.tensor(1e-12)),
]
LAYERS: list[tuple[Any, ...]] = [
    ("tensors that broadcast", F.scaled_dot_product_attention, Q, K[0], K[0]),
    ("shapes that broadcast", F.scaled_dot_product_attention, Q, K[:, :1], K[:, :1]),
    ("odd groups", F.scaled_dot_product_attention, Q, K[:, :2], K, {"enable_gqa": True}),
    ("look at the whole", F.embedding, IDS, C, {"scale_grad_by_freq": True}),
    ("inplace=True", F.relu, C, True),
    ("deprecated", F.mse_loss, C, C + 1, {"reduce": True}),
    ("a mean by weights", F.mse_loss, C, C + 1, {"weight": C.square()}),
    ("another shape", F.gaussian_nll_loss, C, C + 1, C[:, 0].square()),
    ("rows of vectors", F.multi_margin_loss, V, torch.tensor(2)),
    ("weights of", F.multi_margin_loss, C, torch.arange(5), {"weight": V.square()}),
    ("rows that broadcast", F.triplet_margin_loss, C, V.unsqueeze(0), C + 1),
    ("one norm of the whole", torch._weight_norm, C, ONE, -1),
]
NO_GRADIENT = {
    "a fill_value", "powers of order", "one signal", "tolerances", "inplace=True", "weights of",
}  # fmt: skip
# Torch refuses these, and says why.
REFUSED: list[tuple[Any, ...]] = [
    ("more than one Ellipsis", get, C, (..., ..., 0)),
    ("backwards", get, C, slice(None, None, -1)),
    ("pieces of size 0", torch.split, C, 0),
    ("different numbers of dims", torch.cat, [C, X]),
    ("different numbers of dims", torch.hstack, [C, X]),
    ("two dims", torch.tril, V),
    ("conv2d of", F.conv2d, V, randn(2, 3, 2, 2)),
    ("do not fit", F.conv2d, randn(1, 4, 6, 6), randn(2, 3, 2, 2)),
    ("too few dims for max_pool2d", F.max_pool2d, V, 2),
    ("do not fit", torch.linalg.multi_dot, [C, C, C]),
    ("do not fit", torch.searchsorted, C, X),
    ("of nothing", torch.amax, randn(0, 3)),
    ("the largest of nothing", torch.norm, randn(0, 3), math.inf),
    ("matrix for each group", F.grouped_mm, C, C),
    ("a source with other dims", torch.index_copy, X, 0, torch.tensor([0]), C),
    ("wants batch", F.interpolate, C, 3),
    ("do not fit", F.cross_entropy, C, torch.tensor([0, 1])),
    ("more dims than values", torch.trapezoid, V, C),
    ("fewer than 3 dims", F.local_response_norm, C, 2),
    ("of a single image", F.instance_norm, randn(3, 6)),
]
COVERED = [*PICKED, *SHAPED, *REDUCED, *MULTIPLIED, *LAYERS]


def call_of(row: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    words = row[-1] if isinstance(row[-1], dict) else {}
    return row[1], row[2 : -1 if words else None], words


def ids(row: tuple[Any, ...]) -> str:
    return f"{row[1].__name__}: {row[0]}"


def is_refused(row: tuple[Any, ...]) -> bool:
    return any(row is other for other in REFUSED)


def error_of(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def errors_of_torch(func: Any, args: Any, words: Any) -> list[tuple[type, str]]:
    """The errors of a call of plain tensors, and of tensors without data, whose kernels may raise
    another one. Empty if torch accepts plain tensors."""
    plain = error_of(lambda: func(*args, **words))
    if plain is None:
        return []
    args, words = replace_tensors((args, words), lambda t: t.to("meta"))
    errors = [plain, error_of(lambda: func(*args, **words))]
    return [(type(error), str(error)) for error in errors if error is not None]


@pytest.mark.parametrize("row", [*COVERED, *REFUSED], ids=ids)
def test_the_rule_says_that_it_does_not_cover(row: tuple[Any, ...]) -> None:
    """If torch refuses the call, its error may come instead."""
    func, args, words = call_of(row)
    layouts = [[Replicate()]] * len(tensors_in((args, words)))
    error: BaseException | None = error_of(lambda: plan(func, args, words, layouts, (2,)))
    if is_refused(row) and not isinstance(error, NoRule):
        assert (type(error), str(error)) in errors_of_torch(func, args, words)
        while error is not None and not isinstance(error, NoRule):
            error = error.__context__
    assert isinstance(error, NoRule)
    assert row[0] in str(error)


@pytest.mark.feature("No rule")
@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_what_no_rule_covers_is_what_one_process_gives():
    for row in COVERED:
        func, args, words = call_of(row)
        if func is not torch.randint_like:  # which draws
            layouts = [[Shard(0) if t.ndim else Replicate()] for t in tensors_in((args, words))]
            grad = row[0] not in NO_GRADIENT
            check_op(func, *args, layouts=layouts, may_fall_back=True, grad=grad, **words)


@on_ranks(2)
def test_what_torch_refuses_is_torchs_error():
    for row in REFUSED:
        func, args, words = call_of(row)
        errors = errors_of_torch(func, args, words)
        args, words = replace_tensors((args, words), lambda t: place(t, line(), [Replicate()]))
        with fallbacks(), pytest.raises(Exception) as raised:
            func(*args, **words)
        assert any(raised.type is kind and text in str(raised.value) for kind, text in errors)


def test_torch_is_not_asked_for_the_signature_of_most_calls() -> None:
    """That takes long. A 0-d tensor may stand for a number, so there it is asked."""

    def func(*args: Any) -> None: ...

    known = signatures.signatures.cache_info().currsize
    assert signatures.read_numbers(func, (torch.ones(2), 2.5, None, "sum"), {}) is None
    assert signatures.signatures.cache_info().currsize == known
    numbers, _ = signatures.read_numbers(func, (torch.ones(2), torch.tensor(1)), {}) or ((), {})
    assert type(numbers[1]) is int
    assert signatures.signatures.cache_info().currsize == known + 1
