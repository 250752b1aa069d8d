"""shard_data_parallel trains as one process does, whatever is cut, shared, frozen or left out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt
from disttensor import Replicate, Shard
from tests.support.oracle import randint
from tests.support.pool import on_ranks
from tests.support.training import (
    STAGES,
    adamw,
    check,
    mesh_of,
    ways,
)

R, S0, S1 = Replicate(), Shard(0), Shard(1)
stages = pytest.mark.parametrize("stage", STAGES)


def mlp():
    """Dim 0 of no size that two or four ranks divide; one row is less than there are ranks."""
    return nn.Sequential(
        nn.Linear(6, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)
    ).double()


EACH = ["0", "2", "3", "5"]

# Meshes -------------------------------------------------------------------------------------------

FOUR = {
    "fsdp": ((4,), ("fsdp",), None, [S0]),
    "dp x fsdp": ((2, 2), ("dp", "fsdp"), None, [S0, S0]),
    "fsdp x dp": ((2, 2), ("fsdp", "dp"), None, [S0, S0]),
    "batch over dp alone": ((2, 2), ("dp", "fsdp"), None, [S0, R]),
    "batch over fsdp alone": ((2, 2), ("dp", "fsdp"), None, [R, S0]),
    "batch whole": ((2, 2), ("dp", "fsdp"), None, [R, R]),
    "features over fsdp": ((2, 2), ("dp", "fsdp"), None, [S0, S1]),
    "one dp": ((1, 4), ("dp", "fsdp"), None, [S0, S0]),
    "one fsdp": ((4, 1), ("dp", "fsdp"), None, [S0, S0]),
    "permuted": ((2, 2), ("dp", "fsdp"), [3, 0, 2, 1], [S0, S0]),
}


@pytest.mark.feature("Sharded state")
@stages
@pytest.mark.parametrize("kind", FOUR)
@on_ranks(4)
def test_every_mesh(kind, stage):
    shape, names, ranks, split = FOUR[kind]
    check(mlp, mesh=mesh_of(shape, names, ranks), split=split, segments=EACH, **ways(stage))


@stages
@pytest.mark.parametrize("segments", [dt.fsdp.SegmentBySize(), EACH], ids=["one", "each"])
@on_ranks(2)
def test_adamw(segments, stage):
    check(mlp, mesh=mesh_of((2,), ("fsdp",)), optimizer=adamw, segments=segments, **ways(stage))


PLANS = {
    "column": {"0.weight": [R, S0], "0.bias": [R, S0], "3.weight": [R, S1]},
    "column, turned": {"0.weight": [S0, R], "0.bias": [S0, R], "3.weight": [S1, R]},
    "fewer rows than ranks": {"5.weight": [R, S0], "5.bias": [R, S0]},
    "row": {"0.weight": [R, S1], "3.weight": [R, S1], "5.weight": [R, S1]},
}


@stages
@pytest.mark.parametrize("kind", PLANS)
@on_ranks(4)
def test_beside_tensor_parallelism(kind, stage):
    names = ("tp", "fsdp") if "turned" in kind else ("fsdp", "tp")
    plan = PLANS[kind]
    model = check(mlp, mesh=mesh_of((2, 2), names), plan=plan, segments=EACH, **ways(stage))
    if stage and kind == "column":
        assert model[0].weight.dims_mapping == [[1, 0], -1]


# Tied, frozen, unused -----------------------------------------------------------------------------


class Tied(nn.Module):
    """Token and position embeddings; the head is the token embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 6), nn.Embedding(5, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def tied():
    return Tied().double()


def next_token(model, tokens):
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")
    loss.backward()
    return loss


TOKENS = [randint(0, 11, (5, 4), seed=i) for i in range(3)]
CUTS = {
    "size": dt.fsdp.SegmentBySize(),
    "small": dt.fsdp.SegmentBySize(0.0004),
    "tiny": dt.fsdp.SegmentBySize(1e-6),
    "blocks": ["blocks.*"],
    "all named": ["embed", "place", "blocks.*", "norm", "head"],
    "anchors": dt.fsdp.SegmentByAnchors(["blocks.1", "norm"]),
}


@stages
@pytest.mark.parametrize("cuts", CUTS)
@on_ranks(2)
def test_tied_weights_in_all_segments(cuts, stage):
    check(
        tied,
        next_token,
        mesh=mesh_of((2,), ("fsdp",)),
        batches=TOKENS,
        segments=CUTS[cuts],
        **ways(stage),
    )


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
@pytest.mark.parametrize("again", [True, False])
@on_ranks(2)
def test_prefetch_changes_no_number(prefetch, again):
    check(
        tied,
        next_token,
        mesh=mesh_of((2,), ("fsdp",)),
        batches=TOKENS,
        segments=["blocks.*"],
        prefetch=prefetch,
        reshard_after_forward=again,
    )


@pytest.mark.parametrize("split", [[S0, S1], [S1, S0], [R, S1]], ids=str)
@stages
@on_ranks(4)
def test_the_sequence_is_split(split, stage):
    class Flat(Tied):
        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = x + block(x)
            return self.head(self.norm(x))

    check(
        lambda: Flat().double(),
        next_token,
        mesh=mesh_of((2, 2), ("dp", "fsdp")),
        batches=TOKENS,
        split=split,
        segments=["blocks.*"],
        **ways(stage),
    )


def frozen(*names):
    def make():
        model = mlp()
        for name in names:
            model.get_submodule(name).requires_grad_(False)
        return model

    return make


@stages
@pytest.mark.parametrize("names", [["0"], ["3"], ["5"], ["0", "2", "3"], ["2", "5"]], ids=str)
@pytest.mark.parametrize(
    "segments", [["0", "2", "3", "5"], dt.fsdp.SegmentBySize()], ids=["each", "one"]
)
@on_ranks(2)
def test_frozen_parameters(names, segments, stage):
    check(frozen(*names), mesh=mesh_of((2,), ("fsdp",)), segments=segments, **ways(stage))


class Lora(nn.Module):
    """What is trained comes last in the forward of the segment, so first in its backward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x):
        h = torch.tanh(self.base(torch.tanh(self.base(x))))
        return h + self.up(self.down(h))


@stages
@on_ranks(2)
def test_frozen_weights_are_still_needed_after_the_last_gradient(stage):
    def make():
        model = nn.Sequential(nn.Linear(6, 6), Lora(), Lora()).double()
        model[1].inner = model[2].inner = None
        return model

    check(make, mesh=mesh_of((2,), ("fsdp",)), segments=["0", "1", "2"], **ways(stage))


class Choice(nn.Module):
    """Not every parameter is used, and not in every step the same."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.never = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        order = [(self.a, self.b), (self.b, self.a), (self.c,), (self.a, self.a, self.b)][
            self.calls % 4
        ]
        for module in order:
            x = torch.tanh(module(x)) * self.scale
        return x


@stages
@pytest.mark.parametrize(
    "segments", [["a", "b", "c"], dt.fsdp.SegmentBySize()], ids=["each", "one"]
)
@pytest.mark.parametrize("zero", [True, False])
@on_ranks(2)
def test_modules_unused_reordered_and_called_twice(segments, stage, zero):
    check(
        lambda: Choice().double(),
        mesh=mesh_of((2,), ("fsdp",)),
        segments=segments,
        steps=8,
        zero=zero,
        **ways(stage),
    )


class Borrowed(nn.Module):
    """The root uses the parameters of another module directly."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = torch.tanh(F.linear(x, self.first.weight))
        return self.second(torch.tanh(self.first(x))) + self.second.bias


@stages
@pytest.mark.parametrize(
    "segments", [["first", "second"], dt.fsdp.SegmentBySize()], ids=["each", "one"]
)
@on_ranks(2)
def test_a_parameter_used_outside_its_module(segments, stage):
    check(
        lambda: Borrowed().double(), mesh=mesh_of((2,), ("fsdp",)), segments=segments, **ways(stage)
    )
