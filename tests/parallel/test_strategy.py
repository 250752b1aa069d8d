"""Strategies: degrees, groups and sharding configs as pure values; meshes and placements on 32 fake
ranks; training on real ones."""

from __future__ import annotations

import copy
import dataclasses
import doctest
import inspect
import pickle
import re
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt
from disttensor import pipeline
from disttensor.fsdp.segment_policy import SegmentByAnchors, SegmentBySize
from disttensor.parallel import strategy as strategies
from disttensor.parallel.degrees import AXES, STAGE_AXES, Degrees, groups, infer
from disttensor.parallel.rematerialize import Recomputed, modules_to_recompute
from disttensor.parallel.strategy import Strategy
from tests.support.pool import fake_world, on_ranks

# Degrees: pp, dp, sharding, cp, tp ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "world", "expected"),
    [
        ({}, 1, (1, 1, 1, 1, 1)),
        ({}, 4, (1, 4, 1, 1, 1)),
        ({"tp": 2}, 8, (1, 4, 1, 1, 2)),
        ({"sharding": 8}, 32, (1, 4, 8, 1, 1)),
        ({"pp": 2, "cp": 2, "tp": 2}, 16, (2, 2, 1, 2, 2)),
        ({"dp": 2}, 8, (1, 2, 4, 1, 1)),
        ({"dp": 2, "sharding": 2}, 8, (1, 2, 2, 1, 2)),
        ({"dp": 1, "sharding": 1, "tp": 2}, 8, (1, 1, 1, 4, 2)),
        ({"dp": 2, "sharding": 1, "tp": 1, "cp": 1}, 6, (3, 2, 1, 1, 1)),
        ({"zero_stage": 3}, 4, (1, 1, 4, 1, 1)),
        ({"zero_stage": 1, "tp": 2}, 8, (1, 1, 4, 1, 2)),
        ({"zero_stage": 2, "sharding": 2}, 8, (1, 4, 2, 1, 1)),
        ({"zero_stage": 3, "sharding": 1}, 4, (1, 4, 1, 1, 1)),
        ({"pp": 3, "dp": 1, "sharding": 2, "cp": 1, "tp": 5}, 30, (3, 1, 2, 1, 5)),
    ],
    ids=str,
)
def test_degrees_left_out_follow_from_the_world(given, world, expected):
    degrees = Strategy(**given).degrees(world)
    assert degrees == expected and degrees.world == world
    assert degrees.nontrivial_axes == tuple(a for a in STAGE_AXES if getattr(degrees, a) > 1)


@pytest.mark.parametrize(
    ("given", "world", "words"),
    [
        (
            {"dp": 3, "tp": 2},
            8,
            "dp=3 x tp=2 needs a multiple of 6 processes, and the world has 8. Start 12, or choose "
            "what fits 8: dp=4 x tp=2, dp=2 x sharding=2 x tp=2",
        ),
        (
            {"dp": 4},
            6,
            "needs a multiple of 4 processes, and the world has 6. Start 8, or choose what fits 6: "
            "dp=3 x sharding=2, dp=6",
        ),
        (
            {"tp": 8},
            4,
            "tp=8 needs a multiple of 8 processes, and the world has 4. Start 8, or choose what "
            "fits 4: tp=4, dp=2 x tp=2, dp=4 x tp=1",
        ),
        (
            {"pp": 1, "dp": 3, "sharding": 1, "cp": 1, "tp": 2},
            8,
            "needs exactly 6 processes, and the world has 8. Start 6, or choose what fits 8: dp=4 "
            "x tp=2",
        ),
        ({"pp": 1, "dp": 2, "sharding": 1, "cp": 1, "tp": 2}, 8, "needs exactly 4 processes"),
        (
            {"pp": 1, "dp": 1, "sharding": 1, "cp": 1, "tp": 1},
            2,
            "choose what fits 2: dp=2, sharding=2, tp=2, cp=2, pp=2",
        ),
        (
            {"pp": 4, "dp": 2, "tp": 8},
            32,
            "pp=4 x dp=2 x tp=8 needs a multiple of 64 processes, and the world has 32. Start 64",
        ),
    ],
    ids=str,
)
def test_a_world_that_does_not_factor_says_what_would(given, world, words):
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        Strategy(**given).degrees(world)
    for choice in str(raised.value).split(f"what fits {world}: ")[1].split(", "):
        sizes = {axis: int(size) for axis, size in re.findall(r"(\w+)=(\d+)", choice)}
        assert infer({**dict.fromkeys(AXES, 1), **sizes}, world).world == world


