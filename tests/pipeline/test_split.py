"""pipeline.split: ordinary models on stages give the loss and the gradients of one process, without
a change to a forward."""

from __future__ import annotations

import copy
import doctest
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import pipeline
from disttensor.pipeline.partition import divide_layers, elements
from disttensor.simulate.layer_times import layer_times
from tests.support.oracle import randn
from tests.support.pool import fake_world, on_ranks
from tests.support.stages import stage_meshes


class Block(nn.Module):
    """Attention and MLP; what it is given beside x comes nested."""

    def __init__(self, width: int, device: str | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, device=device)
        self.qkv = nn.ModuleList(nn.Linear(width, width, device=device) for _ in range(3))
        self.out = nn.Linear(width, width, device=device)
        self.up = nn.Linear(width, 2 * width, device=device)
        self.down = nn.Linear(2 * width, width, device=device)

    def forward(self, x, extra, *, scale):
        h = self.norm(x + (extra["skip"] if type(extra) is dict else extra.skip)[0])
        q, k, v = (f(h).unflatten(-1, (2, -1)).transpose(1, 2) for f in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2)) * scale
        return x + self.down(F.gelu(self.up(x)))


@dataclass(frozen=True)
class Extra:
    skip: list[Any]


class GPT(nn.Module):
    """Every block sees the embedding too (a skip connection over all stages); the head may be tied
    to the embedding."""

    def __init__(
        self, blocks: int = 3, tie: bool = False, skip: bool = True, device: str | None = None,
        pack: Callable[..., Any] = dict,
    ) -> None:  # fmt: skip
        super().__init__()
        self.skip, self.pack = skip, pack
        self.tok = nn.Embedding(7, 6, device=device)
        self.pos = nn.Embedding(5, 6, device=device)
        self.blocks = nn.ModuleList(Block(6, device) for _ in range(blocks))
        self.norm = nn.LayerNorm(6, device=device)
        self.head = nn.Linear(6, 7, bias=False, device=device)
        self.register_buffer("scale", torch.tensor(0.5))
        if tie:
            self.head.weight = self.tok.weight

    def forward(self, tokens):
        x = first = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, self.pack(skip=[first if self.skip else x, None]), scale=self.scale)
        return self.head(self.norm(x))


NAMES = ["tok", "pos", "blocks.*", "norm", "head"]
PLAN = {
    "tok.weight": [dt.Shard(0)],
    "blocks.*.qkv.*": [dt.Shard(0)],
    "blocks.*.out.weight": [dt.Shard(1)],
    "blocks.*.up.*": [dt.Shard(0)],
    "blocks.*.down.weight": [dt.Shard(1)],
}


def tokens(rows: int, seed: int) -> torch.Tensor:
    return torch.randint(7, (rows, 6), generator=torch.Generator().manual_seed(seed))


def model(**how) -> GPT:
    torch.manual_seed(1)
    return GPT(**how).double()


def step_of(net, stages):
    """The loss of one micro-batch. ``stages`` None: one process."""

    def step(batch):
        inputs, targets = batch[:, :-1], batch[:, 1:]
        if stages is not None:
            inputs = dt.shard_tensor(inputs, stages[0])
            targets = dt.shard_tensor(targets, stages[-1])
        return F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten())

    return step


def whole(x):
    """Value on every rank. A gradient that this rank may not have comes from its mesh."""
    return dt.broadcast_value(x)


