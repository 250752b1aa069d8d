"""Complex parameters train as in one process, in each way to place them; their sums between ranks
are those of their real and imaginary parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor import Replicate, Shard, pipeline
from disttensor.comm import collectives
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.training import compare, full

R, S0, S1 = Replicate(), Shard(0), Shard(1)
Way = Callable[[nn.Module], Any]
COMPLEX = torch.complex128


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, dtype=COMPLEX))
        self.bias = nn.Parameter(torch.randn(5, dtype=COMPLEX))
        self.scale = nn.Parameter(torch.randn((), dtype=COMPLEX))

    def forward(self, x: Any) -> Any:
        h = x.to(COMPLEX) @ self.weight + self.bias
        return h.abs() + h.angle() + torch.view_as_real(h * self.scale).prod(-1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Mix(), nn.Linear(5, 3), Mix()).double()


def line() -> Any:
    return dt.init_mesh((2,), ("fsdp",))


def sharded(**how: Any) -> Way:
    return lambda net: dt.shard_data_parallel(net, line(), **how)


def on_stages(net: Any) -> None:
    pipeline.split(net, [dt.ProcessMesh([0], ("a",)), dt.ProcessMesh([1], ("a",))])


def replicas_of_shards(net: nn.Module) -> None:
    dt.shard_data_parallel(net, dt.init_mesh((2, 1), ("dp", "fsdp")), "fsdp", "dp")


PLAN = {"0.weight": [S1], "0.bias": [S0], "2.weight": [S0]}
WAYS: dict[str, Way] = {
    "shard_module": lambda net: dt.shard_module(net, line()),
    "tp": lambda net: dt.shard_module(net, line(), PLAN),
    "replicate": lambda net: dt.replicate(net, mesh=line()),
    "split": on_stages,
    "hsdp": replicas_of_shards,
    **{f"stage {n}": sharded(stage=n) for n in (1, 2, 3)},
    "dtypes": sharded(stage=2, reduce_dtype=torch.float64, param_dtype=torch.float64),
}


def train(net: Any, batches: Any, clips: bool) -> list[Any]:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    out = []
    for batch in batches:
        optimizer.zero_grad()
        for x in batch:
            net(x).square().mean().backward()
        if clips:
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            out.append(full(norm) if not isinstance(norm, dt.DistTensor) else norm.full_tensor())
        out += [full(p.grad) for p in net.parameters()]
        optimizer.step()
    return [*out, *[full(p) for p in net.parameters()]]


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_complex_parameters_train_as_in_one_process(way: str) -> None:
    for clips in (False, True):
        plain, net = model(), model()
        WAYS[way](net)
        batches = [[randn(5, 3, seed=2 * i + j) for j in range(2)] for i in range(2)]
        mesh = net[0].weight.process_mesh
        split = [S0] * mesh.ndim if way not in ("tp", "split") else [R] * mesh.ndim
        placed = [[dt.shard_tensor(x, mesh, split) for x in batch] for batch in batches]
        want, got = train(plain, batches, clips), train(net, placed, clips)
        pairs = [
            (g, w) for g, w in zip(got, want, strict=True)
            if way != "split" or (g is not None and g.shape == w.shape)
        ]  # fmt: skip
        assert pairs
        compare([g for g, _ in pairs], [w for _, w in pairs])


@on_ranks(2)
def test_sums_of_complex_memory_are_those_of_its_parts() -> None:
    group = line().group((0,))
    for dtype in (torch.complex64, COMPLEX):
        x = torch.arange(6).to(dtype) * (1 + 2j)
        out = torch.empty(3, dtype=dtype)
        work = collectives.start_async(collectives.reduce_scatter, x, "sum", group, out=out)
        assert torch.equal(work.wait(), 2 * x.view(2, 3)[group.ranks.index(dt_rank())])
        assert torch.equal(collectives.reduce_scatter(x, "avg", group, out=out), out)
        assert torch.equal(out, x.view(2, 3)[dt_rank()])
        y = x.clone()
        total = collectives.all_reduce(y, "sum", group, inplace=True)
        assert total.data_ptr() == y.data_ptr() and torch.equal(y, 2 * x)


def dt_rank() -> int:
    return torch.distributed.get_rank()


OPS: dict[str, Callable[[Any], Any]] = {
    "prod": lambda h: h.prod(1).abs(),
    "prod of rows": lambda h: h.prod(0).angle(),
    "prod with zeros": lambda h: (h * (h.real > 0)).prod(1).abs(),
    "cumprod": lambda h: h.cumprod(1).abs(),
    "norm": lambda h: torch.linalg.vector_norm(h, 3, dim=0),
    "sgn": lambda h: h.sgn().real,
    "products": lambda h: (h.mH @ h).angle(),
    "mean": lambda h: h.mean(1).abs(),
    "views": lambda h: torch.view_as_complex(torch.view_as_real(h) * 2).conj().imag,
    "polar": lambda h: torch.polar(h.abs(), h.angle()).real,
    "var": lambda h: h.var(),
}


@pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
@on_ranks(2)
def test_gradients_of_complex_numbers_are_those_of_torch() -> None:
    mesh, value = line(), torch.view_as_complex(randn(5, 3, 2))
    for name, op in OPS.items():
        plain = value.clone().requires_grad_()
        op(plain).square().sum().backward()
        for placement in (R, S0, S1):
            x = dt.shard_tensor(value, mesh, [placement], requires_grad=True)
            op(x * 1).square().sum().backward()
            assert torch.allclose(full(x.grad), plain.grad, rtol=1e-9), (name, placement)
