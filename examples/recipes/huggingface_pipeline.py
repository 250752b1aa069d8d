"""Trains a Llama of Hugging Face in a pipeline of two stages.

python examples/recipes/huggingface_pipeline.py
torchrun --nproc-per-node 4 examples/recipes/huggingface_pipeline.py    # pp 2 x dp 2
"""

import os

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import disttensor as dt
from disttensor import pipeline

world = int(os.environ.get("WORLD_SIZE", 1))
strategy = dt.Strategy(pp=2 if world % 2 == 0 else 1, accumulate_steps=4)

torch.manual_seed(0)  # weights and data are global values, the same on every rank
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
layers = ["model.embed_tokens", "model.layers.*", "model.norm", "lm_head"]  # in running order
model, optimizer = strategy.apply(model, optimizer, layers=layers)
first, last = strategy.stages()[0], strategy.stages()[-1]


def share_of_loss(rows):
    tokens = dt.shard_tensor(rows[:, :-1], first, strategy.batch())
    targets = dt.shard_tensor(rows[:, 1:], last, strategy.batch())
    logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / strategy.accumulate_steps


for step in range(5):
    rows = (torch.randint(64, (16, 1)) + torch.arange(17)) % 64  # each row counts up
    micro_batches = rows.chunk(strategy.accumulate_steps)
    losses = pipeline.run(share_of_loss, micro_batches, strategy.schedule)
    optimizer.step()
    optimizer.zero_grad()
    loss = dt.broadcast_value(sum(losses)).item()  # from the last stage to every rank
    if os.environ.get("RANK", "0") == "0":
        print(f"step {step}  loss {loss:.4f}")
