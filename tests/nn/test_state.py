"""Modules that keep state of what they have seen (statistics, observed ranges, normalized tables),
over batches of no, one and several rows: results, gradients and state are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.nn.utils import parametrizations

import disttensor as dt
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.training import S0, full

Tensor = torch.Tensor


class CodeBook(nn.Module):
    """Vectors that follow the rows nearest to them, as VQ-VAE has them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("book", randn(4, 3))
        self.register_buffer("count", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.book).argmin(1)
        if self.training:
            with torch.no_grad():
                self.count.mul_(0.9).index_add_(0, nearest, torch.ones_like(x[:, 0]))
                self.book.index_add_(0, nearest, x.detach(), alpha=0.1)
                self.seen += x.shape[0]
        return x + (self.book[nearest] - x).detach()


def quantized(kind: Any, observer: Any = None, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(observer, **options) if observer is not None else kind(**options)


norm, q = nn.BatchNorm1d, quantization
# name -> (the module, shape of a batch of n rows, of what kind its numbers are)
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[int, ...]], str]] = {
    "batch norm": (lambda: norm(3), lambda n: (n, 3), "float64"),
    "its mean of all": (lambda: norm(3, momentum=None), lambda n: (n, 3, 1), "float64"),
    "of images": (lambda: nn.BatchNorm2d(3), lambda n: (2, 3, n, 2), "float64"),
    "without state": (lambda: norm(3, track_running_stats=False), lambda n: (n, 3), "float64"),
    "instance norm": (
        lambda: nn.InstanceNorm1d(3, track_running_stats=True), lambda n: (n, 3, 2), "float64"
    ),
    "of one number": (
        lambda: nn.InstanceNorm1d(3, track_running_stats=True), lambda n: (n, 3, 1), "float64"
    ),
    "embedding": (lambda: nn.Embedding(7, 3, max_norm=0.5), lambda n: (n, 2), "ids"),
    "bags": (lambda: nn.EmbeddingBag(7, 3, max_norm=0.5), lambda n: (n, 2), "ids"),
    "weight norm": (
        lambda: parametrizations.weight_norm(nn.Linear(3, 2)), lambda n: (n, 3), "float64"
    ),
    "spectral norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(3, 1)), lambda n: (n, 3), "float64"
    ),
    "ranges": (quantized(q.MovingAverageMinMaxObserver), lambda n: (n, 3), "float32"),
    "histogram": (quantized(q.HistogramObserver), lambda n: (n, 3), "float32"),
    "channels": (quantized(q.PerChannelMinMaxObserver), lambda n: (n or 1, 3), "float32"),
    "fake quantize": (
        quantized(q.FakeQuantize, q.MinMaxObserver), lambda n: (n, 3), "float32"
    ),
    "fused": (quantized(q.FusedMovingAvgObsFakeQuantize), lambda n: (n or 1, 3), "float32"),
    "code book": (CodeBook, lambda n: (n, 3), "float64"),
}  # fmt: skip


def batch(shape: tuple[int, ...], kind: str, seed: int) -> Tensor:
    if kind == "ids":
        return torch.arange(seed, seed + torch.Size(shape).numel()).view(shape) % 7
    return randn(*shape, seed=seed).to(getattr(torch, kind))


def seen(module: nn.Module, batches: list[Any]) -> Any:
    """Results and gradients, then the state; the text of an error."""
    out: list[Any] = []
    try:
        for x in batches:
            x = x.detach().requires_grad_() if x.is_floating_point() else x
            y = module(x)
            out.append(full(y))
            if y.requires_grad:
                y.square().sum().backward()
                out.append(full(x.grad))
    except (ValueError, RuntimeError) as error:
        return str(error)
    out += [full(p.grad) for p in module.parameters()]
    return [*out, {k: full(v) for k, v in module.state_dict().items()}]


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_state_is_that_of_one_process():
    mesh = dt.ProcessMesh([0, 1], ("tp",))
    for name, (make, shape, kind) in MODULES.items():
        torch.manual_seed(0)
        module = make() if kind == "float32" else make().double()
        for n in (0, 1, 3):
            for how in ("train", "train, split state", "eval"):
                plain = copy.deepcopy(module).train("train" in how)
                ours = copy.deepcopy(plain)
                tensors = (*ours.named_parameters(), *ours.named_buffers())
                plan = {k: [S0] for k, v in tensors if v.ndim and "split" in how}
                dt.shard_module(ours, mesh, plan)
                batches = [batch(shape(n), kind, seed) for seed in (1, 2)]
                want = seen(plain, batches)
                got = seen(ours, [dt.shard_tensor(x, mesh, [S0]) for x in batches])
                where = f"{name}, {n} rows, {how}"
                if isinstance(want, str) or isinstance(got, str):
                    assert want == got, where
                    continue
                torch.testing.assert_close(
                    got, want, equal_nan=True, msg=lambda m, where=where: f"{where}: {m}"
                )
