"""Reducing local functions on shifted and scaled inputs: the error against float64 is at most twice
the error of torch on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from disttensor.core.placement import Placement, Replicate, Shard
from tests.support.simulate import simulate
from tests.support.structure import flat, replace_tensors

R, S0, S1 = Replicate(), Shard(0), Shard(1)
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x, "+ 1e3": lambda x: x + 1e3, "+ 1e5": lambda x: x + 1e5,
    "- 1e5": lambda x: x - 1e5, "+ 1e7": lambda x: x + 1e7, "* 1e-30": lambda x: x * 1e-30,
    "* 1e30": lambda x: x * 1e30,
}  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TARGET, SOFT = torch.tensor([0, 5, 2, 3, 1]), torch.rand(5, 6, generator=torch.Generator())
ROW = torch.tensor([1.0, 0.5, 2.0, 0.25, 1.0, 3.0])
WORDS: list[dict[str, Any]] = [
    {}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"weight": ROW},
    {"weight": ROW, "label_smoothing": 0.2, "reduction": "none"},
]  # fmt: skip
ORDERS = 0, 1, 2, 3, 0.5, float("inf"), -float("inf")
Call = tuple[Any, ...]

CALLS: list[Call] = [
    *((f, dim) for f in (torch.sum, torch.mean, torch.nanmean, torch.prod) for dim in (0, 1)),
    *((f, d) for f in (torch.var, torch.std, torch.var_mean, torch.std_mean) for d in (0, 1, None)),
    (torch.var, {"dim": 1, "correction": 0}), (torch.std, {"dim": (0, 1), "correction": 2}),
    *((f, d) for f in (torch.softmax, torch.log_softmax, F.softmin) for d in (0, 1)),
    (torch.logsumexp, 0), (torch.logsumexp, 1),
    *((torch.linalg.vector_norm, p, d) for p in ORDERS for d in (0, 1, None)),
    *((torch.norm, p, 1) for p in ORDERS), (torch.linalg.matrix_norm,), (torch.linalg.norm,),
    (F.normalize,), (F.normalize, 1.0, 0), (torch.amax, 1), (torch.amin, 0),
    *((F.cross_entropy, TARGET, words) for words in WORDS),
    *((F.cross_entropy, SOFT.softmax(1), words) for words in WORDS),
    *((F.nll_loss, TARGET, words) for words in WORDS if "label_smoothing" not in words),
    (F.mse_loss, SOFT), (F.l1_loss, SOFT), (F.kl_div, SOFT), (F.cosine_similarity, SOFT, 1),
    (F.batch_norm, None, None, {"training": True}), (F.huber_loss, SOFT),
    (torch.cumsum, 1), (torch.nansum, 0),
]  # fmt: skip


def name_of(call: Call) -> str:
    return f"{call[0].__name__} {[v for v in call[1:] if not isinstance(v, Tensor)]}"


def cast(values: Any, dtype: torch.dtype) -> Any:
    return replace_tensors(values, lambda t: t.to(dtype) if t.is_floating_point() else t)


def results(func: Any, x: Tensor, args: Any, words: Any) -> list[Tensor]:
    """Values and the gradient of plain torch."""
    x = x.clone().requires_grad_()
    outs = flat(func(x, *args, **words))
    live = [o for o in outs if o.requires_grad]
    return [
        *(o.detach() for o in outs),
        *torch.autograd.grad(live, x, [cotangent(o) for o in live]),
    ]


def cotangent(o: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, o.numel(), dtype=torch.float64).reshape(o.shape).to(o.dtype)


def error(mine: Tensor, exact: Tensor) -> Tensor:
    """The largest distance; a value that is not finite is as far as it can be from others."""
    apart = (mine.double() - exact).abs()
    same = (mine.double() == exact) | (mine.isnan() & exact.isnan())
    return apart.masked_fill(same, 0).nan_to_num(torch.inf, torch.inf)


def wrong(call: Call, dtype: torch.dtype, change: str, layout: list[Placement]) -> list[str]:
    """What is further from float64 than twice torch's error, and a unit in the last place."""
    func, *args = call
    words = args.pop() if args and isinstance(args[-1], dict) else {}
    z = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = CHANGES[change](z).to(dtype)
    if not x.isfinite().all():
        return []  # fp16 has no such numbers
    low_args, low_words = cast((args, words), dtype)
    try:
        exact = results(func, x.double(), *cast((low_args, low_words), torch.float64))
        plain = results(func, x, low_args, low_words)
    except RuntimeError:
        return []  # torch has no kernel of this dtype
    tensors: list[Tensor] = []
    replace_tensors((low_args, low_words), lambda t: tensors.append(t) or t)
    got = simulate(
        func, x, *low_args, layouts=[layout, *[[R]] * len(tensors)], mesh_shape=(2,), grad=True,
        cotangents=[cotangent(o) for o in plain[:-1]], frozen=range(1, 9), **low_words,
    )  # fmt: skip
    assert got is not None
    found = []
    for what, mine, torchs, best in zip(
        (*range(len(got.full)), "gradient"),
        (*got.full, got.gradients[0]),
        plain,
        exact,
        strict=True,
    ):
        # the terms of a gradient cancel: where torch is exact by chance, twice 0 is not the measure
        times = 4 if what == "gradient" else 2
        allowed = times * error(torchs, best).max() + times * torch.finfo(
            dtype
        ).eps * best.abs().clamp(max=torch.finfo(dtype).max)
        if dtype != torch.float32 or what == "gradient":
            allowed = allowed.max().expand_as(allowed)
        over = error(mine, best) > allowed + torch.finfo(dtype).smallest_normal
        if bool(over.any()):
            found.append(
                f"{name_of(call)} {dtype} {change} {layout} {what}: {mine[over][:3].tolist()} "
                f"for {best[over][:3].tolist()}, torch {torchs[over][:3].tolist()}"
            )
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_error_is_at_most_twice_torchs(change: str, dtype: torch.dtype) -> None:
    found = [
        text
        for call in CALLS
        for layout in ([S0], [S1])
        for text in wrong(call, dtype, change, layout)
    ]
    assert not found, "\n" + "\n".join(found)
