"""Set-ups of training runs, drawn by seed: a model, a strategy, a schedule, an optimizer and what a
script does around them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import disttensor as dt
from disttensor.pipeline.schedules import NAMES

OPTIMIZERS: dict[str, Any] = {
    "SGD": {"lr": 0.05}, "SGD momentum": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01, "amsgrad": True}, "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.05}, "RMSprop": {"lr": 0.01, "momentum": 0.5}, "NAdam": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """What is drawn. ``degrees``: pp, dp, sharding, cp, tp."""

    seed: int
    degrees: tuple[int, ...]
    kind: str  # of the model
    optimizer: str
    rows: int
    parts: int = 1  # micro-batches of a step
    schedule: str = ""
    stage: int | None = None
    segment_mb: float = 0.0
    tied: bool = False
    frozen: bool = False
    unused: bool = False
    recompute: bool = False
    hooks: bool = False  # on gradients, and on a module
    edits: bool = False  # of gradients, where there are any
    evaluates: bool = False
    set_to_none: bool = True
    lists: bool | None = None  # foreach=
    fused: bool = False
    clip: str = ""
    amp: str | None = None
    overflow: bool = False

    def __str__(self) -> str:
        names = zip(("pp", "dp", "sharding", "cp", "tp"), self.degrees, strict=True)
        mesh = " x ".join(f"{name} {n}" for name, n in names if n > 1)
        said = {k: v for k, v in vars(self).items() if v and k not in ("seed", "degrees")}
        return f"seed {self.seed}, {mesh}: " + ", ".join(f"{k}={v}" for k, v in said.items())


def make(seed: int, world: int) -> Setup:
    draw = random.Random(f"{seed} in {world}")
    kind = draw.choice(["mlp", "gpt", "gpt", "conv"])
    degrees = [1] * 5
    left = world
    while left > 1:
        axis = draw.randrange(5)
        if axis != 3 or kind == "gpt":
            degrees[axis], left = degrees[axis] * 2, left // 2
    pp, _, sharding, _, _ = degrees
    amp = draw.choice([None, None, None, "bf16", "fp16"])
    parts = draw.choice([1, 1, 2, 3]) if pp == 1 else draw.choice([2, 3, 4])
    schedule = draw.choice([*NAMES]) if pp > 1 else ""
    if pp > 1 and NAMES[schedule].needs_stages and (kind, pp) == ("gpt", 4):
        schedule = "zero_bubble"  # it has 6 layers, for 8 visits
    elif schedule.startswith("interleaved"):
        parts = 2 * pp
    # of rounding, most optimizers make steps as large as any
    optimizer = draw.choice([*OPTIMIZERS][: 2 if amp else None])
    stage = draw.choice([1, 2, 3]) if sharding > 1 else None

    def often(chance: float) -> bool:
        return draw.random() < chance

    return Setup(
        seed, tuple(degrees), kind, optimizer, draw.choice([5, 6, 7, 8]) if parts < 4 else 9, parts,
        schedule, stage,
        segment_mb=draw.choice([0.0, 0.001]) if sharding > 1 else 0.0,
        tied=often(0.5 if pp > 1 else 0.3), frozen=often(0.3), unused=often(0.3),
        # statistics are written again in a backward, which comes later in a schedule
        recompute=often(0.4) and not (kind == "conv" and pp > 1),
        hooks=often(0.3), edits=often(0.2), evaluates=often(0.3), set_to_none=often(0.7),
        lists=draw.choice([None, None, True, False]),
        fused=often(0.3) and optimizer in ("Adam", "AdamW", "SGD", "SGD momentum", "Adagrad"),
        clip=draw.choice(["", "", "norm", "inf norm", "value"]), amp=amp,
        overflow=amp == "fp16" and often(0.6),
    )  # fmt: skip


# Models: a Sequential each, of which stages are made ----------------------------------------------


class Affine(nn.Module):
    """A scale and a shift; the shift may be frozen, and there may be a parameter without a use."""

    def __init__(self, width: int, setup: Setup) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.shift = nn.Parameter(torch.linspace(-0.1, 0.1, width), requires_grad=not setup.frozen)
        if setup.unused:
            self.unused = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Block(nn.Module):
    """Causal attention, by a mask that is computed or by torch's own, and an MLP."""

    def __init__(self, width: int, masked: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        # a bias of the keys has no gradient but noise, of which Adagrad makes steps
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, i != 1) for i in range(4))
        self.up, self.down = nn.Linear(width, 10), nn.Linear(10, width)
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.masked:
            n = x.shape[1]
            mask = torch.ones(n, n, dtype=torch.bool).tril()
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def mlp(setup: Setup) -> list[nn.Module]:
    return [
        nn.Linear(6, 8), nn.Tanh(), Affine(8, setup), nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8),
        nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3),
    ]  # fmt: skip


def gpt(setup: Setup) -> list[nn.Module]:
    return [
        nn.Embedding(11, 8), Block(8, setup.seed % 2 == 0), Affine(8, setup), Block(8, False),
        nn.LayerNorm(8), nn.Linear(8, 11, bias=False),
    ]  # fmt: skip


def conv(setup: Setup) -> list[nn.Module]:
    return [
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, stride=2), nn.GroupNorm(2, 4), nn.Tanh(),
        nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), Affine(16, setup), nn.Linear(16, 3),
    ]  # fmt: skip


# Kind -> layers, and which of them has the weight of which if they are tied
KINDS: dict[str, Any] = {"mlp": (mlp, 6, 3), "gpt": (gpt, 5, 0), "conv": (conv, 6, 3)}


def recomputed(setup: Setup) -> list[str]:
    """Names of the layers that are computed again, one with the weight of another among them."""
    if not setup.recompute:
        return []
    return ["1", "3", str(KINDS[setup.kind][1])] if setup.tied else ["1", "3"]


def model_of(setup: Setup) -> nn.Sequential:
    layers, tied, to = KINDS[setup.kind]
    model: Any = nn.Sequential(*layers(setup))
    if setup.tied:
        model[tied].weight = model[to].weight
    return model.to(torch.float32 if setup.amp else torch.float64)


COLUMN, ROW = {"tp": dt.Shard(0)}, {"tp": dt.Shard(1)}
PLANS: dict[str, dict[str, Any]] = {
    "mlp": {"0.*": COLUMN, "2.*": COLUMN, "3.weight": ROW, "8.*": COLUMN},
    "gpt": {
        "0.weight": COLUMN, "*.[qkv].*": COLUMN, "*.out.weight": ROW, "*.up.*": COLUMN,
        "*.down.weight": ROW, "5.weight": COLUMN,
    },
    "conv": {"0.*": COLUMN, "1.[wb]*": COLUMN, "3.weight": ROW, "11.weight": ROW},
}  # fmt: skip


def batch(setup: Setup, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * setup.seed + step)
    dtype = torch.float32 if setup.amp else torch.float64
    if setup.kind == "gpt":
        tokens = torch.randint(11, (setup.rows, 7), generator=draw)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    shape = (6,) if setup.kind == "mlp" else (3, 6, 6)
    x = torch.randn(setup.rows, *shape, generator=draw, dtype=torch.float64).to(dtype)
    return x, torch.randint(3, (setup.rows,), generator=draw)
