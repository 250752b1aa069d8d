"""Trains a GPT with Muon for the matrices of its blocks, and AdamW for all other parameters.

python examples/recipes/muon.py
torchrun --nproc-per-node 4 examples/recipes/muon.py    # sharding 2 x tp 2
"""

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import disttensor as dt

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of gpt.py
from gpt import GPT, GPTConfig

COLUMN, ROW = {"tp": dt.Shard(0)}, {"tp": dt.Shard(1)}
PLAN = {
    "blocks.*.attn.[qkv].*": COLUMN,
    "blocks.*.attn.out.weight": ROW,
    "blocks.*.mlp.up.*": COLUMN,
    "blocks.*.mlp.down.weight": ROW,
}

world = int(os.environ.get("WORLD_SIZE", 1))
strategy = dt.Strategy(tp=2 if world % 2 == 0 else 1, zero_stage=3)  # sharding gets the others
stage = strategy.stages()[0]

torch.manual_seed(0)  # weights and data are global values, the same on every rank
model = GPT(GPTConfig(vocab=64, layers=2, width=32, heads=4, context=16))
strategy.apply(model, plan=PLAN)
matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
muon = dt.optim.own(torch.optim.Muon(matrices, lr=0.02))  # a matrix is whole on one rank
adamw = torch.optim.AdamW(others, lr=0.01)

losses = []
for _ in range(5):
    rows = (torch.randint(64, (16, 1)) + torch.arange(17)) % 64  # each row counts up
    tokens = dt.shard_tensor(rows, stage, strategy.batch())
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    for optimizer in (muon, adamw):
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())

if os.environ.get("RANK", "0") == "0":
    print(f"{len(matrices)} matrices have owners, {len(others)} parameters have none")
    for step, loss in enumerate(losses):
        print(f"step {step}  loss {loss:.4f}")
