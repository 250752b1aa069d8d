"""The models that are timed: ordinary PyTorch, and one block written by hand the Megatron way."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# The small GPT. Batch is per rank.
BATCH, SEQ, WIDTH, LAYERS, HEADS, VOCAB = 2, 16, 32, 4, 4, 64
# The transformer block under tensor parallelism: one head of eight per rank.
BLOCK_WIDTH, HEAD_SIZE, BLOCK_HIDDEN = 64, 8, 128


class Layer(nn.Module):
    """A GPT layer: causal attention and a GELU MLP, each behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("mask", torch.full((SEQ, SEQ), float("-inf")).triu(1))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(attend(q, k, v, WIDTH // HEADS, self.mask))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """ids [B, T] and targets [B, T] -> the mean cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.randn(SEQ, WIDTH) * 0.02)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.token(ids) + self.position
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


class Block(nn.Module):
    """A Llama-style block: RMSNorm, attention by matmuls, SwiGLU; seven linears without bias.

    ``degree`` makes the linears 1/degree of their size: the piece of one tensor-parallel rank.
    """

    def __init__(self, degree: int = 1) -> None:
        super().__init__()
        inner, hidden = BLOCK_WIDTH // degree, BLOCK_HIDDEN // degree
        self.norm1, self.norm2 = nn.RMSNorm(BLOCK_WIDTH), nn.RMSNorm(BLOCK_WIDTH)
        self.q = nn.Linear(BLOCK_WIDTH, inner, bias=False)
        self.k = nn.Linear(BLOCK_WIDTH, inner, bias=False)
        self.v = nn.Linear(BLOCK_WIDTH, inner, bias=False)
        self.o = nn.Linear(inner, BLOCK_WIDTH, bias=False)
        self.gate = nn.Linear(BLOCK_WIDTH, hidden, bias=False)
        self.up = nn.Linear(BLOCK_WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, BLOCK_WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.o(attend(self.q(h), self.k(h), self.v(h), HEAD_SIZE))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class MegatronBlock(Block):
    """The same block on the local pieces of one rank, with f and g where Megatron has them."""

    def __init__(self, full: Block, degree: int, group: dist.ProcessGroup) -> None:
        super().__init__(degree)
        self.group = group
        pieces = {
            name: weight.chunk(degree, TP_PLAN[name])[0] if name in TP_PLAN else weight
            for name, weight in full.state_dict().items()
        }
        self.load_state_dict(pieces)

    def forward(self, x: Tensor) -> Tensor:
        h = _Enter.apply(self.norm1(x), self.group)
        y = self.o(attend(self.q(h), self.k(h), self.v(h), HEAD_SIZE))
        x = x + _Leave.apply(y, self.group)
        h = _Enter.apply(self.norm2(x), self.group)
        y = self.down(F.silu(self.gate(h)) * self.up(h))
        return x + _Leave.apply(y, self.group)


# Which dim of each weight is split: 0 for a column-parallel linear, 1 for a row-parallel one.
TP_PLAN = {f"{name}.weight": 0 for name in ("q", "k", "v", "gate", "up")}
TP_PLAN |= {f"{name}.weight": 1 for name in ("o", "down")}


def attend(q: Tensor, k: Tensor, v: Tensor, size: int, mask: Tensor | None = None) -> Tensor:
    """Attention of [B, T, heads * size], written out: DTensor has no fused one on CPUs.

    It takes as many heads as there are columns for; ``mask`` [T, T] is added to the scores.
    """
    batch, seq, _ = q.shape
    q, k, v = (part.view(batch, seq, -1, size).transpose(1, 2) for part in (q, k, v))
    scores = q @ k.transpose(-2, -1) * size**-0.5
    if mask is not None:
        scores = scores + mask
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class _Enter(torch.autograd.Function):
    """Megatron's f: the identity; the backward all-reduces."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    """Megatron's g: all-reduce; the backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
