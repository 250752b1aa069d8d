"""Balanced and placements that users derive from ours: values are those of the whole, or it is an
error, never those of the rows where a Shard would lie."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt
import reshard
from disttensor import ProcessMesh, Replicate, Shard
from disttensor.attention import Balanced
from disttensor.comm import collectives
from disttensor.random import counter
from reshard.registry import moves
from tests.support.pool import on_ranks

R, S0, B0, B1 = Replicate(), Shard(0), Balanced(0), Balanced(1)


@dataclass(frozen=True)
class Reversed(Shard):
    """Rank i holds the piece of rank n - 1 - i, of a dim that n divides."""


@dataclass(frozen=True)
class Negated(Replicate):
    """Every rank holds the negative."""


def _take(x: Any, src: Any, dst: Any, axes: Any) -> Any:
    dim, n = dst.placements[axes[0]].dim, src.mesh.shape[axes[0]]
    return x.chunk(n, dim)[n - 1 - src.mesh.coordinate[axes[0]]]


def _join(x: Any, src: Any, dst: Any, axes: Any) -> Any:
    pieces = collectives.all_gather(x, src.mesh.group(axes))
    return torch.cat(list(pieces)[::-1], src.placements[axes[0]].dim)


@contextmanager
def registered() -> Iterator[None]:
    before = dict(moves)
    reshard.register(Replicate, Reversed)(_take)
    reshard.register(Reversed, Replicate)(_join)
    reshard.register(Replicate, Negated)(lambda x, src, dst, axes: -x)
    reshard.register(Negated, Replicate)(lambda x, src, dst, axes: -x)
    try:
        yield
    finally:
        moves.clear()
        moves.update(before)


OWN: list[list[Any]] = [[B0], [B1], [Reversed(0)], [Reversed(1)], [Negated()]]
MADE: dict[str, Callable[..., Any]] = {
    "rand": lambda **how: dt.rand(6, 8, **how),
    "randn": lambda **how: dt.randn(6, 8, **how),
    "randn double": lambda **how: dt.randn(6, 8, dtype=torch.float64, **how),
    "randint": lambda mesh, placements: dt.api.create.from_fn(
        torch.randint, mesh, placements, (6, 8), 3, 90, dtype=torch.int64
    ),
    "ones": lambda **how: dt.ones(6, 8, **how),
    "full": lambda **how: dt.full((6, 8), 3.0, **how),
    "generator": lambda **how: dt.rand(6, 8, generator=torch.Generator().manual_seed(4), **how),
    "fast": lambda **how: dt.rand(6, 8, requires_grad=True, **how).detach(),
    "shard_tensor": lambda **how: dt.shard_tensor(torch.arange(48.0).reshape(6, 8), **how),
}


def grids() -> list[ProcessMesh]:
    return [ProcessMesh([0, 1], ("x",)), ProcessMesh([1], ("x",))]


def whole(x: Any) -> Any:
    return x.full_tensor(everywhere=True).clone()


@on_ranks(2)
def test_factories_give_the_values_of_the_whole() -> None:
    with registered():
        for mesh in grids():
            for name, make in MADE.items():
                torch.manual_seed(3)
                expected = whole(make(mesh=mesh, placements=[R]))
                count = counter.get_state()
                for placements in OWN:
                    torch.manual_seed(3)
                    x = make(mesh=mesh, placements=placements)
                    assert x.placements == tuple(placements), name
                    assert torch.equal(whole(x), expected), (name, placements)
                    assert counter.get_state() == count, name
            torch.manual_seed(3)
            expected = whole(dt.randperm(8, mesh=mesh, placements=[R]))
            for placements in ([B0], [Reversed(0)]):
                torch.manual_seed(3)
                x = dt.randperm(8, mesh=mesh, placements=placements)
                assert x.dtype == torch.int64 and torch.equal(whole(x), expected)


CALLS: dict[str, Callable[[Any], Any]] = {
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 50),
    "bernoulli": lambda x: torch.bernoulli(x.abs() / 100),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout1d": lambda x: F.dropout1d(x, 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "normal_": lambda x: x.clone().normal_(),
    "uniform_": lambda x: x.clone().uniform_(),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "multinomial": lambda x: torch.multinomial(x.abs() + 1, 2),
    "poisson": lambda x: torch.poisson(x.abs()),
    "normal": lambda x: torch.normal(x, 2.0),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x.clone()),
    "xavier_uniform_": lambda x: nn.init.xavier_uniform_(x.clone()),
    "sparse_": lambda x: nn.init.sparse_(x.clone(), 0.5),
    "argmax": lambda x: x.argmax(),
    "max": lambda x: x.max(0).indices,
    "tril": torch.tril,
    "cumsum": lambda x: x.cumsum(0),
    "roll": lambda x: x.roll(1, 0),
    "gather": lambda x: x.gather(0, (x.abs() % 5).long()),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(6) % 8),
    "nonzero": lambda x: (x > 3).nonzero(),
    "numpy": lambda x: x * torch.as_tensor(x.detach().numpy()[:1].copy()),
    "tolist": lambda x: x * len(x.tolist()),
}


@on_ranks(2)
def test_calls_give_the_values_of_the_whole() -> None:
    warnings.simplefilter("ignore", dt.errors.FallbackWarning)
    values = torch.arange(48.0).reshape(6, 8) - 20
    mesh = ProcessMesh([0, 1], ("x",))
    with registered(), dt.random.rng("invariant"):
        for name, call in CALLS.items():
            torch.manual_seed(5)
            expected = whole(call(dt.shard_tensor(values, mesh, [R])))
            draws = counter.get_state() != (5, 0)  # a fallback draws other numbers than a rule
            for placements in OWN[:2] if draws else OWN:
                torch.manual_seed(5)
                x = dt.shard_tensor(values, mesh, placements)
                assert torch.equal(whole(call(x)), expected), (name, placements)


@on_ranks(2)
def test_a_dtensor_is_refused() -> None:
    mesh = ProcessMesh([0, 1], ("x",))
    with registered():
        for placements in OWN:
            x = dt.shard_tensor(torch.ones(6, 8), mesh, placements)
            with pytest.raises(ValueError, match="DTensor knows Shard, Replicate and Partial only"):
                dt.to_dtensor(x)