def check(net, plain, stages, schedule=None):
    """Losses, gradients and the step of an optimizer agree."""
    data = [tokens(2 + i % 2, seed=i) for i in range(3)]
    expected = []
    for batch in data:
        expected.append(step_of(plain, None)(batch))
        expected[-1].backward()
    step = step_of(net, stages)
    if schedule is None:
        losses = [step(batch) for batch in data]
        for loss in losses:
            loss.backward()
    else:
        losses = pipeline.run(step, data, schedule, stages=stages)
    for loss, e in zip(losses, expected, strict=True):
        torch.testing.assert_close(whole(loss), e.detach(), rtol=1e-10, atol=1e-12)
    ours, theirs = dict(net.named_parameters()), dict(plain.named_parameters())
    assert list(ours) == list(theirs) and list(net.state_dict()) == list(plain.state_dict())
    for name, p in ours.items():
        assert isinstance(p, dt.DistTensor) and isinstance(p, nn.Parameter)
        if not p.is_initialized:
            assert p.grad is None
            continue
        torch.testing.assert_close(
            p.grad.full_tensor(),
            theirs[name].grad,
            rtol=1e-9,
            atol=1e-11,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    for m in (net, plain):
        torch.optim.AdamW(m.parameters(), lr=0.1).step()
    values = {name: whole(p) for name, p in ours.items()}
    for name, value in values.items():
        torch.testing.assert_close(value, theirs[name].detach(), rtol=1e-8, atol=1e-9)


SCHEDULES = [None, "gpipe", "1f1b"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tie", [False, True])
@on_ranks(2)
def test_a_gpt_on_two_stages(schedule, tie):
    net, stages = model(tie=tie), stage_meshes()
    placed = pipeline.split(NAMES, stages, of=net)
    assert [name for name, _ in placed] == [
        "tok",
        "pos",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "norm",
        "head",
    ]
    assert placed.counts == (4, 3) and placed.stages == tuple(stages)
    check(net, model(tie=tie), stages, schedule)


@pytest.mark.parametrize("schedule", [*SCHEDULES, "interleaved_1f1b"])
@on_ranks(2)
def test_what_layers_are_given_in_a_dataclass_comes_to_their_mesh(schedule):
    net, (a, b) = model(pack=Extra), stage_meshes()
    visits = [a, b, a, b] if schedule == "interleaved_1f1b" else [a, b]
    pipeline.split(NAMES, visits, of=net)
    check(net, model(pack=Extra), visits, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tie", [False, True])
@on_ranks(4)
def test_a_gpt_on_two_stages_of_two(schedule, tie):
    net, stages = model(tie=tie), stage_meshes()
    pipeline.split(NAMES, stages, PLAN, of=net, counts=[3, 4])
    assert net.blocks[1].up.weight.placements == (dt.Shard(0),)
    assert net.blocks[1].up.weight.process_mesh is stages[1]
    check(net, model(tie=tie), stages, schedule)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b"])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@on_ranks(2)
def test_interleaved(schedule, tie, skip):
    net, stages = model(tie=tie, skip=skip), stage_meshes() * 2
    placed = pipeline.split(NAMES, stages, of=net)
    assert placed.counts == (2, 2, 2, 1)
    assert net.blocks[1].up.weight.process_mesh is stages[1]
    assert net.blocks[2].up.weight.process_mesh is stages[0]
    check(net, model(tie=tie, skip=skip), stages, schedule)


@pytest.mark.filterwarnings("ignore:pipeline.run. stage . could not defer")
@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@on_ranks(2)
def test_a_visit_begins_in_a_region_that_is_computed_again(schedule):
    first, second = stage_meshes()
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(5, 5) for _ in range(4)]).double()
    for ends in ([1, 2, 3, 4], [2, 4], [1, 3, 4], [4]):
        net = copy.deepcopy(plain)
        stages = [first, second, second, first]
        pipeline.split(net, stages)

        def step(module, x, ends=ends):
            for start, end in itertools.pairwise([0, *ends]):
                x = checkpoint(lambda x, a=start, b=end: module[a:b](x), x, use_reentrant=False)
            return x.square().sum()

        data = [randn(2 + i, 5, seed=i) for i in range(3)]
        pipeline.run(
            lambda x, net=net: step(net, dt.shard_tensor(x, first)), data, schedule, stages=stages
        )
        plain.zero_grad()
        for x in data:
            step(plain, x).backward()
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            if p.is_initialized:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@pytest.mark.parametrize("kind", [1, 3])
@on_ranks(4)
def test_stages_of_other_sizes(kind):
    net, stages = model(), stage_meshes(kind)
    pipeline.split(NAMES, stages, of=net)
    check(net, model(), stages, "1f1b")


@on_ranks(4)
def test_stages_with_other_axes():
    """Between meshes of one and of two axes a value is whole."""
    stages = [dt.ProcessMesh([[0, 1]], ("dp", "tp")), dt.ProcessMesh([2, 3], ("tp",))]
    net = model()
    pipeline.split(NAMES, stages, {"blocks.2.up.weight": [dt.Shard(0)]}, of=net)
    check(net, model(), stages)


@on_ranks(2)
def test_a_sequential():
    torch.manual_seed(0)
    layers = [nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)]
    plain = nn.Sequential(*layers).double()
    net, stages = copy.deepcopy(plain), stage_meshes()
    placed = pipeline.split(net, stages, {"4.weight": [dt.Shard(1)]})
    assert [mesh for _, mesh in placed] == [stages[0]] * 3 + [stages[1]] * 2
    assert repr(placed) == (
        "stage 0 on ProcessMesh(tp=1): 0, 1, 2\nstage 1 on ProcessMesh(tp=1, ranks=[1]): 3, 4"
    )
    x = randn(4, 6)
    for module, out in ((net, net(x)), (plain, plain(x))):
        out.square().sum().backward()
        assert out.shape == (4, 3) and len(list(module.parameters())) == 6
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        if p.is_initialized:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    twin = copy.deepcopy(net)  # hooks and all
    a, b = whole(twin(x)), whole(net(x))
    assert a.equal(b) and twin[0].weight is not net[0].weight


