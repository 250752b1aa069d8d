"""A Megatron MLP block, split over all processes, and what it sends:

python examples/tensor_parallel.py                        # one process: nothing
torchrun --nproc-per-node 4 examples/tensor_parallel.py   # one all-reduce each way
"""

import os

import torch
from torch import nn

import disttensor as dt

mesh = dt.init_mesh((int(os.environ.get("WORLD_SIZE", 1)),), ("tp",))

torch.manual_seed(0)  # the same global values on every rank
norm = nn.LayerNorm(64)
block = nn.Sequential(norm, nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
plan = {"1.*": [dt.Shard(0)], "3.weight": [dt.Shard(1)]}  # output features, then input features
dt.shard_module(block, mesh, plan)
x = dt.shard_tensor(torch.randn(2, 16, 64), mesh)  # replicated

with dt.debugging.record_comms() as log:
    loss = (x + block(x)).square().mean()
    loss.backward()
value = loss.item()  # the global value, on every rank
if os.environ.get("RANK", "0") == "0":
    print(f"loss {value:.6f}")
    print(log)
