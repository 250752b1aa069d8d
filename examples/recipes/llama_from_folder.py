"""Reads a Llama from a folder in Hugging Face's format, tunes it with sharded state, and saves it.

    python examples/recipes/llama_from_folder.py
    torchrun --nproc-per-node 4 examples/recipes/llama_from_folder.py    # sharding 4

The first argument is the folder; without it, a small model with random weights is made.
"""

import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import disttensor as dt

world = int(os.environ.get("WORLD_SIZE", 1))
strategy = dt.Strategy(sharding=world)

torch.manual_seed(0)  # weights and data are global values, the same on every rank
folder = sys.argv[1] if len(sys.argv) > 1 else "out/small_llama"
if len(sys.argv) == 1:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    dt.pretrained.save(LlamaForCausalLM(config), folder)  # once, by all ranks

model = dt.from_pretrained(folder, strategy, dtype=torch.float32)  # each rank reads its part
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(5):
    rows = (torch.randint(64, (16, 1)) + torch.arange(16)) % 64  # each row counts up
    loss = model(input_ids=rows, labels=rows).loss  # the call splits the batch
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    if os.environ.get("RANK", "0") == "0":
        print(f"step {step}  loss {value:.4f}")
model.eval()
prompt = torch.arange(8).unsqueeze(0)
continued = model.generate(prompt, max_new_tokens=4, do_sample=False)[0].tolist()
if os.environ.get("RANK", "0") == "0":
    print("continued", continued)
dt.pretrained.save(model, f"{folder}/tuned")  # from_pretrained of transformers reads it
