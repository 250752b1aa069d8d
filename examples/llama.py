"""Train a tiny Llama, the unmodified class of Hugging Face transformers, on dp x tp:

    pip install -e '.[examples]'
    python examples/llama.py                                  # one process
    torchrun --nproc-per-node 4 examples/llama.py             # dp 2 x tp 2, the same losses

Nothing is downloaded: the weights are random, the text is this file.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import disttensor as dt

STEPS, BATCH, TIME = 20, 8, 32


def main() -> None:
    world = int(os.environ.get("WORLD_SIZE", 1))
    tp = 2 if world % 2 == 0 else 1
    mesh = dt.init_mesh((world // tp, tp), ("dp", "tp"))
    first = os.environ.get("RANK", "0") == "0"

    torch.manual_seed(0)  # the same weights and batches on every rank: the global ones
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TIME,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    plan = dt.plans.megatron(model, "tp", mesh)  # a dict: change what you like
    if first:
        print(plan)
    dt.shard_module(model, mesh, plan)

    text = torch.tensor(list(Path(__file__).read_bytes()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        starts = torch.randint(len(text) - TIME, (BATCH,)).tolist()
        batch = torch.stack([text[s : s + TIME] for s in starts])
        tokens = dt.shard_tensor(batch, mesh, [dt.Shard(0), dt.Replicate()])
        optimizer.zero_grad()
        with dt.debugging.record_comms() as comms:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        value = loss.item()
        if first and (step % 5 == 0 or step == STEPS - 1):
            print(f"step {step:2d}  loss {value:.4f}  {len(comms)} collectives")


if __name__ == "__main__":
    main()
