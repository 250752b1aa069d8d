"""segments_of: every parameter in one segment, whose modules are all that need it; sizes, anchors,
names, errors."""

from __future__ import annotations

import doctest
import itertools
import re

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor.fsdp.module_tree import SegmentSpec
from disttensor.fsdp.segment_policy import (
    SegmentByAnchors,
    SegmentBySize,
    SegmentPolicy,
    one_each,
    segments_of,
)
from tests.support.pool import fake_world

KIB = 1 / 1024  # of a MiB


class Block(nn.Module):
    """4 * 36 + 3 * 6 numbers, in children and directly."""

    def __init__(self, direct: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.qkv = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
        self.act = nn.ReLU()
        self.out = nn.Linear(6, 6)
        if direct:
            self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x + self.out(self.act(sum(f(self.norm(x)) for f in self.qkv)))


class GPT(nn.Module):
    def __init__(self, blocks: int = 4, tie: bool = False, direct: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(7, 6)
        self.pos = nn.Embedding(5, 6)
        if direct:
            self.scale = nn.Parameter(torch.ones(6))
            self.extra = nn.ParameterList([torch.ones(6), torch.ones(3)])
        self.blocks = nn.ModuleList(Block(direct) for _ in range(blocks))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.register_buffer("mask", torch.ones(5))
        if tie:
            self.head.weight = self.tok.weight

    def forward(self, x):
        x = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shared_block() -> nn.Module:
    """The same block three times, and its output layer once more elsewhere."""
    net, block = GPT(), Block()
    net.blocks = nn.ModuleList([block, Block(), block, block])
    net.head = block.out
    return net


def tied_blocks() -> nn.Module:
    net = GPT()
    net.blocks[1].out.weight = net.blocks[2].qkv[0].weight
    return net


def lists_only() -> nn.Module:
    return nn.ModuleDict({"a": GPT(2), "b": nn.ModuleList([Block(), nn.ReLU()])})


def transformer(layers: int = 2) -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


MODELS = {
    "gpt": GPT,
    "tied": lambda: GPT(tie=True),
    "direct": lambda: GPT(direct=True),
    "tied blocks": tied_blocks,
    "shared": shared_block,
    "no forward": lists_only,
    "transformer": transformer,
    "one layer": lambda: nn.Linear(3, 3),
    "sequential": lambda: nn.Sequential(*[nn.Linear(5, 5) for _ in range(7)]),
    "empty": nn.ReLU,
    "siblings": lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2, Block()),
}
WAYS = [SegmentBySize(kib * KIB) for kib in (0.001, 0.1, 0.2, 0.5, 1, 2, 4, 1e9)]


def ways_of(net: nn.Module) -> list:
    """Sizes, and some anchors and patterns that the model has."""
    names = [n for n, m in net.named_modules() if n and any(True for _ in m.parameters())]
    flat = [n for n in names if not any(o.startswith(n + ".") for o in names)]
    top = [n for n in names if "." not in n]
    ways = [*WAYS]
    for some in (flat, flat[1::2], flat[-1:], top):
        ways += [SegmentByAnchors(some)] if some else []
    for some in (names, names[::2], top, ["*"] if top else [], flat[1::3]):
        ways += [some] if some else []
    return ways


def titles(module: nn.Module, how) -> list[str]:
    return [spec.name for spec in segments_of(module, how)]


def needs(net: nn.Module) -> dict[int, list[nn.Module]]:
    """For each parameter, modules of which one must be in its SegmentSpec or around what is: its
    holders."""
    found: dict[int, list[nn.Module]] = {}
    for module in net.modules():
        for p in module._parameters.values():
            found.setdefault(id(p), []).append(module)
    return found


def check(net: nn.Module, how) -> list[SegmentSpec]:
    """What holds for any SegmentSpec."""
    specs = segments_of(net, how)
    order = {id(p): i for i, p in enumerate(net.parameters())}
    assert sorted(order) == sorted(id(p) for spec in specs for p in spec.params)
    assert len({spec.name for spec in specs}) == len(specs)
    index = {id(m): i for i, m in enumerate(net.modules())}
    holders = needs(net)
    for spec in specs:
        assert spec.params and spec.modules and spec.name
        assert [order[id(p)] for p in spec.params] == sorted(order[id(p)] for p in spec.params)
        places = [index[id(m)] for m in spec.modules]
        assert places == sorted(set(places))
        for a, b in itertools.permutations(spec.modules, 2):
            assert a not in set(b.modules())
        for module in spec.modules:
            assert module is net or type(module).forward is not nn.Module.forward
        below = {id(m) for module in spec.modules for m in module.modules()}
        for p in spec.params:
            assert all(id(holder) in below for holder in holders[id(p)])
        for module in spec.modules:  # none that needs nothing
            assert {id(p) for p in module.parameters()} & {id(p) for p in spec.params}
    return specs


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_is_in_one_segment_whose_modules_hold_it(model):
    net = MODELS[model]()
    for how in ways_of(net):
        check(net, how)


def nbytes(params) -> int:
    return sum(p.numel() * p.itemsize for p in params)


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_segment_is_within_the_size_or_cannot_be_divided(model, how):
    """More only in one module: what it holds itself, is tied in it, or is held by what never
    runs."""
    net = MODELS[model]()
    holders = needs(net)
    for spec in segments_of(net, how):
        if nbytes(spec.params) > how.megabytes * 2**20:
            (top,) = spec.modules
            for p in spec.params:
                assert (
                    any(m is top or isinstance(m, nn.ParameterList) for m in holders[id(p)])
                    or len(holders[id(p)]) > 1
                    or model in ("shared", "siblings", "transformer")
                )


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_segments_are_as_full_as_they_can_be(count):
    net = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(7)])  # 1 KiB each
    sizes = [len(spec.params) for spec in segments_of(net, SegmentBySize(count * KIB))]
    assert sizes == [count] * (7 // count) + [7 % count] * (7 % count > 0)


def test_small_modules_around_a_large_one_do_not_share_a_segment():
    net = nn.Sequential(*[nn.Linear(16, n, bias=False) for n in (16, 64, 16)])  # 1, 4 and 1 KiB
    assert titles(net, SegmentBySize(3 * KIB)) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("kib", "expected"),
    [
        (9, ["GPT"]),
        (1.5, ["tok .. blocks.0", "blocks.1 .. blocks.2", "blocks.3 .. head"]),
        (0.66, ["tok .. pos", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm .. head"]),
    ],
)
def test_sizes_of_a_gpt(kib, expected):
    """Blocks of 648 bytes (4 * 36 + 18 numbers), embeddings of 168 and 120, norm 48, head 168."""
    assert titles(GPT(), SegmentBySize(kib * KIB)) == expected


def test_a_module_of_exactly_the_size_is_one_unit():
    assert titles(Block(), SegmentBySize(162 * 4 / 2**20)) == ["Block"]
    assert len(segments_of(Block(), SegmentBySize(161 * 4 / 2**20))) == 2


def test_a_tied_weight_counts_once():
    net = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)])
    net[1].weight = net[0].weight
    assert titles(net, SegmentBySize(2 * KIB)) == ["Sequential"]
    assert titles(net, SegmentBySize(1.9 * KIB)) == ["0 .. 1", "2"]


