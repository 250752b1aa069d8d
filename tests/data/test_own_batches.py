"""A batch of each rank's own where one global value is expected: an error that names the ranks."""

from __future__ import annotations

from collections import UserDict
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
    "offset": lambda: torch.full((3, 4), 300.0 + 2 * rank()),
    "one large": lambda: torch.tensor([[1e4, 0, 0, 0], [50.0 * (1 + rank())] * 4]),
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
    one = nn.Linear(3, 2)
    with torch.no_grad():
        one.weight.fill_(1000).view(-1)[4] += rank()
    one.register_buffer("order", torch.arange(5).roll(rank()))
    one.bias.data = torch.arange(3.0)[1:] + rank()  # in the middle of its memory
    dt.shard_module(one, line())
    assert one.weight.to_local().unique().tolist() == [1000]
    assert one.order.tolist() == [0, 1, 2, 3, 4]
    assert one.bias.tolist() == [1.0, 2.0]
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


class Uses(nn.Module):
    """A model that uses its batch by ``f(linear, batch)``."""

    def __init__(self, f: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.linear, self.f = nn.Linear(4, 3), f

    def forward(self, batch: Any) -> Any:
        return self.f(self.linear, batch)


class Held:
    def __init__(self, x: Any) -> None:
        self.x = x


USES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "made of it": (lambda x: x, lambda linear, x: linear(x * 1.0 + 1)),
    "written with it": (lambda x: x, lambda linear, x: linear(torch.zeros(3, 4).copy_(x))),
    "known call": (lambda x: x, lambda linear, x: linear(torch.ones(3, 4)) + linear(x)),
    "object": (Held, lambda linear, batch: linear(batch.x)),
    "UserDict": (lambda x: UserDict(x=x), lambda linear, batch: linear(batch["x"])),
}


@on_ranks(2)
def test_ways_to_use_a_batch_of_its_own() -> None:
    for name, (held, f) in USES.items():
        torch.manual_seed(0)
        net = dt.shard_data_parallel(Uses(f), line())
        with pytest.raises(MismatchError, match=r"(?s)the call of Uses.*dt\.shard_loader"):
            net(held(torch.full((3, 4), 1.0 + rank())))
        assert not torch.overrides._get_current_function_mode_stack(), name
        net(held(torch.ones(3, 4))).sum().backward()


@on_ranks(2)
def test_sparse_arguments_are_not_compared() -> None:
    net = dt.shard_data_parallel(Uses(lambda linear, x: linear(x.to_dense())), line())
    assert net(torch.eye(4).to_sparse()).shape == (4, 3)


@on_ranks(2)
def test_a_batch_of_its_own_that_no_parameter_meets() -> None:
    net = Uses(lambda linear, x: linear(dt.from_local(x, line(), [S0])))
    net = dt.shard_data_parallel(net, line())
    assert net(torch.full((3, 4), 1.0 + rank())).shape == (6, 3)
