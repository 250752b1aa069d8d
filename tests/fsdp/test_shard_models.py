"""shard_data_parallel around modules of all kinds: checkpointed, in low precision, with results
that are not one new tensor."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from tests.support.oracle import randn
from tests.support.part import part
from tests.support.pool import on_ranks
from tests.support.training import (
    S0,
    STAGES,
    check,
    compare,
    line,
    squares,
    stages,
    train,
    ways,
)

# Results ------------------------------------------------------------------------------------------


class Dicts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x, more=None):
        x = x["h"] if isinstance(x, dict) else x
        h = self.inner(x)
        return {"h": torch.tanh(h), "parts": (h, [x, more]), "n": 3}


class Root(nn.Module):
    def __init__(self, *blocks, join):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.join = join

    def forward(self, x):
        return self.join(self.blocks, x)


def with_dicts(blocks, x):
    for block in blocks:
        out = block(x, more=x["parts"][0] if isinstance(x, dict) else None)
        x = out
    return out["h"] + out["parts"][0] + out["parts"][1][0]


def chained(blocks, x):
    for block in blocks:
        x = block(x)
    return x


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 12)

    def forward(self, x):
        left, right = self.inner(x).chunk(2, dim=-1)
        return left, right.transpose(0, 1)


def with_views(blocks, x):
    for block in blocks:
        left, right = block(x)
        x = torch.tanh(left) + right.t()
    return x


def one_view_used(blocks, x):
    for block in blocks:
        x = torch.tanh(block(x)[0])
    return x


class Same(nn.Module):
    """Gives its argument back; its parameter is used besides."""

    def __init__(self, kept=lambda aux: aux):
        super().__init__()
        self.w, self.kept = nn.Parameter(torch.ones(6)), kept

    def forward(self, x):
        self.aux = self.kept((x * self.w).square().sum())
        return x


def with_aux(blocks, x):
    total = 0
    for block in blocks:
        x = block(x)
        aux = getattr(block, "aux", 0)
        aux = aux["h"] if isinstance(aux, dict) else aux
        total = total + (aux.h if isinstance(aux, Fields) else aux)
    return x.square().sum() + total


def written_to(blocks, x):
    for block in blocks:
        x = block(x)
        x = x.relu_() if block is not blocks[-1] else x
    return x


def added_in_place(blocks, x):
    for block in blocks:
        y = block(x)
        y += 1.5
        y.mul_(2)
        x = torch.tanh(y)
    return x


def viewed_then_written(blocks, x):
    for block in blocks:
        y = block(x)
        y.view(-1, 2, 3)[:, 0].mul_(2) if False else y[:, :3].mul_(2)
        x = torch.tanh(y)
    return x


def unused_results(blocks, x):
    kept = blocks[0](x)
    blocks[1](kept)
    return blocks[2](kept)


def detached(blocks, x):
    return blocks[2](blocks[1](blocks[0](x).detach()))


class Pair(NamedTuple):
    h: Any
    parts: Any


@dataclass
class Fields:
    h: Any
    parts: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    h: Any
    parts: Any


class Keys(OrderedDict):
    """As the outputs of transformers: a dict whose items are attributes, too."""

    def __init__(self, h, parts):
        super().__init__(h=h, parts=parts)

    def __getattr__(self, name):
        return self[name]

    def __reduce__(self):
        return Keys, (self["h"], self["parts"])


class Distribution:
    """A class like any other, whose objects lead to themselves."""

    def __init__(self, h, parts):
        self.h, self.parts, self.me = h, parts, self


PASSED = {"pair": Pair, "dataclass": Fields, "frozen": Frozen, "keys": Keys}
GIVEN = {**PASSED, "object": Distribution, "in a list": lambda h, parts: [{"x": Fields(h, parts)}]}


class Gives(nn.Module):
    """``kind``: of what it gives. Two ways lead from its argument to its results."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(6, 6), nn.Linear(6, 6), kind

    def forward(self, x, other=None):
        h = torch.tanh(self.first(x.h if hasattr(x, "h") else x))
        other = self.second(x.parts[0] if hasattr(x, "parts") else h)
        return self.kind(h, (torch.tanh(other), "no tensor"))


