"""What a rank pays for the stages that it is not in: calls, modules, and a whole model against its
own layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from cases import ONE, Row, Target
from models import BATCH, BLOCK_WIDTH, SEQ, Block
from sides import PLAIN, THEIRS, WORLD, Plain, dt
from timing import Call
from torch import nn

from disttensor import pipeline

LAYERS, OWN = 96, 3  # layers of the model; the stage that this rank is
ORDER = [(i - OWN) % WORLD for i in range(WORLD)]  # the rank of each stage


def outside(call: Callable[..., Any], *shapes: tuple[int, ...], leaves: int = 0) -> Any:
    """A call on tensors of a stage where this rank is not, against a plain torch.add. The last
    ``leaves`` are parameters; then the first came from another stage, and requires grad."""

    def build(side: Plain) -> Call | None:
        if side.name == THEIRS:
            return None
        if side.name == PLAIN:
            return partial(torch.add, torch.randn(8, 8), torch.randn(8, 8))
        mesh = dt.ProcessMesh([1], ("x",))
        tensors = [dt.shard_tensor(torch.randn(*shape), mesh) for shape in shapes]
        if leaves:
            tensors[0] = dt.reshard(_here(*shapes[0]), mesh)
            for leaf in tensors[len(tensors) - leaves :]:
                leaf.requires_grad_()
        return partial(call, *tensors)

    return build


def _here(*shape: int) -> Any:
    mesh = dt.ProcessMesh([0], ("x",))
    return dt.shard_tensor(torch.randn(*shape), mesh, requires_grad=True) * 1.0


def _attention(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def reshard_elsewhere(side: Plain) -> Call | None:
    """From one stage to another, where this rank is in neither."""
    if side.name in (PLAIN, THEIRS):
        return outside(torch.add)(side)
    another = dt.ProcessMesh([2], ("x",))
    return outside(lambda x: dt.reshard(x, another, [dt.Replicate()]), (8, 8))(side)


def module(side: Plain) -> Call | None:
    """A transformer block whose parameters are elsewhere, against a plain torch.add."""
    if side.name in (PLAIN, THEIRS):
        return outside(torch.add)(side)
    mesh = dt.ProcessMesh([1], ("x",))
    block = pipeline.skip(dt.shard_module(Block(), mesh))
    return partial(block, dt.shard_tensor(torch.randn(BATCH, SEQ, BLOCK_WIDTH), mesh))


def model(by_layer: bool) -> Callable[[Plain], Call | None]:
    """Forward and backward of 96 blocks over 8 stages on one rank; "plain" are its own 12 alone.

    Each stage is a module, or (``by_layer``) each block is, as ``pipeline.split`` does it.
    """

    def build(side: Plain) -> Call | None:
        if side.name == THEIRS:
            return None
        per_stage = LAYERS // WORLD
        meshes = [dt.ProcessMesh([rank], ("x",)) for rank in ORDER]
        if side.name == PLAIN:
            meshes = meshes[OWN : OWN + 1]
        stages = [nn.Sequential(*[Block() for _ in range(per_stage)]) for _ in meshes]
        if by_layer and side.name != PLAIN:
            layers = [layer for stage in stages for layer in stage]
            whole = nn.Sequential(*layers)
            pipeline.split(whole, meshes)
            run: Callable[[Any], Any] = whole
        else:
            for stage, mesh in zip(stages, meshes, strict=True):
                pipeline.skip(dt.shard_module(stage, mesh))
            run = partial(_through, stages, meshes)
        own = list(stages[OWN if side.name != PLAIN else 0].parameters())
        x = dt.shard_tensor(torch.randn(BATCH, SEQ, BLOCK_WIDTH), meshes[0])

        def call() -> Any:
            for param in own:
                param.grad = None
            loss = run(x).sum()
            loss.backward()
            return loss

        call()
        return call

    return build


def _through(stages: list[nn.Module], meshes: list[Any], x: Any) -> Any:
    for stage, mesh in zip(stages, meshes, strict=True):
        x = stage(dt.reshard(x, mesh))
    return x


def _row(name: str, build: Any, limit: float | None) -> Row:
    return Row(name, ONE, build, None if limit is None else Target(limit, "x"))


_8, _IMAGE = (8, 8), (2, 4, 8, 8)
ROWS = [
    _row("outside: `add` / plain `add`", outside(torch.add, _8, _8), 1.2),
    _row("outside: `add` with gradients / plain `add`", outside(torch.add, _8, _8, leaves=1), 1.2),
    _row("outside: `relu` / plain `add`", outside(torch.relu, _8), 1.2),
    _row(
        "outside: `linear` with gradients / plain `add`",
        outside(F.linear, _8, _8, (8,), leaves=2),
        1.2,
    ),
    _row("outside: `view` / plain `add`", outside(lambda x: x.view(64), _8), 1.2),
    _row("outside: attention / plain `add`", outside(_attention, _IMAGE, _IMAGE, _IMAGE), 1.2),
    _row("outside: `reshard` to another stage / plain `add`", reshard_elsewhere, 1.2),
    _row("outside: a transformer block / plain `add`", module, None),
    _row("96 layers, 8 stages, fwd+bwd / own 12 layers", model(by_layer=False), 1.05),
    _row("the same by `pipeline.split` / own 12 layers", model(by_layer=True), 1.05),
]
