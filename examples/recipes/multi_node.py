"""Trains on several nodes: tensor parallelism inside each node, sharded state across nodes.

python examples/recipes/multi_node.py
torchrun --nproc-per-node 4 examples/recipes/multi_node.py    # one node
sbatch examples/recipes/multi_node.sbatch                     # several nodes, by Slurm
"""

import os

import torch
from torch import nn

import disttensor as dt

local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # processes on this node; torchrun sets it
device = "cuda" if torch.cuda.is_available() else "cpu"  # each process takes cuda:LOCAL_RANK
# Consecutive ranks, which are on one node, differ in tp.
strategy = dt.Strategy(tp=local, zero_stage=3, device_type=device)
stage, places = strategy.stages()[0], strategy.batch(sequence=None)

torch.manual_seed(0)  # weights and data are global values, the same on every rank
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
plan = {"0.*": {"tp": dt.Shard(0)}, "2.weight": {"tp": dt.Shard(1)}}
model, optimizer = strategy.apply(model, torch.optim.AdamW(model.parameters(), lr=0.01), plan)

for step in range(4):
    x = dt.shard_tensor(torch.randn(32, 16), stage, places)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    if os.environ.get("RANK", "0") == "0":
        print(f"step {step}  loss {value:.4f}")
