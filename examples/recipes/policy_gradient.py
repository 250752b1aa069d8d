"""A policy learns from samples that another program generates with its newest weights.

python examples/recipes/policy_gradient.py
torchrun --nproc-per-node 4 examples/recipes/policy_gradient.py
"""

import json
import os
import subprocess
import sys
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt

torch.manual_seed(0)
policy = nn.Sequential(nn.Embedding(8, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
if sys.argv[1:2] == ["generate"]:  # the other program: one process, regular tensors
    receiver = dt.receive(policy, sys.argv[2])
    while (step := receiver.update()) is not None:  # None: the trainer has closed
        torch.manual_seed(step)
        tokens = torch.randint(8, (64, 1))
        for _ in range(6):
            odds = policy(tokens[:, -1]).detach().softmax(-1)
            tokens = torch.cat((tokens, odds.multinomial(1)), dim=1)
        print(json.dumps(tokens.tolist()), flush=True)
    sys.exit()

strategy = dt.Strategy(tp=2 if os.environ.get("WORLD_SIZE") == "4" else 1, zero_stage=3)
stage, places = strategy.stages()[0], strategy.batch(sequence=None)
plan = {"1.*": {"tp": dt.Shard(0)}, "3.weight": {"tp": dt.Shard(1)}}
policy, optimizer = strategy.apply(policy, torch.optim.AdamW(policy.parameters(), lr=0.02), plan)
publisher = dt.publish(policy, "127.0.0.1:0")
samples, first = torch.zeros(64, 7, dtype=torch.long), torch.distributed.get_rank() == 0
if first:  # in real runs a launch of its own, on other machines
    command = ["env", *(f"--unset={name}" for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))]
    command += ["--unset=MASTER_PORT", sys.executable, __file__, "generate", publisher.address]
    generator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
times, show = [], print if first else str  # one rank prints
for step in range(8):
    start = perf_counter()
    publisher.send(step)  # returns when the pieces are copied; a thread sends them
    times.append((start, perf_counter()))
    if first:
        samples = torch.tensor(json.loads(generator.stdout.readline()))
    tokens = dt.shard_tensor(samples, stage, places, src_rank=0)  # to all ranks
    state, action = tokens[:, :-1], tokens[:, 1:]
    reward = (action == (state + 1) % 8).float().sum(dim=1)  # count upwards
    loss = F.cross_entropy(policy(state).flatten(0, 1), action.flatten(), reduction="none")
    (loss.view(64, 6).sum(dim=1) * (reward - reward.mean())).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    show(f"step {step}  reward {reward.mean().item():.4f}")
publisher.close()
share = sum(end - start for start, end in times[1:]) / (perf_counter() - times[1][0])
show(f"publishing took {share:.1%} of the time")
