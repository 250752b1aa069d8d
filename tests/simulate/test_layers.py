"""FLOPs by layer: forward, backward and what is computed again are of the module that they are of,
under every strategy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor.simulate import simulate
from disttensor.simulate.layer_shares import largest, rolled_up
from disttensor.simulate.layers import OUTSIDE, counterparts, renamed
from tests.simulate.gpt_training import build as build_gpt
from tests.simulate.huggingface_training import build as build_huggingface
from tests.support.part import part

ROWS = 8


def training(model_of, loss=lambda model, x: model(x).sum(), width=4, replay=False):
    def build():
        mesh = dt.init_mesh((2,), ("dp",))
        model = dt.shard_module(model_of(), mesh)
        if replay:
            dt.replay(model)

        def step():
            loss(model, dt.shard_tensor(torch.ones(ROWS, width), mesh, [dt.Shard(0)])).backward()

        return step

    return build


def layers_of(*args, **options):
    report = simulate(training(*args, **options), world=2)
    for kind in report.kinds:
        assert sum(kind.flops_by("layer").values()) == kind.flops
    assert sum(report.share_of_layers().values()) == pytest.approx(1)
    return report.layers


def product(n: int, m: int, grads: int = 2) -> dict[str, int]:
    """Of all rows with a matrix, ``grads`` of whose factors have gradients."""
    flops = 2 * ROWS * n * m
    return {"forward": flops, "backward": grads * flops}


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("replay", [False, True])
def test_the_flops_of_an_mlp_are_those_counted_by_hand(replay) -> None:
    by = {"0": product(4, 6, grads=1), "2": product(6, 3)}
    assert layers_of(mlp, replay=replay) == by


class Mixed(nn.Module):
    """Computes before, between and after modules in it, one of which is in no table."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.w, self.again, self.hidden = nn.Parameter(torch.ones(4, 4)), again, [nn.Identity()]

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)

    def body(self, x):
        first, y = F.linear(x, self.w), self.a(x)
        y = F.linear(self.hidden[0](F.linear(y, self.w) * first), self.w)
        return self.b(y)


@pytest.mark.parametrize("again", [False, True])
def test_what_a_module_computes_around_others_is_its_own(again) -> None:
    def model():
        return nn.Sequential(mlp(), nn.Linear(3, 4), Mixed(again), nn.Linear(4, 2))

    one = product(4, 4)["forward"]  # what was computed last is not computed again
    assert layers_of(model) == {
        "0.0": product(4, 6, grads=1), "0.2": product(6, 3), "1": product(3, 4),
        "2": {"forward": 3 * one, "backward": (6 + 3 * again) * one},
        "2.a": {"forward": one, "backward": (2 + again) * one}, "2.b": product(4, 4),
        "3": product(4, 2),
    }  # fmt: skip


def test_what_no_module_does_is_outside_and_several_models_are_told_apart() -> None:
    def loss(model, x):
        x = x @ torch.ones(4, 4)
        return F.linear(model[2](model[0](x)), model[0].weight[:, :3]).sum()

    outside = {phase: n + product(4, 4, 0)[phase] for phase, n in product(3, 6).items()}
    assert layers_of(mlp, loss) == {
        OUTSIDE: outside, "Linear": product(4, 6, grads=1), "Linear#2": product(6, 3),
    }  # fmt: skip


OPTIONS = "--batch=8 --width=64 --layers=4"


@pytest.fixture(scope="module")
def alone():
    """The report of one process."""
    return simulate(lambda: build_gpt(OPTIONS), world=1)


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    "options",
    part(
        [
            "--tp=4",
            "--sharding=4 --zero=3 --segment-mb=0.02",
            "--sharding=2 --cp=2 --tie",
            "--pp=4 --accumulate=8 --schedule=zero_bubble",
            "--pp=2 --dp=2 --accumulate=4 --schedule=interleaved_1f1b",
            "--pp=2 --tp=2 --accumulate=4 --schedule=zbv",
        ],
        3,
    ),
)
def test_a_strategy_leaves_each_layer_its_flops(options, alone) -> None:
    report = simulate(lambda: build_gpt(f"{OPTIONS} {options}"), world=4)
    assert report.layers == alone.layers
    assert set(alone.share_of_layers(depth=2)) == {*(f"blocks.{i}" for i in range(4)), "head"}


def test_a_model_of_hugging_face_has_its_layers() -> None:
    alone = simulate(lambda: build_huggingface("llama"), world=1)
    report = simulate(lambda: build_huggingface("llama dp=2 tp=2"), world=4)
    assert report.layers == alone.layers
    assert alone.layers["model.layers.1.mlp.up_proj"] == {"forward": 35840, "backward": 71680}


def test_layers_are_rolled_up_and_the_largest_are_shown(tmp_path: Path) -> None:
    report = simulate(training(mlp), world=2)
    table = str(report).partition("FLOP by layer")[2].split("\n\n")[0]
    assert " ".join(table.split()) == "forward backward share 0 384 384 47.1% 2 288 576 52.9%"
    figures = json.loads(report.to_json(tmp_path / "r.json").read_text())
    assert figures["share_of_layers"] == report.share_of_layers()
    (kind,) = figures["kinds"]
    assert kind["flops_by_layer"] == {"0": {"forward": 192, "backward": 192},
                                      "2": {"forward": 144, "backward": 288}}  # fmt: skip
    page = report.to_html(tmp_path / "r.html").read_text()
    assert re.findall(r"<td>([02])</td>.*?([\d.]+)%</td>", page) == [("0", "47.1"), ("2", "52.9")]

    names = "m.blocks.0", "m.blocks.0.up", "m.blocks.0.down", "m.blocks.1.up", "m.head"
    layers = {name: {"forward": 1, "backward": i} for i, name in enumerate(names)}
    assert rolled_up(layers, 2) == {
        "m.blocks": {"forward": 4, "backward": 6}, "m.head": {"forward": 1, "backward": 4},
    }  # fmt: skip
    assert list(largest(layers).items()) == [
        ("m", {"forward": 5, "backward": 10}), ("m.blocks.*", {"forward": 4, "backward": 6}),
        ("m.blocks.*.up", {"forward": 2, "backward": 4}),
        ("m.blocks.*.down", {"forward": 1, "backward": 2}),
        ("m.head", {"forward": 1, "backward": 4}),
    ]  # fmt: skip
    assert list(largest(layers, most=2)) == ["m", "m.blocks.*"]


def test_a_layer_of_another_stage_has_its_name() -> None:
    names = counterparts(["layers.2.norm", "layers.3.mlp"], ["layers.4.norm", "layers.5.mlp"])
    assert names.items() >= {("layers.2", "layers.4"), ("layers.3", "layers.5")}
    assert "layers" not in names
    assert renamed("layers.3.mlp.up", names) == "layers.5.mlp.up"
    assert renamed("layers.2", names) == "layers.4"
    assert renamed("layers.20.mlp", names) == "layers.20.mlp" and renamed("", names) == ""
    with pytest.raises(ValueError, match="longer"):
        counterparts(["layers.2"], ["layers.4", "layers.5"])
