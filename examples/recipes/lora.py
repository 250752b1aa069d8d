"""Tunes a tensor-parallel Llama by PEFT's LoRA.

python examples/recipes/lora.py
torchrun --nproc-per-node 4 examples/recipes/lora.py    # dp 2 x tp 2
"""

import os

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import disttensor as dt

world = int(os.environ.get("WORLD_SIZE", 1))
strategy = dt.Strategy(tp=2 if world % 2 == 0 else 1)  # dp gets the other processes
stage = strategy.stages()[0]

torch.manual_seed(0)  # weights and data are global values, the same on every rank
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
model = get_peft_model(LlamaForCausalLM(config), lora)  # also freezes the weights of the Llama
plan = dt.plans.megatron(model, "tp", stage)
strategy.apply(model, plan=plan)
learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
optimizer = torch.optim.AdamW(learned.values(), lr=0.1)

losses = []
for _ in range(5):
    rows = (torch.randint(64, (16, 1)) + torch.arange(16)) % 64  # each row counts up
    tokens = dt.shard_tensor(rows, stage, strategy.batch())
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
adapters = {name: p.full_tensor() for name, p in learned.items()}  # every rank makes this call

if os.environ.get("RANK", "0") == "0":
    print(f"{len(adapters)} tensors of adapters")  # here: torch.save(adapters, "adapters.pt")
    for step, loss in enumerate(losses):
        print(f"step {step}  loss {loss:.4f}")