def one_used(blocks, x):
    for block in blocks:
        x = block(x)
        while isinstance(x, (list, dict)) and not hasattr(x, "h"):
            x = x[0] if isinstance(x, list) else x["x"]
        x = x.parts[0]
    return x


def passed_on(blocks, x):
    for block in blocks:
        x = block(x)
    return x.h + x.parts[0]


def linears():
    return [nn.Linear(6, 6) for _ in range(3)]


MODELS = {
    "dicts": lambda: Root(Dicts(), Dicts(), Dicts(), join=with_dicts),
    "views": lambda: Root(Views(), Views(), join=with_views),
    "one of two views": lambda: Root(Views(), Views(), join=one_view_used),
    "identity": lambda: Root(
        nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 6), nn.Identity(), join=chained
    ),
    "identity in a segment": lambda: Root(
        nn.Sequential(nn.Identity(), nn.Linear(6, 6)),
        nn.Sequential(nn.Linear(6, 6), nn.Identity()),
        join=chained,
    ),
    "the argument": lambda: Root(nn.Linear(6, 6), Same(), nn.Linear(6, 6), Same(), join=with_aux),
    "a loss in a dict": lambda: Root(
        nn.Linear(6, 6), Same(lambda aux: {"h": aux}), nn.Linear(6, 6), join=with_aux
    ),
    "a loss in a dataclass": lambda: Root(
        nn.Linear(6, 6), Same(lambda aux: Fields(aux, 1)), nn.Linear(6, 6), join=with_aux
    ),
    "inplace relu": lambda: Root(
        nn.Linear(6, 6),
        nn.ReLU(inplace=True),
        nn.Linear(6, 6),
        nn.ReLU(inplace=True),
        nn.Linear(6, 6),
        join=chained,
    ),
    "written to": lambda: Root(*linears(), join=written_to),
    "added in place": lambda: Root(*linears(), join=added_in_place),
    "a part written": lambda: Root(*linears(), join=viewed_then_written),
    "unused": lambda: Root(*linears(), join=unused_results),
    "detached": lambda: Root(*linears(), join=detached),
    "norms": lambda: Root(
        nn.Linear(6, 6),
        nn.LayerNorm(6),
        nn.Linear(6, 7),
        nn.GroupNorm(1, 7),
        nn.Linear(7, 1),
        join=chained,
    ),
}


@stages
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("segments", [["blocks.*"], dt.fsdp.SegmentBySize()], ids=["each", "one"])
@on_ranks(2)
def test_results(kind, segments, stage):
    def make():
        return MODELS[kind]().double()

    if segments == ["blocks.*"]:
        names = [f"blocks.{i}" for i, b in enumerate(make().blocks) if list(b.parameters())]
    else:
        names = segments
    check(make, mesh=line(), segments=names, **ways(stage))


@stages
@pytest.mark.parametrize("kind", GIVEN)
@on_ranks(2)
def test_one_tensor_of_a_structure_is_used(kind, stage):
    def make():
        return Root(*[Gives(GIVEN[kind]) for _ in range(3)], join=one_used).double()

    check(make, mesh=line(), segments=["blocks.*"], **ways(stage))


@stages
@pytest.mark.parametrize("kind", PASSED)
@on_ranks(2)
def test_a_structure_is_passed_from_module_to_module(kind, stage):
    def make():
        return Root(*[Gives(PASSED[kind]) for _ in range(3)], join=passed_on).double()

    check(make, mesh=line(), segments=["blocks.*"], **ways(stage))


# Recomputed ---------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, drop=0.0, inside=False):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 7), nn.Linear(7, 6), nn.LayerNorm(6)
        self.drop, self.inside = nn.Dropout(drop), inside

    def inner(self, x):
        return self.drop(self.down(torch.tanh(self.up(x))))

    def forward(self, x):
        h = self.norm(x)
        h = checkpoint(self.inner, h, use_reentrant=False) if self.inside else self.inner(h)
        return x + h


