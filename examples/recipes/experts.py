"""Trains a mixture of experts, a Mixtral of Hugging Face, with its experts split over all ranks.

python examples/recipes/experts.py
torchrun --nproc-per-node 4 examples/recipes/experts.py    # dp 4: two experts on each rank
"""

import os

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import disttensor as dt

strategy = dt.Strategy()  # dp gets all processes
stage = strategy.stages()[0]

torch.manual_seed(0)  # weights and data are global values, the same on every rank
config = MixtralConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, output_router_logits=True,
)  # fmt: skip
model = MixtralForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
plan = dt.plans.experts(model, "dp", stage)  # tokens are sent to the ranks of their experts
model, optimizer = strategy.apply(model, optimizer, plan)

for step in range(5):
    rows = (torch.randint(64, (16, 1)) + torch.arange(16)) % 64  # each row counts up
    tokens = dt.shard_tensor(rows, stage, strategy.batch())
    out = model(input_ids=tokens, labels=tokens)  # the loss includes the balance of the router
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss, balance = out.loss.item(), out.aux_loss.item()
    if os.environ.get("RANK", "0") == "0":
        print(f"step {step}  loss {loss:.4f}  balance {balance:.4f}")
load = dt.experts.expert_load(model)  # tokens of each expert; every rank makes this call
if os.environ.get("RANK", "0") == "0":
    print(load)