def test_small_modules_of_different_parents_share_a_segment():
    got = titles(GPT(2), SegmentBySize(0.5 * KIB))
    assert got == [
        "tok .. blocks.0.qkv.0",
        "blocks.0.qkv.1 .. blocks.1.norm",
        "blocks.1.qkv.0 .. blocks.1.qkv.2",
        "blocks.1.out .. head",
    ]


def test_what_a_divided_module_holds_itself_is_a_segment_of_that_module():
    net = GPT(2, direct=True)
    specs = {spec.name: spec for spec in segments_of(net, SegmentBySize(0.5 * KIB))}
    root, block = specs["GPT"], specs["blocks.0"]
    assert root.modules == (net,) and block.modules == (net.blocks[0],)
    assert [tuple(p.shape) for p in root.params] == [(6,), (6,), (3,)]  # with the ParameterList
    assert len(block.params) == 1 and block.params[0] is net.blocks[0].scale


def test_tied_weights_are_in_the_lowest_module_around_them():
    net = GPT(2, tie=True)
    specs = segments_of(net, SegmentBySize(0.5 * KIB))
    assert specs[0].name == "GPT" and [id(p) for p in specs[0].params] == [id(net.tok.weight)]
    assert titles(net, SegmentBySize(8 * KIB)) == ["GPT"]
    block = net.blocks[0]
    block.qkv[0].weight = block.qkv[2].weight
    (inner,) = (c for c in segments_of(net, SegmentBySize(0.2 * KIB)) if c.name == "blocks.0")
    assert inner.modules == (block,) and len(inner.params) == 1


