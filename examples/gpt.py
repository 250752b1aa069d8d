"""A byte-level GPT in ordinary PyTorch, without any code for several processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    vocab: int = 256
    layers: int = 6
    width: int = 256
    heads: int = 8
    context: int = 256
    tie: bool = False


class Attention(nn.Module):
    """Causal self-attention. q, k and v are three layers, so that each can be split by heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q = nn.Linear(config.width, config.width)
        self.k = nn.Linear(config.width, config.width)
        self.v = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same"""
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tok = nn.Embedding(config.vocab, config.width)
        self.pos = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tie:
            self.head.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """int64[batch, time] -> logits [batch, time, vocab]"""
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def init_weights(model: GPT) -> None:
    """GPT-2's: normal(0.02), and less for the two matrices a layer that add to the residual."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.constant_(parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0)
        elif name.endswith(("attn.out.weight", "mlp.down.weight")):
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * model.config.layers))
        else:
            nn.init.normal_(parameter, std=0.02)


@torch.no_grad()
def generate(model: GPT, prompt: Tensor, count: int, temperature: float = 0.8) -> Tensor:
    """Continues int64[1, n] by ``count`` sampled tokens. Each sees the n tokens before it."""
    tokens = prompt
    for _ in range(count):
        logits = model(tokens[:, -prompt.shape[1] :])[:, -1]
        following = torch.multinomial(F.softmax(logits / temperature, dim=-1), num_samples=1)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens
