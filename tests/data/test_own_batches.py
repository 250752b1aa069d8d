"""A batch of each rank's own where one global value is expected: an error that names the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor import Replicate, Shard
from disttensor.errors import MismatchError
from disttensor.runtime import current_runtime
from tests.support.pool import on_ranks

R, S0 = Replicate(), Shard(0)


def line() -> Any:
    return dt.init_mesh((2,), ("fsdp",))


def rank() -> int:
    return torch.distributed.get_rank()


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, *, batch: Any) -> Any:
        return self.net(batch["x"])


OWN: dict[str, Callable[[], Any]] = {
    "values": lambda: torch.randn(6, 4, generator=torch.Generator().manual_seed(rank())),
    "sizes": lambda: torch.ones(6 + rank(), 4),
    "tokens": lambda: torch.tensor([50_000, 3, 7 + rank()]),
    "dtypes": lambda: torch.ones(6, 4, dtype=(torch.float32, torch.float64)[rank()]),
    "complex": lambda: torch.full((2, 4), complex(1, rank())),
}


@pytest.mark.parametrize("kind", OWN)
@on_ranks(2)
def test_shard_tensor_of_an_own_batch_is_an_error_that_says_what_to_do(kind: str) -> None:
    with pytest.raises(MismatchError, match=r"(?s)test_own_batches\.py.*dt\.shard_loader"):
        dt.shard_tensor(OWN[kind](), line(), [S0])
    current_runtime().entries.clear()  # the count of another case
    for check in (False, None):
        for number in range(5):  # the third call of a line is not compared
            x = OWN["values"]() if check is False or number == 2 else torch.ones(6, 4)
            dt.shard_tensor(x, line(), [S0], check=check)


@pytest.mark.parametrize("kind", ["values", "sizes"])
@pytest.mark.parametrize("way", ["replicate", "stage 3", "fully_shard"])
@on_ranks(2)
def test_a_loop_of_ddp_does_not_train_replicas_apart(way: str, kind: str) -> None:
    for keyword in (False, True):
        net: Any = ByKeyword() if keyword else model()
        if way == "replicate":
            dt.replicate(net, mesh=line())
        elif way == "stage 3":
            dt.shard_data_parallel(net, line(), stage=3)
        else:
            dt.fully_shard(net, mesh=line())
        x = OWN[kind]()
        with pytest.raises(MismatchError, match=r"(?s)the call of .*dt\.shard_loader"):
            net(batch={"x": x}) if keyword else net(x)
        ones = torch.ones(6, 4)
        for _ in range(5):
            (net(batch={"x": ones}) if keyword else net(ones)).sum().backward()


@on_ranks(2)
def test_a_model_of_another_seed_takes_the_values_of_the_first_rank() -> None:
    for seed in (rank(), 0):
        net = dt.shard_module(model(seed), line(), {"0.*": [S0]})
        for p, q in zip(net.parameters(), model(0).parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q)
            assert p.is_leaf and p.requires_grad
    with pytest.raises(MismatchError, match="tensors differs between"):
        dt.shard_module(nn.Linear(4, 2 + rank()), line())


@on_ranks(2)
def test_roundings_and_nan_are_no_difference() -> None:
    x = torch.linspace(-3, 3, 300) * (1 + 1e-6 * rank())
    x[7], x[0] = float("nan"), float("inf")
    for value in (x, x.half(), x[:0], x.to(torch.complex64)):
        dt.shard_tensor(value, line(), [R])
        with torch.device("meta"):  # of what the program makes
            dt.shard_tensor(value, line(), [R])
