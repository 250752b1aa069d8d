"""Every optimizer of torch, as a loop, on lists and fused, trains as in one process: what it writes
to the shards reaches the gathered copies, whether these are kept or not."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import disttensor as dt
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.training import S0, full, line

WAYS: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "reshard_after_forward": False},
    {"stage": 1, "param_dtype": torch.float32},
]


def optimizers() -> Iterator[tuple[type[torch.optim.Optimizer], dict[str, Any]]]:
    """(class, options); LBFGS and SparseAdam take other programs."""
    for kind in vars(torch.optim).values():
        if not isinstance(kind, type) or kind.__name__ in ("Optimizer", "LBFGS", "SparseAdam"):
            continue
        known = inspect.signature(kind).parameters
        more = {"momentum": 0.9} if "momentum" in known and kind is not torch.optim.Muon else {}
        yield kind, {**more, **({"foreach": False} if "foreach" in known else {})}
        for how in ("foreach", "fused"):
            if how in known:
                yield kind, {**more, how: True}


def losses(model: nn.Module, kind: Any, options: dict[str, Any], batches: list[Any]) -> Any:
    params = [p for p in model.parameters() if p.ndim == 2 or kind is not torch.optim.Muon]
    optimizer = kind(params, lr=0.05, **options)
    found = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).square().sum()
        loss.backward()
        optimizer.step()
        found.append(full(loss).double())
    return torch.stack(found)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 5).double()


@on_ranks(2)
def test_optimizers_train_as_in_one_process():
    batches = [randn(3, 3, seed=i) for i in range(2)]
    placed = [dt.shard_tensor(b, line(), [S0]) for b in batches]
    for kind, options in optimizers():
        want = losses(net(), kind, options, batches)
        for way in WAYS:
            model = dt.shard_data_parallel(net(), line(), **way)
            got = losses(model, kind, options, placed)
            close = 1e-4 if "param_dtype" in way else 1e-9
            close = 0.05 if kind is torch.optim.Muon else close  # it computes in bfloat16
            what = f"{kind.__name__} {options} under {way}"
            assert torch.allclose(got, want, rtol=close, atol=close), (what, got, want)
            assert (got[1:] != got[0]).all(), what