@on_ranks(2)
def test_meta_modules_start_as_one_process_does():
    stages = stage_meshes()
    starts = []
    for on, device in ((None, None), (stages, "meta")):
        dt.manual_seed(3)
        net = GPT(blocks=2, tie=True, device=device)
        net.scale = torch.tensor(0.5)
        if on is None:
            one = dt.ProcessMesh(range(2), ("all",))
            with torch.device("meta"):
                net = GPT(blocks=2, tie=True)
            net.scale = torch.tensor(0.5)
            dt.shard_module(net, one)
        else:
            pipeline.split(NAMES, on, of=net)
            assert not isinstance(net.scale, dt.DistTensor)
        starts.append({name: whole(p) for name, p in net.named_parameters()})
    for name, value in starts[0].items():
        assert value.equal(starts[1][name]), name


@on_ranks(2)
def test_meta_modules_with_an_init_of_their_own():
    net, stages = GPT(device="meta"), stage_meshes()
    net.scale = torch.tensor(0.5)

    def init(module):
        for p in module.parameters(recurse=False):
            nn.init.constant_(p, 0.25)

    pipeline.split(NAMES, stages, of=net, init=init)
    assert all(whole(p).eq(0.25).all() for p in net.parameters())


@on_ranks(2)
def test_a_function_as_plan_and_ties():
    """What a function places under one name lies so under the other too."""
    net, stages = model(tie=True), stage_meshes()
    seen = []

    def plan(name, module, mesh):
        seen.append((name, mesh))
        if isinstance(module, nn.Embedding):
            module.weight = nn.Parameter(
                dt.shard_tensor(module.weight.detach(), mesh, [dt.Shard(1)])
            )

    pipeline.split(NAMES, stages, plan, of=net)
    assert ("blocks.2.up", stages[1]) in seen and ("tok", stages[0]) in seen
    assert net.head.weight is net.tok.weight and net.tok.weight.placements == (dt.Shard(1),)
    check(net, model(tie=True), stages)