def test_what_only_a_module_without_forward_has_in_common_is_needed_by_the_one_around_it():
    net = tied_blocks()
    spec = segments_of(net, SegmentBySize(0.8 * KIB))[0]
    assert spec.modules == (net,) and [id(p) for p in spec.params] == [id(net.blocks[1].out.weight)]


@pytest.mark.parametrize("how", [SegmentBySize(0.8 * KIB), SegmentByAnchors(["norm"]), ["norm"]])
def test_a_module_in_several_places_is_tied(how):
    net = shared_block()
    spec = next(c for c in segments_of(net, how) if c.modules == (net,))
    assert {id(p) for p in net.blocks[0].parameters()} <= {id(p) for p in spec.params}


def test_a_second_place_beside_a_module_around_the_first_is_no_module_of_the_segment():
    inner = nn.Linear(3, 3)
    net = nn.Sequential(nn.Sequential(inner, nn.Linear(3, 3)), inner, nn.Linear(9, 9))
    specs = check(net, SegmentByAnchors(["2"]))
    assert [spec.name for spec in specs] == ["Sequential", "0", "2"]


def test_children_of_attention_never_run():
    """nn.MultiheadAttention reads out_proj.weight: a hook of out_proj would gather nothing."""
    net = transformer()
    for how in (
        *WAYS,
        ["layers.*.self_attn.out_proj"],
        SegmentByAnchors(["layers.1.self_attn.out_proj"]),
    ):
        for spec in segments_of(net, how):
            assert not any(
                m is layer.self_attn.out_proj for m in spec.modules for layer in net.layers
            )
        check(net, how)


def test_nor_do_their_children():
    net = nn.MultiheadAttention(4, 2)
    net.out_proj = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for how in (SegmentBySize(1e-6), ["out_proj.1"]):
        assert all(spec.modules == (net,) for spec in check(net, how))


def test_an_anchor_that_only_holds_parameters_begins_nothing_later():
    net = GPT(2, direct=True)
    got = segments_of(net, SegmentByAnchors(["extra", "blocks.0"]))
    assert [spec.name for spec in got] == ["GPT", "tok .. pos", "blocks.0 .. head"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["tok"], ["tok .. head"]),
        (["pos"], ["tok", "pos .. head"]),
        (["blocks.2", "blocks.1"], ["tok .. blocks.0", "blocks.1", "blocks.2 .. head"]),
        (["blocks"], ["tok .. pos", "blocks.0 .. head"]),
        (["blocks.0", "norm"], ["tok .. pos", "blocks.0 .. blocks.3", "norm .. head"]),
        (["blocks.1.qkv.1"], ["tok .. blocks.1.qkv.0", "blocks.1.qkv.1 .. head"]),
        ([""], ["GPT"]),
    ],
)
def test_a_segment_begins_at_each_anchor(names, expected):
    assert titles(GPT(), SegmentByAnchors(names)) == expected


