"""The rows of the table: each case builds the call to time, from a side and its place in a mesh."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import sides
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import BATCH, BLOCK_WIDTH, GPT, SEQ, TP_PLAN, VOCAB, Block, MegatronBlock
from sides import OURS, PLAIN, THEIRS, WORLD, Plain
from timing import Call, Fresh
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


@dataclass(frozen=True)
class Target:
    """An upper bound: on the ratio to plain (unit "x"), or on the time itself ("ms" or "µs")."""

    limit: float
    unit: str

    def __str__(self) -> str:
        return f"≤ {self.limit:g}{'x' if self.unit == 'x' else ' ' + self.unit}"


@dataclass(frozen=True)
class Row:
    """One line of the table. ``same`` names the sides whose result must equal the plain one."""

    name: str
    mesh_shape: tuple[int, ...]
    build: Callable[[Plain], Call | None]  # None: this side has no part in the row
    target: Target | None = None
    same: tuple[str, ...] = ()
    grad: bool = True  # built, checked and timed in grad mode
    replay: bool = False  # is there a forward to record?


def add(side: Plain) -> Call:
    """torch.add of two local 8x8, warm."""
    rows = 8 * side.mesh_shape[0]
    x, y = side.place(torch.randn(rows, 8), 0), side.place(torch.randn(rows, 8), 0)
    return partial(torch.add, x, y)


def linear_relu_sum(side: Plain) -> Call:
    """Forward and backward to weight and bias; a local input of 8x8."""
    x = side.place(torch.randn(8 * side.mesh_shape[0], 8), 0)
    weight = nn.Parameter(side.place(torch.randn(8, 8), None))
    bias = nn.Parameter(side.place(torch.randn(8), None))
    return _step(side, lambda: F.linear(x, weight, bias).relu().sum(), [weight, bias])


def gpt(side: Plain) -> Call:
    """Forward and backward of the small GPT, data parallel: each rank has BATCH sequences."""
    model = side.replicate(GPT())
    batch = BATCH * side.mesh_shape[0]
    ids, targets = (side.place(torch.randint(VOCAB, (batch, SEQ)), 0) for _ in range(2))
    return _step(side, lambda: model(ids, targets), list(model.parameters()))


def block(side: Plain) -> Call:
    """The transformer block, tensor parallel over 8 ranks; the plain side is written by hand."""
    full = Block()
    x = side.place(torch.randn(BATCH, SEQ, BLOCK_WIDTH), None).requires_grad_()
    if side.name.startswith(PLAIN):
        model = side.replicate(MegatronBlock(full, WORLD, dist.group.WORLD))
    else:
        model = side.shard(full, TP_PLAN)
    return _step(side, lambda: model(x).sum(), [x, *model.parameters()])


def block_by_hooks(side: Plain) -> Call:
    """The same, where DTensor goes by parallelize_module: local tensors between the linears."""
    if side.name != THEIRS:
        return block(side)
    styles = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
    styles |= {name: RowwiseParallel() for name in ("o", "down")}
    model = parallelize_module(Plain.replicate(side, Block()), side.mesh, styles)
    x = torch.randn(BATCH, SEQ, BLOCK_WIDTH, device=sides.DEVICE).requires_grad_()
    return _step(side, lambda: model(x).sum(), [x, *model.parameters()])


def add_miss(side: Plain) -> Call | None:
    """torch.add of shapes that were never seen, split over both axes of a 2-d mesh."""
    return _miss(side, torch.add, lambda n, m: ((8 * n, 8 * m), (8 * n, 8 * m)), ((0, 1), (0, 1)))


def matmul_miss(side: Plain) -> Call | None:
    """torch.matmul of shapes that were never seen: rows over one axis, columns over the other."""
    layouts = ((0, None), (None, 1))
    return _miss(side, torch.matmul, lambda n, m: ((8 * n, 8), (8, 8 * m)), layouts)


def gather(side: Plain) -> Call:
    """S(0) -> R of a local 8x8 in a graph (it requires grad and is no leaf): forward only."""
    full = torch.randn(8 * WORLD, 8)
    x = side.place(full, 0).requires_grad_() * 1.0
    reshard = side.gather(dist.group.WORLD)
    return lambda: reshard(x)


def adamw(**options: bool) -> Callable[[Plain], Call]:
    """A step of AdamW on 100 replicated parameters of 8x8 with nothing pending."""

    def build(side: Plain) -> Call:
        params = [nn.Parameter(side.place(torch.randn(8, 8), None)) for _ in range(100)]
        for param in params:
            param.grad = side.place(torch.randn(8, 8), None)
        optimizer = torch.optim.AdamW(params, lr=1e-4, **options)

        def call() -> Tensor:
            optimizer.step()
            return params[0]

        return call

    return build


def _step(side: Plain, forward: Callable[[], Tensor], leaves: list[Tensor]) -> Call:
    """Forward, backward and forgetting the gradients, as in a training step."""
    loss = side.forward(forward)

    def call() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        out = loss()
        out.backward()
        return out

    return call


Shapes = tuple[tuple[int, int], tuple[int, int]]


def _miss(
    side: Plain,
    func: Callable[[Tensor, Tensor], Tensor],
    shapes: Callable[[int, int], Shapes],
    layouts: tuple[tuple[int | None, ...], ...],
) -> Call:
    """``func`` on operands of new shapes in each call; their making is not timed."""
    sizes = _never_twice()

    def prepare() -> list[Tensor]:
        pairs = zip(shapes(*next(sizes)), layouts, strict=True)
        return [side.place(torch.zeros(shape), *layout) for shape, layout in pairs]

    return Fresh(prepare, lambda operands: func(*operands))


def _never_twice() -> Iterable[tuple[int, int]]:
    """Pairs of small numbers, none of them twice."""
    for total in itertools.count(2):
        for n in range(1, total):
            yield n, total - n


ONE, EIGHT, GRID = (1,), (WORLD,), (2, WORLD // 2)
EVERYONE = (OURS, THEIRS)

ROWS = [
    Row("`add` 8x8, warm; mesh of 1", ONE, add, Target(1.9, "x"), EVERYONE, grad=False),
    Row("`add` 8x8, warm; S(0) over 8", EIGHT, add, Target(1.9, "x"), EVERYONE, grad=False),
    Row(
        "linear+relu+sum, fwd+bwd; mesh of 1",
        ONE,
        linear_relu_sum,
        Target(1.1, "x"),
        EVERYONE,
        replay=True,
    ),
    Row(
        "linear+relu+sum, fwd+bwd; S(0) over 8",
        EIGHT,
        linear_relu_sum,
        Target(1.12, "x"),
        replay=True,
    ),
    Row(
        "GPT (4 layers, width 32), fwd+bwd; mesh of 1",
        ONE,
        gpt,
        Target(1.1, "x"),
        EVERYONE,
        replay=True,
    ),
    Row(
        "GPT (4 layers, width 32), fwd+bwd; S(0) batch over 8",
        EIGHT,
        gpt,
        Target(1.18, "x"),
        replay=True,
    ),
    Row("TP-8 transformer block, fwd+bwd", EIGHT, block, Target(1.18, "x"), (OURS,), replay=True),
    Row("the same; DTensor by `parallelize_module`", EIGHT, block_by_hooks, Target(1.18, "x")),
    Row("new shape: `add` on 2 x 4", GRID, add_miss, Target(0.25, "ms"), grad=False),
    Row("new shape: `matmul` on 2 x 4", GRID, matmul_miss, Target(0.25, "ms"), grad=False),
    Row("launch S(0)→R over 8, no wire", EIGHT, gather, Target(20, "µs")),
    Row("AdamW for-loop, 100 x 8x8", EIGHT, adamw(foreach=False), Target(1.5, "x"), EVERYONE),
    Row("AdamW foreach, 100 x 8x8", EIGHT, adamw(foreach=True), Target(1.3, "x"), EVERYONE),
    Row("AdamW fused, 100 x 8x8", EIGHT, adamw(fused=True), Target(1.5, "x"), EVERYONE),
]