def around(blocks, x):
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def around_pairs(blocks, x):
    for i in range(0, len(blocks), 2):
        x = checkpoint(chained, blocks[i : i + 2], x, use_reentrant=False)
    return x


def around_all(blocks, x):
    return checkpoint(chained, blocks, x, use_reentrant=False)


def nested(blocks, x):
    return checkpoint(around, blocks, x, use_reentrant=False)


JOINS = [around, around_pairs, around_all, nested]


SEGMENTS = {"each": ["blocks.*"], "one": dt.fsdp.SegmentBySize()}
CHECKPOINTED = [*itertools.product(STAGES, SEGMENTS, [True, False], [chained, *JOINS])]


@pytest.mark.parametrize(
    ("stage", "segments", "inside", "join"),
    part(CHECKPOINTED, 30, "checkpoints"),
    ids=lambda x: getattr(x, "__name__", None),
)
@on_ranks(2)
def test_checkpoints(stage, segments, inside, join):
    def make():
        return Root(*[Block(inside=inside) for _ in range(4)], join=join).double()

    check(make, mesh=line(), segments=SEGMENTS[segments], **ways(stage))


@pytest.mark.parametrize("join", [chained, *JOINS], ids=lambda f: f.__name__)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("again", [True, False])
@on_ranks(2)
def test_checkpoints_gather_once_for_recompute_and_backward(join, inside, again):
    """Segments that are computed again together are held one at a time: all but the last of them
    are gathered twice."""
    gathers = {chained: 8, around: 8, around_pairs: 10, around_all: 11, nested: 11}[join]
    torch.manual_seed(0)
    model = Root(*[Block(inside=inside) for _ in range(4)], join=join).double()
    dt.shard_data_parallel(model, line(), segments=["blocks.*"], reshard_after_forward=again)
    x = dt.shard_tensor(randn(5, 6), line(), [S0])
    for _ in range(3):
        with dt.debugging.record_comms() as log:
            squares(model, x)
        counts = log.counts()
        assert counts["all_gather"] == (gathers if again else 4), str(log)
        assert counts["reduce_scatter"] == 4 and len(log) == counts["all_gather"] + 4, str(log)
        dt_step(model)


def dt_step(model):
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
            p.grad = None


@stages
@pytest.mark.parametrize("join", JOINS, ids=lambda f: f.__name__)
@on_ranks(2)
def test_dropout_is_the_same_when_computed_again(join, stage):
    """The same masks with and without checkpoints: the numbers of the run without are right (other
    tests)."""
    out = []
    for how in (chained, join):
        torch.manual_seed(0)
        dt.manual_seed(3)
        model = Root(*[Block(drop=0.4) for _ in range(4)], join=how).double()
        dt.shard_data_parallel(model, line(), segments=["blocks.*"], **ways(stage))
        batches = [dt.shard_tensor(randn(5, 6, seed=i), line(), [S0]) for i in range(3)]
        out.append(train(model, squares, batches))
    compare(out[1], out[0])


# What autograd does not see -----------------------------------------------------------------------


class Lends(nn.Module):
    """Its result is its parameter, and a view of it."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.w = nn.Parameter(torch.randn(7, 6))

    def forward(self):
        return self.kind(self.w, (self.w.t(),))


class Borrows(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.lends, self.last = nn.Linear(6, 6), Lends(kind), nn.Linear(6, 6)

    def forward(self, x):
        lent = self.lends()
        x = F.linear(self.first(x), lent.h)
        return self.last(torch.tanh(F.linear(x, lent.parts[0])))


@stages
@pytest.mark.parametrize("kind", ["pair", "frozen", "keys", "object"])
@on_ranks(2)
def test_a_module_gives_its_parameter(kind, stage):
    def make():
        return Borrows(GIVEN[kind]).double()

    check(make, mesh=line(), segments=["first", "lends", "last"], **ways(stage))