def test_modules_around_anchors_keep_what_they_hold():
    net = GPT(2, direct=True)
    got = segments_of(net, SegmentByAnchors(["blocks.0.out", "norm"]))
    assert [spec.name for spec in got] == [
        "GPT",
        "tok .. blocks.0.qkv.2",
        "blocks.0",
        "blocks.0.out .. blocks.1",
        "norm .. head",
    ]
    assert [len(spec.params) for spec in got] == [3, 7, 1, 10, 3]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["blocks.*"], ["GPT", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        (["blocks.[12]", "tok"], ["GPT", "tok", "blocks.1", "blocks.2"]),
        (["blocks"], ["GPT", "blocks"]),
        (["blocks", "blocks.1.out"], ["GPT", "blocks", "blocks.1.out"]),
        (["*"], ["tok", "pos", "blocks", "norm", "head"]),
        (["*", "tok"], ["tok", "pos", "blocks", "norm", "head"]),
        ([""], ["GPT"]),
    ],
)
def test_each_named_module_is_a_segment(patterns, expected):
    assert titles(GPT(), patterns) == expected
    assert titles(GPT(), tuple(patterns)) == expected


def test_a_named_module_is_gathered_whole():
    net = GPT()
    modules = [spec.modules for spec in segments_of(net, ["blocks.*"])]
    assert modules == [(net,), *((block,) for block in net.blocks)]


def test_a_named_module_without_forward_is_what_runs_in_it():
    net = GPT(3, direct=True)
    got = {spec.name: spec for spec in segments_of(net, ["blocks", "extra", "blocks.1"])}
    assert got["GPT"].modules == (net,)
    assert got["blocks"].modules == (net.blocks[0], net.blocks[2])
    assert got["blocks.1"].modules == (net.blocks[1],)
    assert got["extra"].modules == (net,) and len(got["extra"].params) == 2
    assert len(got["GPT"].params) == 1 + 2 + 2 + 1


