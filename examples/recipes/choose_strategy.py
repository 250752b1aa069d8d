"""Chooses a strategy by simulation, and trains with it.

python examples/recipes/choose_strategy.py
torchrun --nproc-per-node 4 examples/recipes/choose_strategy.py
"""

import os

import torch
from torch import nn

import disttensor as dt
from disttensor.simulate import plan_strategy


def build_with(strategy, width=1024, rows=65536):
    """Returns a step of training under a strategy. Its data are made inside of it: a simulation
    runs it on tensors without memory."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    plan = {"0.*": {"tp": dt.Shard(0)}, "2.weight": {"tp": dt.Shard(1)}}
    strategy.apply(model, plan=plan)  # also initializes the weights
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        places = strategy.batch(sequence=None)
        x = dt.shard_tensor(torch.randn(rows, width), strategy.stages()[0], places)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


world, first = int(os.environ.get("WORLD_SIZE", 1)), os.environ.get("RANK", "0") == "0"
# Without candidates, it considers all strategies that the world, the batch and the layers allow.
candidates = dt.Strategy(dp=world), dt.Strategy(tp=world), dt.Strategy(sharding=world, zero_stage=3)
table = plan_strategy(build_with, world, candidates, progress=lambda line: None)
if first:
    print(table)

torch.manual_seed(0)
step = build_with(table.best, width=16, rows=32)  # the real run; here a small one
for i in range(4):
    loss = step().item()
    if first:
        print(f"step {i}  loss {loss:.4f}")
