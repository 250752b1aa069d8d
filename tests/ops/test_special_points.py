"""Values and gradients at ties, NaN, infinities and zeros: the same in every layout as on one
process, for reductions, scans, sorting, norms and losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import disttensor as dt
from disttensor.core.placement import Placement, Replicate, Shard
from ops.factors import NoRule
from tests.support.pool import on_ranks
from tests.support.simulate import check_rule
from tests.support.structure import replace_tensors

R, S0, S1 = Replicate(), Shard(0), Shard(1)
NAN, INF = math.nan, math.inf
BASE = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def with_(value: float, *places: tuple[int, int]) -> Tensor:
    x = BASE.clone()
    for place in places:
        x[place] = value
    return x


MIXED = with_(INF, (0, 1), (4, 2))
MIXED[0, 4], MIXED[2, 2], MIXED[3, 3] = -INF, NAN, 0.0
POINTS = {
    "ties": torch.randint(0, 3, (5, 6), generator=torch.Generator().manual_seed(3)).double(),
    "equal": torch.full((5, 6), 0.5, dtype=torch.float64),
    "nan": with_(NAN, (1, 2), (1, 4), (4, 0)), "inf": with_(INF, (0, 1), (2, 3), (2, 4)),
    "-inf": with_(-INF, (0, 1), (2, 3), (2, 4), (4, 4)), "zeros": torch.zeros(5, 6).double(),
    "one zero": with_(0.0, (1, 2), (3, 4)), "two zeros": with_(0.0, (1, 2), (1, 5), (3, 4), (4, 4)),
    "all inf": torch.full((5, 6), INF, dtype=torch.float64),
    "all -inf": torch.full((5, 6), -INF, dtype=torch.float64), "mixed": MIXED,
}  # fmt: skip
TARGET = torch.tensor([0, 5, 2, 3, 1])
SOFT = torch.rand(5, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
ORDERS = 0, 0.5, 1, 2, 3, INF, -INF
Call = tuple[Any, ...]
DIMS = ({"dim": 0}, {"dim": 1}, {"dim": (0, 1)})

CALLS: list[Call] = [
    *((f, d) for f in (torch.amax, torch.amin, torch.sum, torch.mean) for d in DIMS),
    *((f, d) for f in (torch.nansum, torch.nanmean, torch.logsumexp) for d in DIMS),
    *((f, d) for f in (torch.max, torch.min, torch.argmax, torch.argmin) for d in DIMS[:2]),
    *((f,) for f in (torch.max, torch.min, torch.argmax, torch.amax, torch.prod, torch.sum)),
    *((torch.aminmax, d) for d in ({}, *DIMS[:2])), (torch.prod, 0), (torch.prod, 1),
    *((f, d) for f in (torch.var, torch.std, torch.var_mean) for d in (*DIMS, {})),
    *((f, {**d, "correction": c}) for f in (torch.var, torch.std) for c in (5, 6, 9) for d in DIMS),
    (torch.var, {"correction": 30}), (torch.std, {"correction": 31}),
    *((torch.linalg.vector_norm, p, d) for p in ORDERS for d in (0, 1, None)),
    *((torch.norm, p, 1) for p in ORDERS), (torch.linalg.matrix_norm,), (torch.linalg.norm,),
    *((F.normalize, p, d) for p in (1.0, 2.0, INF) for d in (0, 1)),
    *((f, d) for f in (torch.softmax, torch.log_softmax, F.softmin) for d in (0, 1)),
    *((f, d) for f in (torch.cumsum, torch.cumprod, torch.cummax, torch.cummin) for d in (0, 1)),
    *((f, d) for f in (torch.logcumsumexp, torch.median, torch.nanmedian) for d in (0, 1)),
    (torch.sort, 1), (torch.sort, 0), (torch.msort,), (torch.topk, 3),
    (torch.kthvalue, 2), (torch.quantile, 0.3, 1), (torch.median,), (torch.count_nonzero,),
    *((F.cross_entropy, TARGET, words) for words in ({}, {"label_smoothing": 0.1})),
    (F.cross_entropy, SOFT.softmax(1)), (F.nll_loss, TARGET), (F.mse_loss, SOFT), (F.l1_loss, SOFT),
    (F.huber_loss, SOFT), (F.smooth_l1_loss, SOFT), (F.kl_div, SOFT), (F.soft_margin_loss, SOFT),
    (F.binary_cross_entropy_with_logits, SOFT), (F.cosine_similarity, SOFT, 1),
    (F.multi_margin_loss, TARGET), (F.poisson_nll_loss, SOFT), (F.hinge_embedding_loss, SOFT),
]  # fmt: skip
LISTS: list[Call] = [
    (torch._foreach_max,), *((torch._foreach_norm, p) for p in (0, 1, 2, 3, INF)),
]  # fmt: skip


def check(call: Call, name: str, layout: list[Placement]) -> str:
    """What is wrong about a call in one layout."""
    func, *args = call
    words = args.pop() if args and isinstance(args[-1], dict) else {}
    if func is torch.prod and name == "mixed":
        return ""  # a zero in one slice changes torch's formula for all slices
    first: Any = (
        POINTS[name]
        if call[0] not in (torch._foreach_max, torch._foreach_norm)
        else [POINTS[name], BASE]
    )
    tensors: list[Tensor] = []
    replace_tensors((first, args), lambda t: tensors.append(t) or t)
    layouts = [layout, *[[R]] * (len(tensors) - 1)]
    try:
        func(*replace_tensors((first, *args), torch.clone), **words)
    except RuntimeError:
        return ""  # torch refuses the values
    try:
        check_rule(
            func, first, *args, layouts=layouts, mesh_shape=(2,), frozen=range(1, len(tensors)),
            **words,
        )  # fmt: skip
    except NoRule:
        pass
    except AssertionError as error:
        return f"{name} {words}: {error}"
    return ""


@pytest.mark.parametrize("name", POINTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_special_points(name: str) -> None:
    found = [check(call, name, layout) for call in [*CALLS, *LISTS] for layout in ([S0], [S1])]
    assert not any(found), "\n".join(filter(None, found))


Run = Callable[[Any], Any]
VALUES = torch.arange(12.0).view(3, 4) - 3


def gradient(func: Run, grad: float = 1.0) -> Run:
    """Returns the function from a tensor to its gradient, for a gradient of the result."""

    def run(x: Any) -> Any:
        x = x.detach().requires_grad_()
        y = func(x)
        y.backward(torch.full_like(y, grad))
        return x.grad

    return run


OF_VALUES: dict[str, Run] = {
    **{f"{f.__name__} of no dim": lambda x, f=f: f(x, ()) for f in (torch.any, torch.all)},
    **{f"{f.__name__} kept": lambda x, f=f: f(x > 0, [], True) for f in (torch.any, torch.all)},
    "any of bytes": lambda x: x.to(torch.uint8).any(()),
    "sum to bool": lambda x: x.sum(0, dtype=torch.bool),
    "sum of all to bool": lambda x: x.sum(dtype=torch.bool),
    "nansum to bool": lambda x: x.nansum(1, dtype=torch.bool),
    "logsumexp of no dim": lambda x: x.logsumexp(()),
    **{
        f"{f.__name__} times {g}": gradient(f, g)
        for f in (torch.max, torch.min) for g in (INF, NAN)
    },
    "norm 0": gradient(lambda x: torch.linalg.vector_norm(x, 0)),
    "norm 0 of rows": gradient(lambda x: torch.norm(x, 0, 1)),
    "outside": lambda x: x.gather(0, torch.full((1, 4), 5)),
    "before": lambda x: x.gather(1, torch.full((3, 1), -1)),
}  # fmt: skip


def shown(run: Run, x: Any) -> Any:
    try:
        y = run(x)
    except Exception as error:
        return type(error)
    y = y.full_tensor() if isinstance(y, dt.DistTensor) else y
    return y if y is None else (y.dtype, str(y.tolist()))


@on_ranks(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_special_arguments_and_gradients() -> None:
    mesh, wrong = dt.init_mesh((2,)), []
    for name, run in OF_VALUES.items():
        want = shown(run, VALUES)
        for at in (R, S0, S1):
            got = shown(run, dt.shard_tensor(VALUES, mesh, [at]))
            if got != want:
                wrong.append((name, at, want, got))
    assert not wrong, "\n".join(map(str, wrong))