def test_a_tie_between_named_modules_is_in_the_named_one_around_them():
    net = tied_blocks()
    got = {spec.name: spec for spec in check(net, ["blocks", "blocks.*"])}
    assert got["blocks"].modules == (net,) and len(got["blocks"].params) == 1


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda: SegmentBySize(0), "SegmentBySize: megabytes=0"),
        (lambda: SegmentBySize(-1.0), "SegmentBySize: megabytes=-1.0"),
        (lambda: SegmentBySize(float("nan")), "SegmentBySize: megabytes=nan"),
        (lambda: SegmentByAnchors([]), "SegmentByAnchors: the list of names is empty"),
        (lambda: SegmentByAnchors(["a", "b", "a"]), "SegmentByAnchors: 'a' is given twice"),
        (lambda: SegmentByAnchors(["normm"]), "'normm' is no module of GPT; there are norm"),
        (lambda: SegmentByAnchors(["zzz"]), "'zzz' is no module of GPT; there are tok, pos"),
        (lambda: SegmentByAnchors(["tok.weight"]), "'tok.weight' is no module of GPT"),
        (lambda: SegmentByAnchors(["blocks.0.act"]), "'blocks.0.act' has no parameters"),
        (
            lambda: SegmentByAnchors(["blocks.1.out", "blocks.1"]),
            "'blocks.1.out' is inside of 'blocks.1'",
        ),
        (list, "segments: the list of names is empty"),
        (lambda: ["block.*"], "'block.*' is no module of GPT; there are blocks"),
        (lambda: ["tok", "tok"], "segments: 'tok' is given twice"),
        (lambda: ["tok", ["norm", "tok"]], "segments: 'tok' is given twice"),
        (lambda: ["tok", []], "segments: the list [] in it is empty"),
        (lambda: [["blocks.0", "tok"], ["blocks.*"]], "'blocks.0' is in two lists of modules"),
        (lambda: [["tok", "block.*"]], "'block.*' is no module of GPT; there are blocks"),
        (lambda: ["*.*.*.*.*"], "is no module of GPT"),
    ],
)
def test_what_makes_no_segments_is_said(how, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        segments_of(GPT(), how())


def test_a_list_of_names_is_one_segment():
    net = GPT(4)
    a, b, c, d = net.blocks
    got = {s.name: s for s in check(net, [("norm", "head"), "blocks.*", ["blocks.1", "blocks.3"]])}
    assert got["norm .. head"].modules == (net.norm, net.head)
    assert got["blocks.1 .. blocks.3"].modules == (b, d)
    assert [got[f"blocks.{i}"].modules for i in (0, 2)] == [(a,), (c,)]
    assert got["GPT"].modules == (net,) and len(got) == 5
    inside = {s.name: s for s in check(net, [["blocks.0", "blocks.0.out", "blocks.0.act"]])}
    assert inside["blocks.0"].modules == (a,) and len(inside) == 2
    assert [s.name for s in check(net, ["blocks.*.act"])] == ["GPT"]  # without parameters: none


@pytest.mark.parametrize("how", ["blocks.*", None, 3, [1], ["tok", None]])
def test_names_are_a_list_of_names(how):
    with pytest.raises(TypeError, match="segments: "):
        segments_of(GPT(), how)
    with pytest.raises(TypeError, match="SegmentByAnchors: "):
        SegmentByAnchors(how)


def test_parameters_of_different_meshes_are_in_different_segments():
    with fake_world(4):
        first, second = dt.ProcessMesh([0, 1], ("dp",)), dt.ProcessMesh([2, 3], ("dp",))
        net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
        dt.shard_module(net[:2], first)
        dt.shard_module(net[2:4], second)
        specs = check(net, SegmentBySize(1))
        assert [spec.name for spec in specs] == [
            "Sequential on ProcessMesh(dp=2)",
            "Sequential on ProcessMesh(dp=2, ranks=[2, 3])",
            "Sequential on no mesh",
        ]
        specs = check(net, SegmentByAnchors(["0"]))
        assert [spec.modules for spec in specs] == [(net[0], net[1]), (net[2], net[3]), (net[4],)]


@pytest.mark.parametrize("rank", range(4))
def test_all_ranks_find_the_same_segments(rank):
    """Uneven pieces, and nothing at all on rank 3, which is outside: sizes are those of the first
    rank."""
    with fake_world(4, rank):
        mesh = dt.ProcessMesh([0, 1, 2], ("dp",))
        net = nn.Sequential(*[nn.Linear(7, 4, bias=False) for _ in range(6)])
        dt.shard_module(net, mesh, {"*.weight": [dt.Shard(0)]})  # rows 2, 2, 0
        assert titles(net, SegmentBySize(2 * 2 * 7 * 4 / 2**20)) == ["0 .. 1", "2 .. 3", "4 .. 5"]


def test_the_tree_is_walked_once():
    """Modules that stand twice in each other 40 levels deep: 2**40 paths."""
    net: nn.Module = nn.Linear(2, 2)
    for _ in range(40):
        net = nn.Sequential(net, net)
    assert [len(spec.params) for spec in segments_of(net, SegmentBySize(1e-9))] == [2]


@pytest.mark.parametrize("way", [SegmentBySize, SegmentByAnchors])
def test_examples(way):
    test = doctest.DocTestParser().get_doctest(way.__doc__, {"dt": dt}, way.__name__, None, None)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


class ByClass(SegmentPolicy):
    """A policy of its own file: nothing else knows of it."""

    def __init__(self, kind):
        self.kind = kind

    def assign(self, nodes):
        one_each(nodes, {node for node in nodes if isinstance(node.module, self.kind)})


def test_a_new_policy_is_one_class():
    net = GPT()
    specs = check(net, ByClass(Block))
    assert [spec.name for spec in specs] == [
        "GPT",
        *[f"blocks.{i}" for i in range(len(net.blocks))],
    ]
    assert all(spec.modules == (block,) for spec, block in zip(specs[1:], net.blocks, strict=True))