def test_a_strategy_is_a_value():
    one = Strategy(tp=2, recompute=["blocks.*"], segments=["a", "b"])
    assert one == Strategy(tp=2, recompute=("blocks.*",), segments=("a", "b")) == copy.deepcopy(one)
    assert {one: 1}[pickle.loads(pickle.dumps(one))] == 1
    assert Strategy(recompute="blocks.*").recompute == ("blocks.*",)
    assert dataclasses.replace(one, dp=3).degrees(12) == (1, 3, 2, 1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.tp = 4


# Groups -------------------------------------------------------------------------------------------

FOUR = {
    "sharding 32": ({"sharding_degree": 32}, (1, 1, 32, 1, 1)),
    "sharding 8, hybrid": (
        {"sharding_degree": 8, "hybrid_dp": True, "gradient_merge_acc_step": 4},
        (1, 4, 8, 1, 1),
    ),
    "mp 8, sharding 4": ({"mp_degree": 8, "sharding_degree": 4}, (1, 1, 4, 1, 8)),
    "mp 4, sharding 2, hybrid": (
        {"mp_degree": 4, "sharding_degree": 2, "hybrid_dp": True, "dp_degree": 4},
        (1, 4, 2, 1, 4),
    ),
}


def of_rank(found, rank, purpose=""):
    """axes -> ranks of the groups of one rank."""
    return {g.axes: g.ranks for g in found if rank in g.ranks and g.purpose == purpose}


@pytest.mark.parametrize(("configs", "expected"), FOUR.values(), ids=FOUR)
def test_the_groups_of_32_processes(configs, expected):
    strategy = Strategy.from_sharding_configs(configs)
    assert strategy.degrees(32) == expected
    found = strategy.groups(32)
    mine, reduce, gather = (of_rank(found, 13, purpose) for purpose in ("", "reduce", "gather"))
    if expected[2] == 32:
        assert mine == {("sharding",): tuple(range(32))}
    elif expected[4] == 1:  # rank 13: dp 1, sharding 5
        assert mine == {
            ("dp",): (5, 13, 21, 29),
            ("sharding",): tuple(range(8, 16)),
            ("dp", "sharding"): tuple(range(32)),
        }
    elif expected[1] == 1:  # sharding 1, tp 5
        assert mine == {
            ("sharding",): (5, 13, 21, 29),
            ("tp",): tuple(range(8, 16)),
            ("sharding", "tp"): tuple(range(32)),
        }
    else:  # dp 1, sharding 1, tp 1
        assert mine == {
            ("dp",): (5, 13, 21, 29),
            ("sharding",): (9, 13),
            ("tp",): (12, 13, 14, 15),
            ("dp", "sharding"): (1, 5, 9, 13, 17, 21, 25, 29),
            ("dp", "tp"): (4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31),
            ("sharding", "tp"): tuple(range(8, 16)),
            ("dp", "sharding", "tp"): tuple(range(32)),
        }
    assert gather == {("sharding",): mine[("sharding",)]} and reduce == mine
    assert list(mine) == sorted(mine, key=len)


@pytest.mark.parametrize(
    "degrees", [(1, 1, 1, 1, 1), (2, 2, 2, 1, 2), (1, 2, 2, 3, 2), (3, 1, 5, 1, 1)], ids=str
)
def test_each_set_of_axes_divides_each_stage_once(degrees):
    degrees = Degrees(*degrees)
    found = groups(degrees)
    assert len(set(found)) == len(found)
    kinds = {(g.axes, g.purpose) for g in found}
    busy = degrees.nontrivial_axes
    assert {axes for axes, purpose in kinds if not purpose} == {
        tuple(a for a, on in zip(busy, f"{n:0{len(busy)}b}", strict=True) if on == "1")
        for n in range(1, 2 ** len(busy))
    }
    for axes, purpose in kinds:
        ranks = sorted(r for g in found if (g.axes, g.purpose) == (axes, purpose) for r in g.ranks)
        assert ranks == list(range(degrees.world))


def test_groups_are_those_of_the_meshes():
    with fake_world(24, rank=17):
        strategy = Strategy(pp=2, dp=1, sharding=2, cp=3, tp=2)
        stage = strategy.stages()[1]
        found = of_rank(strategy.groups(), 17)
        assert stage.coordinate is not None and len(found) == 7
        array = stage.mesh
        for axes, ranks in found.items():
            places = stage.members([stage.axis(a) for a in axes], stage.coordinate)
            assert ranks == tuple(int(array[place]) for place in places)


# Sharding configs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        (
            {},
            {
                "dp": 1,
                "sharding": None,
                "tp": 1,
                "pp": 1,
                "accumulate_steps": 1,
                "offload": False,
                "segments": SegmentBySize(32.0),
            },
        ),
        ({"sharding_degree": 8}, {"sharding": 8, "dp": 1}),
        ({"sharding_degree": 8, "hybrid_dp": True}, {"sharding": 8, "dp": None}),
        ({"sharding_degree": 8, "dp_degree": 4}, {"sharding": 8, "dp": 4}),
        ({"dp_degree": 4, "hybrid_dp": True}, {"sharding": None, "dp": 4}),
        ({"dp_degree": 1, "hybrid_dp": False}, {"dp": 1}),
        ({"mp_degree": 4, "pp_degree": 2}, {"tp": 4, "pp": 2}),
        (
            {"gradient_merge_acc_step": 4, "optimize_offload": True},
            {"accumulate_steps": 4, "offload": True},
        ),
        ({"segment_broadcast_MB": 16}, {"segments": SegmentBySize(16)}),
        (
            {"sharding_segment_strategy": "segment_anchors", "segment_anchors": ["a", "b"]},
            {"segments": SegmentByAnchors(("a", "b"))},
        ),
        (
            {
                "sharding_segment_strategy": "segment_anchors",
                "segment_broadcast_MB": 32,
                "segment_anchors": ["a"],
            },
            {"segments": SegmentByAnchors(("a",))},
        ),
        (
            {
                "sharding_segment_strategy": "segment_broadcast_MB",
                "segment_broadcast_MB": 32,
                "segment_anchors": None,
            },
            {"segments": SegmentBySize(32)},
        ),
    ],
    ids=str,
)
def test_what_configs_say(configs, expected):
    strategy = Strategy.from_sharding_configs(configs, amp="bf16")
    assert {name: getattr(strategy, name) for name in expected} == expected
    assert strategy.amp == "bf16" and strategy.cp == 1


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ({"sharding_degre": 8}, "no key 'sharding_degre'; close to it are sharding_degree"),
        ({"stage": 3}, "no key 'stage'"),
        ({"sharding_degree": "8"}, "sharding_degree='8': a whole number is expected"),
        ({"sharding_degree": 0}, "sharding_degree=0: a whole number above 0"),
        ({"mp_degree": 2.0}, "mp_degree=2.0: a whole number"),
        ({"hybrid_dp": 1}, "hybrid_dp=1: True or False"),
        ({"dp_degree": True}, "dp_degree=True: a whole number"),
        ({"segment_broadcast_MB": -1.0}, "segment_broadcast_MB=-1.0"),
        ({"segment_anchors": "blocks"}, "segment_anchors='blocks': a list of names"),
        (
            {"segment_anchors": ["blocks.1"]},
            "segment_anchors=['blocks.1'] have no meaning for "
            "sharding_segment_strategy='segment_broadcast_MB'",
        ),
        ({"sharding_segment_strategy": "segment_anchors"}, "needs segment_anchors"),
        (
            {
                "sharding_segment_strategy": "segment_anchors",
                "segment_anchors": ["a"],
                "segment_broadcast_MB": 16,
            },
            "segment_broadcast_MB=16 has no meaning",
        ),
        ({"sharding_segment_strategy": "segment_anchor"}, "did you mean 'segment_anchors'?"),
        ({"hybrid_dp": False, "dp_degree": 4}, "hybrid_dp=False and dp_degree=4 contradict"),
        ({"hybrid_dp": True, "dp_degree": 1}, "hybrid_dp=True and dp_degree=1 contradict"),
        ({"hybrid_dp": True}, "needs sharding_degree or dp_degree"),
        (["sharding_degree"], "a dict is expected"),
    ],
    ids=str,
)
def test_configs_that_contradict_themselves(configs, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        Strategy.from_sharding_configs(configs)


def test_configs_and_the_world():
    with pytest.raises(ValueError, match=r"sharding=8 .* needs exactly 8"):
        Strategy.from_sharding_configs({"sharding_degree": 8}).degrees(32)
    with pytest.raises(ValueError, match="from_sharding_configs: tp: set by configs too"):
        Strategy.from_sharding_configs({}, tp=2)
    with fake_world(32):
        with pytest.raises(
            ValueError, match=r"needs exactly 24 processes, and the world has 32.*hybrid_dp=True"
        ):
            Strategy.from_sharding_configs({"sharding_degree": 8, "mp_degree": 3})
        Strategy.from_sharding_configs({"sharding_degree": 8, "mp_degree": 4})


# Apply --------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = (f(self.norm(x)) for f in self.qkv)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.tok = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 7)

    def forward(self, tokens):
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


LAYERS = ["tok", "blocks.*", "head"]
PLAN = {
    "tok": {"tp": dt.Shard(0)},
    "blocks.*.qkv.*": {"tp": dt.Shard(0)},
    "blocks.*.up": {"tp": dt.Shard(0)},
    "blocks.*.down.weight": {"tp": dt.Shard(1)},
}


def net(seed: int = 1) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def data(seed: int) -> torch.Tensor:
    return torch.randint(7, (8, 6), generator=torch.Generator().manual_seed(seed))


def loss_of(model, batch, first=None, last=None, places=None):
    inputs, targets = batch[:, :-1], batch[:, 1:]
    if first is not None:
        inputs, targets = (
            dt.shard_tensor(inputs, first, places),
            dt.shard_tensor(targets, last, places),
        )
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(model, optimizer, strategy=None, count=1, steps=2):
    """Losses of the steps: each the mean over ``count`` micro-batches."""
    losses = []
    for step in range(steps):
        parts = data(step).chunk(count)
        if strategy is None:
            found = [loss_of(model, part) / count for part in parts]
            for loss in found:
                loss.backward()
        else:
            stages, places = strategy.stages(), strategy.batch()

            def one(part):
                with strategy.autocast():
                    return loss_of(model, part, stages[0], stages[-1], places) / count

            if len(stages) > 1:
                found = pipeline.run(one, parts, "1f1b", stages=stages)
            else:
                found = []
                for i, part in enumerate(parts):
                    with strategy.accumulate(model, i):
                        found.append(one(part))
                        found[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(float(dt.broadcast_value(loss.detach())) for loss in found))
    return losses


def groups_of(model):
    """Matrices decay, the rest does not."""
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


def adam(groups):
    return torch.optim.AdamW(groups, lr=0.01)


def check_trains(strategy, **how):
    """Losses and parameters after two steps are those of one process; returns the model and its
    optimizer."""
    plain, model = net(), net()
    reference, optimizer = adam(groups_of(plain)), adam(groups_of(model))
    count = strategy.accumulate_steps
    if strategy.degrees().pp > 1:
        how["layers"] = LAYERS
    given = model, optimizer
    model, optimizer = strategy.apply(model, optimizer, PLAN, **how)
    assert (model, optimizer) == given
    expected = train(plain, reference, None, count)
    torch.testing.assert_close(train(model, optimizer, strategy, count), expected)
    theirs = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        value = dt.broadcast_value(p.detach())
        torch.testing.assert_close(
            value, theirs[name].detach(), rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )
    return model, optimizer


SMALL = {
    "sharding 4": {"sharding_degree": 4},
    "sharding 2, hybrid": {"sharding_degree": 2, "hybrid_dp": True, "gradient_merge_acc_step": 4},
    "mp 2, sharding 2": {"mp_degree": 2, "sharding_degree": 2},
    "mp 2, sharding 1, hybrid": {"mp_degree": 2, "sharding_degree": 1, "hybrid_dp": True},
}


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("configs", SMALL.values(), ids=SMALL)
@on_ranks(4)
def test_the_layouts_scaled_down_train_like_one_process(configs, zero_stage):
    check_trains(Strategy.from_sharding_configs(configs, zero_stage=zero_stage))


@pytest.mark.parametrize(
    "fields",
    [
        {"dp": 4},
        {"dp": 2, "tp": 2, "accumulate_steps": 2},
        {"cp": 2, "dp": 2},
        {"cp": 2, "sharding": 2, "zero_stage": 2},
        {"cp": 2, "tp": 2},
        {"cp": 4, "attention": "ring", "recompute": ["blocks.*"]},
        {"cp": 2, "pp": 2, "attention": "heads", "accumulate_steps": 2},
        {"pp": 2, "dp": 2, "accumulate_steps": 2},
        {"pp": 2, "sharding": 2, "accumulate_steps": 4},
        {"pp": 2, "tp": 2},
        {"sharding": 2, "tp": 2, "recompute": ["blocks.*"]},
        {"pp": 2, "sharding": 2, "recompute": ["blocks.0", "head"]},
        {"sharding": 4, "segments": ["blocks.*"], "prefetch": 0, "reshard_after_forward": False},
    ],
    ids=str,
)
@on_ranks(4)
def test_combinations_train_like_one_process(fields):
    check_trains(Strategy(**fields))


@pytest.mark.feature("Strategies")
@pytest.mark.parametrize(
    "fields", [{"dp": 2}, {"sharding": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}], ids=str
)
@on_ranks(2)
def test_each_axis_alone_trains_like_one_process(fields):
    check_trains(Strategy(**fields, accumulate_steps=2))


@on_ranks(1)
def test_one_process_runs_the_same_script():
    strategy = Strategy(zero_stage=3, recompute=["blocks.*"], accumulate_steps=2)
    model, _ = check_trains(strategy)
    assert strategy.mesh().shape == (1, 1, 1, 1, 1) and strategy.mesh().dim_names == AXES
    assert strategy.stages() == [model.head.weight.process_mesh]


@on_ranks(2)
def test_an_optimizer_follows():
    strategy = Strategy(sharding=2)
    model = net()
    model.head.weight.requires_grad_(False)
    model.blocks[1].up = model.blocks[0].up  # tied
    optimizer = adam(groups_of(model))
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, same = strategy.apply(model, optimizer)
    assert same is optimizer is schedule.optimizer
    assert [len(group["params"]) for group in optimizer.param_groups] == sizes
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert all(isinstance(p, dt.DistTensor) for p in held)
    model, made = strategy.apply(net(), torch.optim.SGD)
    assert [id(p) for p in made.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert strategy.apply(net())[1] is None
    ends = []  # Adagrad makes its state in the constructor
    for placed in (False, True):
        model = net()
        optimizer = torch.optim.Adagrad(groups_of(model), 0.1, initial_accumulator_value=0.5)
        if placed:
            model, optimizer = strategy.apply(model, optimizer)
        ends.append(train(model, optimizer, strategy if placed else None))
    torch.testing.assert_close(*ends)


@on_ranks(2)
def test_what_does_not_fit_changes_nothing():
    model = net()
    used = adam(model.parameters())
    model(data(0)).sum().backward()
    used.step()
    with pytest.raises(ValueError, match=re.escape("'tok.weight' has a gradient")):
        Strategy().apply(model)
    used.zero_grad()
    for how, fields, words in (
        ({"optimizer": used}, {}, "this AdamW has state already"),
        (
            {"optimizer": adam([*model.parameters(), nn.Parameter(torch.ones(3))])},
            {},
            "of group 0 of this AdamW, (3,), is no parameter of the model",
        ),
        ({"optimizer": adam(net().parameters())}, {}, "parameter 0 of group 0"),
        ({"optimizer": "adam"}, {}, "the optimizer is 'adam'"),
        (
            {"plan": {"head.weight": {"tpp": dt.Shard(0)}}},
            {},
            "plan entry 'head.weight': a stage has no axis 'tpp'; its axes are dp, sharding, cp, "
            "tp (did you mean 'tp'?)",
        ),
        ({"plan": {"head.weight": {"pp": dt.Shard(0)}}}, {}, "(stages are made of whole layers)"),
        (
            {"plan": {"head.weight": {"sharding": dt.Shard(0)}}},
            {},
            "the strategy itself splits parameters over that axis, all but experts",
        ),
        ({"plan": {"head.weight": {"tp": dt.Shard(2)}}}, {}, "Shard(2)"),
        ({"plan": {"head.weight": [dt.Shard(0)]}}, {}, "1 entries"),
        ({"plan": {"heads.weight": {"tp": dt.Shard(0)}}}, {}, "matches no parameter"),
        ({}, {"dp": 3}, "dp=3 needs a multiple of 3 processes, and the world has 2"),
        ({}, {"pp": 2}, "pp=2 stages of which layers of this Net?"),
        ({"layers": ["tok", "blocks.*"]}, {"pp": 2}, "head.weight, head.bias: in no layer"),
        (
            {},
            {"recompute": ["block.*"]},
            "recompute='block.*' matches no module of Net; there are blocks",
        ),
        ({}, {"segments": ["blok.0"]}, "blok.0"),
        ({}, {"segments": SegmentByAnchors(("head", "bloks.1"))}, "bloks.1"),
    ):
        before = {name: id(p) for name, p in model.named_parameters()}
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            Strategy(**fields).apply(model, **how)
        assert before == {name: id(p) for name, p in model.named_parameters()}
        assert not any("forward" in m.__dict__ or m._forward_pre_hooks for m in model.modules())


def test_which_modules_recompute():
    model = net()

    def names(*patterns):
        found = modules_to_recompute(model, patterns)
        return [name for name, module in model.named_modules() if module in found]

    assert (
        names("blocks.*")
        == names("blocks")
        == names("blocks.1", "blocks.?")
        == ["blocks.0", "blocks.1"]
    )
    assert names("*.0.up", "head") == ["blocks.0.up", "head"] and not names()
    with pytest.raises(ValueError, match="'block' matches no module"):
        names("block")
    model.head.forward = lambda x: x
    with pytest.raises(ValueError, match="recompute='head': this Linear has a forward of its own"):
        names("head")


@on_ranks(1)
def test_a_recomputed_module_is_an_ordinary_one():
    model, plain = net(), net()
    Strategy(recompute=["blocks.*"]).apply(model)
    ran = []
    model.blocks[0].up.register_forward_hook(lambda *_: ran.append(1))
    assert isinstance(model.blocks[0].forward, Recomputed)
    assert inspect.signature(model.blocks[0].forward).parameters.keys() == {"x"}
    assert list(model.state_dict()) == list(plain.state_dict())
    loss = loss_of(model, data(0), model.head.weight.process_mesh, model.head.weight.process_mesh)
    assert len(ran) == 1
    loss.backward()
    assert len(ran) == 2
    with torch.no_grad():
        model(data(0))
    assert len(ran) == 3


@pytest.mark.parametrize("how", [{"sharding": 2}, {"dp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@on_ranks(2)
def test_mixed_precision_trains_as_closely_as_it_can(amp, how):
    strategy = Strategy(amp=amp, accumulate_steps=2, **how)
    plain, model = net().float(), net().float()
    model, optimizer = strategy.apply(model, torch.optim.SGD, PLAN)
    scaler, (stage,) = strategy.scaler(init_scale=64.0), strategy.stages()
    assert scaler.is_enabled() == (amp == "fp16")
    for step in range(2):
        total = 0.0
        for i, part in enumerate(data(step).chunk(2)):
            with strategy.accumulate(model, i):
                with strategy.autocast():
                    loss = loss_of(model, part, stage, stage, strategy.batch()) / 2
                scaler.scale(loss).backward()
                total += float(loss.detach())
        scaler.step(optimizer)
        scaler.update()
        assert all(p.grad.dtype == p.dtype == torch.float32 for p in model.parameters())
        optimizer.zero_grad()
        expected = loss_of(plain, data(step))
        expected.backward()
        torch.optim.SGD(plain.parameters()).step()
        plain.zero_grad()
        torch.testing.assert_close(total, float(expected.detach()), rtol=0, atol=0.02)
    assert scaler.get_scale() == (64.0 if amp == "fp16" else 1.0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {},
            {
                "shard_axis": None,
                "stage": 3,
                "param_dtype": None,
                "reduce_dtype": None,
                "prefetch": 1,
                "reshard_after_forward": True,
                "offload": False,
            },
        ),
        (
            {"amp": "bf16", "dp": 1},
            {
                "shard_axis": "sharding",
                "param_dtype": torch.bfloat16,
                "reduce_dtype": torch.float32,
            },
        ),
        (
            {"amp": "fp16", "zero_stage": 2, "reduce_dtype": torch.float16},
            {"stage": 2, "param_dtype": torch.float16, "reduce_dtype": torch.float16},
        ),
        ({"amp": "bf16"}, {"shard_axis": None, "param_dtype": None, "reduce_dtype": None}),
        (
            {"amp": "bf16", "sharding": 2, "param_dtype": torch.float32},
            {"param_dtype": torch.float32},
        ),
        (
            {
                "param_dtype": torch.bfloat16,
                "prefetch": 3,
                "offload": True,
                "reshard_after_forward": False,
            },
            {
                "param_dtype": torch.bfloat16,
                "reduce_dtype": None,
                "prefetch": 3,
                "offload": True,
                "reshard_after_forward": False,
            },
        ),
        ({"segments": ["blocks.*"]}, {"segments": ("blocks.*",)}),
        ({"pp": 2}, {"mesh": None, "segments": ("tok", "blocks.0", "blocks.1", "head")}),
    ],
    ids=str,
)
def test_what_is_handed_to_sharded_data_parallelism(fields, expected, monkeypatch):
    seen = {}

    def stand_in(model, mesh, **how):
        seen.update(how, mesh=mesh)
        return model

    monkeypatch.setattr(strategies, "shard_data_parallel", stand_in)
    with fake_world(2):
        strategy = Strategy(**fields)
        strategy.apply(net(), layers=LAYERS if "pp" in fields else None)
        expected = {"mesh": strategy.stages()[0], "replicate_axis": "dp", **expected}
    assert {name: seen[name] for name in expected} == expected
    assert ("segments" in seen) == ("segments" in expected)


def test_what_is_summed_after_the_last_micro_batch_only(monkeypatch):
    monkeypatch.setattr(strategies, "accumulate", lambda model, last: last)
    strategy = Strategy(accumulate_steps=3)
    lasts = [strategy.accumulate(nn.Linear(1, 1), i) for i in range(6)]
    assert lasts == [False, False, True] * 2
    assert Strategy().accumulate(nn.Linear(1, 1), 0) is True


def test_a_scaler_that_scales_is_the_whole_worlds(monkeypatch):
    monkeypatch.setattr(strategies, "shard_scaler", lambda scaler: ("world", scaler))
    whose, scaler = Strategy(amp="fp16").scaler(init_scale=8.0)
    assert whose == "world" and scaler.is_enabled() and scaler.get_scale() == 8.0
    for amp in (None, "bf16"):
        assert not Strategy(amp=amp).scaler().is_enabled()


def test_how_a_batch_lies():
    split, whole = dt.Shard(0), dt.Replicate()
    assert Strategy().batch() == [split, split, dt.Shard(1), whole]
    assert Strategy().batch(sequence=2) == [split, split, dt.Shard(2), whole]
    assert Strategy().batch(sequence=None) == [split, split, whole, whole]


# 32 ranks -----------------------------------------------------------------------------------------


# Of a step, beside those of the tensor parallelism: the model is one segment, kept for the
# backward, and the loss counts its targets. Its reductions: to shards, of the embedding, whose 7
# rows are uneven over tp, by itself; then over replicas, of biases that the first rank of tp adds,
# over tp too.
COLLECTIVES = {
    (1, 1, 32, 1, 1): {
        ("all_gather", "sharding"): 1,
        ("reduce_scatter", "sharding"): 1,
        ("all_reduce", "sharding"): 1,
    },
    (1, 4, 8, 1, 1): {  # four micro-batches, and one sum over the replicas
        ("all_gather", "sharding"): 4,
        ("reduce_scatter", "sharding"): 4,
        ("all_reduce", "dp+sharding"): 4,
        ("all_reduce", "dp"): 1,
    },
    (1, 1, 4, 1, 8): {
        ("all_gather", "sharding"): 1,
        ("reduce_scatter", "sharding"): 2,
        ("all_reduce", "sharding+tp"): 1,  # the loss: the last product stays split over tp
    },
    (1, 4, 2, 1, 4): {
        ("all_gather", "sharding"): 1,
        ("reduce_scatter", "sharding"): 2,
        ("all_reduce", "dp+sharding+tp"): 1,
        ("all_reduce", "dp"): 2,
        ("all_reduce", "dp+tp"): 1,
    },
}


@pytest.mark.parametrize("rank", [0, 13])
@pytest.mark.parametrize(("configs", "expected"), FOUR.values(), ids=FOUR)
def test_32_fake_ranks_place_and_step(configs, expected, rank):
    with fake_world(32, rank=rank), warnings.catch_warnings():
        strategy = Strategy.from_sharding_configs(configs, prefetch=0)
        mesh = strategy.mesh()
        assert (mesh.dim_names, mesh.shape) == (AXES, expected)
        (stage,) = strategy.stages()
        assert (stage.dim_names, stage.shape) == (STAGE_AXES, expected[1:])
        torch.manual_seed(0)
        model = Net(64)
        model, optimizer = strategy.apply(model, torch.optim.SGD, PLAN)
        tp, sharding = expected[4], expected[2]
        up, down = model.blocks[0].up.weight, model.blocks[0].down.weight
        assert up.process_mesh is stage and up.shape == (128, 64)
        assert up.to_local().shape == (128 // tp // sharding, 64)
        assert down.to_local().shape == (64 // sharding, 128 // tp)
        places = strategy.batch()
        batch = data(0).repeat(8, 1)
        with dt.debugging.record_comms() as log:
            for i in range(strategy.accumulate_steps):
                with strategy.accumulate(model, i):
                    loss_of(model, batch, stage, stage, places).backward()
            optimizer.step()
        sent = Counter((r.kind, r.axis) for r in log.records if r.axis != "tp")
        assert sent == COLLECTIVES[expected]


def test_pipelines_of_fake_ranks():
    for rank in (0, 5, 31):
        with fake_world(32, rank=rank):
            strategy = Strategy(pp=4, tp=2, sharding=2)
            stages = strategy.stages()
            assert [stage.ranks for stage in stages] == [
                tuple(range(8 * i, 8 * i + 8)) for i in range(4)
            ]
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
            strategy.apply(model, plan={"*.weight": {"tp": dt.Shard(0)}}, visits=2)
            for i, layer in enumerate(model):
                assert layer.weight.process_mesh is stages[i % 4]
                assert layer.weight.is_initialized == (rank in stages[i % 4].ranks)


@on_ranks(1)
def test_examples_run():
    mesh = dt.init_mesh((1, 1), ("dp", "tp"))
    door = SimpleNamespace(**{**vars(dt), "Strategy": Strategy})
    names = {"torch": torch, "dt": door, "mesh": mesh, "infer": infer}
    shown = [Strategy, infer, *(getattr(f, "__func__", f) for f in vars(Strategy).values())]
    ran = 0
    for thing in shown:
        text = inspect.getdoc(thing) if inspect.isfunction(thing) or thing is Strategy else None
        test = doctest.DocTestParser().get_doctest(text or "", dict(names), str(thing), None, None)
        report: list[str] = []
        doctest.DocTestRunner().run(test, out=report.append)
        assert not report, "".join(report)
        ran += len(test.examples)
    assert ran > 15


def test_the_schedule_says_how_often_stages_are_visited():
    with fake_world(2):
        strategy = Strategy(pp=2, schedule="zbv")
        assert [mesh.ranks for mesh in strategy.visits()] == [(0,), (1,), (1,), (0,)]
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
        strategy.apply(model)
        assert [p.process_mesh.ranks for p in model.parameters()][::2] == [(0,), (1,), (1,), (0,)]
    with pytest.raises(ValueError, match="schedule='x': it is one of 'gpipe', '1f1b'"):
        Strategy(schedule="x")


@pytest.mark.parametrize(
    "name, meant", [("fsdp", "sharding"), ("ddp", "dp"), ("recomput", "recompute")]
)
def test_an_unknown_argument_is_answered_with_the_one_that_is_meant(name, meant):
    with pytest.raises(TypeError, match=rf"no argument '{name}'; did you mean '{meant}'\?"):
        Strategy(**{name: 2})
