"""The small models that several programs share, and plans for them; most sizes are odd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import disttensor as dt
from disttensor import DistTensor, Shard

ROWS, COLUMNS = {"tp": Shard(0)}, {"tp": Shard(1)}
MLP_PLAN = {"*up.*": ROWS, "*down.weight": COLUMNS}
HEADS_PLAN = {"*q.*": ROWS, "*k.*": ROWS, "*v.*": ROWS, "*out.weight": COLUMNS}


def spread(x: Tensor) -> Tensor:
    """Splits the sequence over tp too: sequence parallelism."""
    if not isinstance(x, DistTensor):
        return x
    places = list(x.placements)
    places[x.process_mesh.axis("tp")] = Shard(1)
    return dt.reshard(x, x.process_mesh, places)


def whole(x: Tensor) -> Tensor:
    return dt.reshard(x, x.process_mesh) if isinstance(x, DistTensor) else x


class MLP(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 7) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Causal attention; ``kv`` heads of keys and values, a ``window`` of tokens."""

    def __init__(self, heads: int = 3, kv: int = 3, size: int = 4, window: int = 0) -> None:
        super().__init__()
        self.heads, self.kv, self.size, self.window = heads, kv, size, window
        self.q = nn.Linear(6, heads * size)
        self.k, self.v = nn.Linear(6, kv * size), nn.Linear(6, kv * size)
        self.out = nn.Linear(heads * size, 6)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = (f(x).unflatten(-1, (self.kv, self.size)).transpose(1, 2) for f in (self.k, self.v))
        y = self.attend(*self.prepare(q, k), v)
        return self.out(y.transpose(1, 2).flatten(2))

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped: dict[str, Any] = {"enable_gqa": True} if self.kv < self.heads else {}
        if not self.window:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
        rows = torch.arange(q.shape[2])
        apart = rows[:, None] - rows
        mask = (apart >= 0) & (apart < self.window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **grouped)


class Mixture(nn.Module):
    """Five experts, two for each token."""

    def __init__(self, experts: int = 5) -> None:
        super().__init__()
        self.num_experts = experts
        self.router = nn.Linear(6, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 6, 7) / 3)
        self.down = nn.Parameter(torch.randn(experts, 7, 6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        sent = dt.experts.dispatch_tokens(x, chosen, self.num_experts)
        return dt.experts.combine_tokens(sent.apply(each_expert, self.up, self.down), weights)


def each_expert(rows: Tensor, counts: list[int], up: Tensor, down: Tensor) -> Tensor:
    each = zip(rows.split(counts), up.unbind(), down.unbind(), strict=True)
    return torch.cat([F.silu(r @ u) @ d for r, u, d in each])


class Residual(nn.Module):
    """x + inner(norm(x))."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(6), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Decoder(nn.Module):
    """A language model: 11 words, blocks, a head that may be tied to the embedding."""

    def __init__(self, *inner: nn.Module, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.Sequential(*map(Residual, inner))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


LAYERS = ["embed", "blocks.*", "norm", "head"]


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square().mean()


def next_token(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """The mean over the tokens that have a label; -100 is none."""
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def shard_over_experts(*axes: str) -> Any:
    """A plan (for ``Run.apply``) that splits experts over axes of the mesh."""
    return lambda model, mesh: dt.plans.experts(model, list(axes), mesh)