class Deep(GPT):
    """The tie is deep inside the last layer, and a norm inside two layers is one module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = self.blocks[0].norm
        self.head = nn.ModuleDict({"last": nn.Sequential(self.norm, self.head)})
        self.head["last"][1].weight = self.tok.weight

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, {"skip": [x, None]}, scale=self.scale)
        return self.head["last"](x)


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(4)
def test_a_tie_deep_inside_a_layer_and_a_module_in_two_layers(schedule):
    stages = stage_meshes(1)
    torch.manual_seed(1)
    plain = Deep().double()
    net = copy.deepcopy(plain)
    pipeline.split(["tok", "pos", "blocks", "head.last"], stages, of=net)
    assert net.head["last"][1].weight.process_mesh is stages[0]
    check(net, plain, stages, schedule)


@on_ranks(2)
def test_a_borrowed_parameter_is_borrowed_for_the_forward_only():
    net, stages = model(tie=True), stage_meshes()
    pipeline.split(NAMES, stages, of=net)
    seen = []
    net.head.register_forward_hook(lambda m, args, out: seen.append(m.weight.process_mesh))
    step_of(net, stages)(tokens(2, 0))
    assert len(seen) == 1
    assert net.head.weight is net.tok.weight and net.head.weight.process_mesh is stages[0]
    with pytest.raises(RuntimeError):
        net.head(dt.shard_tensor(randn(2, 5), stages[1]))  # a width that does not fit
    assert net.head.weight is net.tok.weight
    nn.utils.parametrize.register_parametrization(net.head, "weight", nn.Identity(), unsafe=True)
    with pytest.raises(RuntimeError, match=r"'weight' of a ParametrizedLinear, .*before pipeline"):
        net.head(dt.shard_tensor(randn(2, 6), stages[1]))


@on_ranks(2)
def test_nothing_is_sent_where_all_is_in_its_place():
    net, stages = model(), stage_meshes()
    pipeline.split(NAMES, [stages[0], stages[0]], of=net)
    with dt.debugging.record_comms() as comms:
        loss = step_of(net, [stages[0]])(tokens(2, 0))
        loss.backward()
    assert len(comms) == 0
    plain = model()
    want = step_of(plain, None)(tokens(2, 0))
    want.backward()
    if loss.is_initialized:
        torch.testing.assert_close(loss.full_tensor(), want)
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def test_what_cannot_be_split():
    with fake_world(4):
        a, b = dt.ProcessMesh([0, 1], ("tp",)), dt.ProcessMesh([2, 3], ("tp",))
        net = GPT()
        before = {name: id(p) for name, p in net.named_parameters()}
        three = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        for modules, stages, how, words in (
            (three[:1], [a, b], {}, "1 layers on 2 stages"),
            (three, [], {}, "3 layers on 0 stages"),
            (
                three,
                [a, b],
                {"counts": [3, 0]},
                "counts=[3, 0]: one number from 1 up for each of 2 stages, 3 together",
            ),
            (three, [a, b], {"counts": [1, 1]}, "3 together"),
            (three, [a, 1], {}, "got 1"),
            ([three[0], three[0]], [a, b], {}, "'0' is listed twice"),
            (
                ["tok", "blocks.*", "blocks.0", "head"],
                [a, b],
                {"of": net},
                "'blocks.0' is listed twice",
            ),
            (
                ["tok", "blocks", "blocks.0.up"],
                [a, b],
                {"of": net},
                "'blocks.0.up' is listed, and is a part of 'blocks.0'",
            ),
            (
                ["tok", "block.*"],
                [a, b],
                {"of": net},
                "'block.*' matches no module of GPT; there are blocks",
            ),
            (
                ["tok", "blocks.*", "norm", "head"],
                [a, b],
                {"of": net},
                "pos.weight: in no layer that is listed",
            ),
            (["tok", "pos"], [a, b], {}, "Give of=model"),
            (net, [a, b], {}, "the order in which GPT runs its layers is not known"),
            ([3, "tok"], [a, b], {"of": net}, "3 is neither a module nor a name"),
            ([nn.Tanh(), "tok"], [a, b], {"of": net}, "a listed Tanh is not part of the model"),
            (
                [*NAMES[:2], "blocks.*.qkv.*", "blocks.*.norm"],
                [a, b],
                {"of": net},
                "blocks.0.out.weight, blocks.0.out.bias",
            ),
            (
                [net.tok, net.blocks[0].qkv, "head"],
                [a, b],
                {"of": net},
                "'blocks.0.qkv', a ModuleList, has no forward",
            ),
            (
                NAMES,
                [a, b],
                {"of": net, "plan": {"block": [dt.Shard(0)]}},
                "'block' matches no parameter",
            ),
            (
                NAMES,
                [a, b],
                {"of": net, "plan": {"head": [dt.Shard(0), dt.Shard(0)]}},
                "plan entry 'head'",
            ),
        ):
            with pytest.raises((TypeError, ValueError), match=re.escape(words)):
                pipeline.split(modules, stages, **how)
        assert before == {name: id(p) for name, p in net.named_parameters()}
        assert not any(m._forward_pre_hooks for m in net.modules())
        pipeline.split(NAMES, [a, b], of=net)
        with pytest.raises(ValueError, match="'tok' is on a stage already"):
            pipeline.split(NAMES, [a, b], of=net)
        placed = dt.shard_module(GPT(), a)
        with pytest.raises(ValueError, match=r"lies on ProcessMesh.* already"):
            pipeline.split(NAMES, [a, b], of=placed)


@on_ranks(1)
def test_examples_run():
    mesh = dt.init_mesh((1, 1), ("dp", "tp"))
    for thing in (pipeline.split, pipeline.Split, pipeline.visits):
        names = {"torch": torch, "dt": dt, "pipeline": pipeline, "mesh": mesh}
        test = doctest.DocTestParser().get_doctest(thing.__doc__, names, thing.__name__, None, None)
        report: list[str] = []
        doctest.DocTestRunner().run(test, out=report.append)
        assert test.examples and not report, "".join(report)


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_balanced_stages_are_the_best_of_all_cuts(number: int) -> None:
    sizes = 40, 3, 17, 17, 5, 29, 11
    layers = [(str(i), nn.Linear(1, n, bias=False)) for i, n in enumerate(sizes)]
    cuts = itertools.combinations(range(1, len(sizes)), number - 1)
    every = [[j - i for i, j in itertools.pairwise((0, *cut, len(sizes)))] for cut in cuts]

    def fullest(counts: list[int]) -> int:
        left = iter(sizes)
        return max(sum(itertools.islice(left, n)) for n in counts)

    counts = divide_layers(len(layers), number, elements(layers))
    assert counts in every and fullest(counts) == min(map(fullest, every))


def test_a_tied_parameter_counts_once() -> None:
    first, middle, last = (nn.Linear(4, 4, bias=False) for _ in range(3))
    last.weight = first.weight
    named = [("0", first), ("1", middle), ("2", last)]
    assert divide_layers(3, 2, elements(named)) == [1, 2]


def test_stages_of_equal_time_and_of_given_costs() -> None:
    """Rows of an embedding are looked up; the same matrix as a head is multiplied with."""
    embedding, head = nn.Embedding(40, 4), nn.Linear(4, 40, bias=False)
    head.weight = embedding.weight
    blocks = [nn.Linear(4, 16) for _ in range(4)]
    named = [(str(i), m) for i, m in enumerate([embedding, *blocks, head])]
    costs = layer_times(named)
    assert 0 < costs[0] < costs[1] == costs[4] < costs[5]
    assert divide_layers(6, 2, costs) == [4, 2] and divide_layers(6, 3, costs) == [3, 2, 1]
    assert divide_layers(6, 2, elements(named)) == [2, 4]
    assert divide_layers(6, 2, [5, 1, 1, 1, 1, 1]) == [1, 5]
    model = nn.Sequential(*(m for _, m in named))
    with fake_world(2):
        meshes = [dt.ProcessMesh([rank], ("dp",)) for rank in range(2)]
        assert pipeline.split(model, meshes, balance="time").counts == (4, 2)


class Heavy(nn.Module):
    """No parameters, and far more to compute than a layer with some."""

    def forward(self, x):
        for _ in range(20):
            x = (x @ x.mT) @ x
        return x


def test_a_sample_says_what_takes_time_without_a_matrix() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)], Heavy())
    model.to("meta")
    with fake_world(2):
        meshes = [dt.ProcessMesh([rank], ("dp",)) for rank in range(2)]
        cuts = {}
        for sample in (None, (torch.ones(2, 2048, 64),), {"input": torch.ones(2, 2048, 64)}):
            copied = copy.deepcopy(model)
            split = pipeline.split(copied, meshes, balance="time", sample=sample, init=_nothing)
            cuts[type(sample)] = split.counts
        assert cuts == {type(None): (1, 3), tuple: (3, 1), dict: (3, 1)}
        with pytest.raises(ValueError, match=r"does not run .* of the shapes in sample"):
            pipeline.split(model, meshes, balance="time", sample=(torch.ones(3),))
        with pytest.raises(TypeError, match="a tuple of its arguments"):
            pipeline.split(model, meshes, balance="time", sample=3)
        with pytest.raises(ValueError, match="sample is what balance='time'"):
            pipeline.split(model, meshes, sample=(torch.ones(3),))


def _nothing(module: nn.Module) -> None:
    pass
