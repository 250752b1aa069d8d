"""Saves a run on four processes, and resumes it in one.

torchrun --nproc-per-node 4 examples/recipes/resume.py out/resume 3    # steps 1 to 3
python examples/recipes/resume.py out/resume 6                         # steps 4 to 6
"""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import disttensor as dt

folder, last = sys.argv[1], int(sys.argv[2])
world = int(os.environ.get("WORLD_SIZE", 1))
strategy = dt.Strategy(tp=2 if world % 2 == 0 else 1, zero_stage=3)  # sharding gets the rest
stage, places = strategy.stages()[0], strategy.batch(sequence=None)

torch.manual_seed(0)  # weights and data are global values, the same on every rank
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
plan = {"0.*": {"tp": dt.Shard(0)}, "2.weight": {"tp": dt.Shard(1)}}
model, optimizer = strategy.apply(model, torch.optim.AdamW(model.parameters(), lr=0.01), plan)
samples = TensorDataset(torch.randn(40, 8))
loader = DataLoader(samples, batch_size=8, shuffle=True, generator=torch.Generator())
loader = dt.shard_loader(loader, stage, places)  # each rank loads its own samples

checkpoints = dt.Checkpointer(folder)
run = {"model": model, "optimizer": optimizer, "loader": loader}  # and schedulers, scalers, ...
step = checkpoints.load(**run) or 0  # None: there is no checkpoint yet
while step < last:
    for (x,) in loader:  # in the middle of an epoch: goes on with the samples that are left
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        value = loss.item()
        if os.environ.get("RANK", "0") == "0":
            print(f"step {step}  loss {value:.4f}")
        if step == last:
            break
checkpoints.save(last, **run)
