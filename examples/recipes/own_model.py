"""Your own model under any strategy, saved, resumed and evaluated.

python examples/recipes/own_model.py
torchrun --nproc-per-node 4 examples/recipes/own_model.py out/own    # saves there, and resumes
"""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def loss_and_right(rows):
    x = dt.shard_tensor(rows, stages[0], places)
    y = dt.shard_tensor(rows[:, :3].argmax(dim=1), stages[-1], places)
    scores = model(x)
    return F.cross_entropy(scores, y), (scores.argmax(dim=1) == y).sum()


two = 2 if os.environ.get("WORLD_SIZE") == "4" else 1
strategy = dt.Strategy(pp=two, tp=two, accumulate_steps=4)  # or dp=4, sharding=4, dp=2 and tp=2
stages, places = strategy.visits(), strategy.batch(sequence=None)

torch.manual_seed(0)  # weights and data are global values, the same on every rank
model = nn.Sequential(nn.Linear(8, 32), Block(), Block(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
plan = {"*.up.*": {"tp": dt.Shard(0)}, "*.down.weight": {"tp": dt.Shard(1)}}  # for tp
model, optimizer = strategy.apply(model, optimizer, plan, layers=["0", "1", "2", "3"])  # for pp

checkpoints = dt.Checkpointer(sys.argv[1]) if sys.argv[1:] else None
done = checkpoints and checkpoints.load(model=model, optimizer=optimizer)
for step in range(done or 0, 6):
    rows = torch.randn(30, 8, generator=torch.Generator().manual_seed(step)).chunk(4)
    shares = dt.pipeline.run(lambda part: loss_and_right(part)[0] / 4, rows, stages=stages)
    loss = dt.broadcast_value(sum(shares)).item()  # from the last stage to every rank
    optimizer.step()
    optimizer.zero_grad()
    if os.environ.get("RANK", "0") == "0":
        print(f"step {step}  loss {loss:.4f}")
if checkpoints:
    checkpoints.save(6, model=model, optimizer=optimizer)
model.eval()
with torch.no_grad(), dt.values_everywhere():  # values reach every rank; no micro-batches here
    loss, right = (v.item() for v in loss_and_right(torch.eye(9, 8)))
if os.environ.get("RANK", "0") == "0":
    print(f"step 6  evaluated  loss {loss:.4f}  right {right} of 9")
