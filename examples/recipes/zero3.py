"""Shards parameters, gradients and optimizer state (ZeRO stage 3) and accumulates gradients.

python examples/recipes/zero3.py
torchrun --nproc-per-node 4 examples/recipes/zero3.py    # each rank holds a quarter
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt

strategy = dt.Strategy(
    zero_stage=3,
    accumulate_steps=4,
    segments=["layers.*"],  # the parameters of a layer are gathered together, used and freed
    recompute=["layers.*"],  # a layer keeps its input only, and runs again in the backward
)
stage = strategy.stages()[0]

torch.manual_seed(0)  # weights and data are global values, the same on every rank
layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
model = nn.TransformerEncoder(layer, num_layers=3)
model, optimizer = strategy.apply(model, torch.optim.AdamW(model.parameters(), lr=0.01))

for step in range(5):
    rows = torch.randn(32, 8, 32)
    loss = 0.0
    for i, part in enumerate(rows.chunk(strategy.accumulate_steps)):
        x = dt.shard_tensor(part, stage, strategy.batch())
        with strategy.accumulate(model, i):  # gradients stay sharded between micro-batches
            share = F.mse_loss(model(x), x.flip(-1)) / strategy.accumulate_steps
            share.backward()
        loss += share.item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the global gradient
    optimizer.step()
    optimizer.zero_grad()
    norm = norm.item()
    if os.environ.get("RANK", "0") == "0":
        print(f"step {step}  loss {loss:.4f}  norm {norm:.4f}")
