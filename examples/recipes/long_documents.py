"""Trains on a row of packed documents that is split over all processes (context parallelism).

    python examples/recipes/long_documents.py
    torchrun --nproc-per-node 4 examples/recipes/long_documents.py    # cp 4

A token attends to the earlier tokens of its own document. Each rank makes only the rows of the
mask for its own tokens, and passes keys and values around a ring.
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt

TIME, WIDTH, HEADS = 48, 32, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2))


strategy = dt.Strategy(cp=int(os.environ.get("WORLD_SIZE", 1)), attention="ring")
stage = strategy.stages()[0]
torch.manual_seed(0)  # weights and data are global values, the same on every rank
parts = {"embed": nn.Embedding(64, WIDTH), "one": Block(), "two": Block()}
model = nn.ModuleDict({**parts, "head": nn.Linear(WIDTH, 64)})
model, optimizer = strategy.apply(model, torch.optim.AdamW(model.parameters(), lr=0.01))

document = torch.tensor([0] * 20 + [1] * 7 + [2] * 21)  # of each token
place = torch.arange(TIME)
rows = [dt.shard_tensor(t.unsqueeze(1), stage, strategy.batch(0)) for t in (document, place)]
mask = (rows[0] == document) & (rows[1] >= place)  # bool[48@cp, 48]

for step in range(5):
    values = (torch.randint(64, (3,))[document] + place) % 64  # each document counts up
    data = torch.stack([values, (values + 1) % 64]).unsqueeze(1)
    tokens, targets = (dt.shard_tensor(t, stage, strategy.batch()) for t in data)
    with strategy.autocast():  # selects the ring
        x = model["two"](model["one"](model["embed"](tokens), mask), mask)
        loss = F.cross_entropy(model["head"](x).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    if os.environ.get("RANK", "0") == "0":
        print(f"step {step}  loss {value:.4f}")
