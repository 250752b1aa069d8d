"""Tune a tiny Llama by transformers' Trainer and PEFT's LoRA, both as they are, on a split batch:

    pip install -e '.[examples]'
    python examples/trainer.py                                # one process
    torchrun --nproc-per-node 2 examples/trainer.py           # the same losses

Trainer sees one process on every rank, and so the same, whole batch; a hook of the model splits it.
Nothing is downloaded: the weights are random, the text is this file.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

import disttensor as dt

STEPS, BATCH, TIME = 6, 8, 32


def main() -> None:
    mesh = dt.init_mesh((int(os.environ.get("WORLD_SIZE", 1)),), ("dp",))
    first = os.environ.get("RANK", "0") == "0"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # else Trainer divides the work itself
        os.environ.pop(name, None)

    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TIME,
    )  # fmt: skip
    targets = ["q_proj", "v_proj"]
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=targets, modules_to_save=["lm_head"])
    model: Any = get_peft_model(LlamaForCausalLM(config), lora)
    dt.shard_data_parallel(model, mesh, "dp")
    model.register_forward_pre_hook(
        lambda _, args, kwargs: split(mesh, args, kwargs), with_kwargs=True
    )

    text = torch.tensor(list(Path(__file__).read_bytes()))
    rows = [{"input_ids": row, "labels": row} for row in text.split(TIME) if len(row) == TIME]
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=0.03,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=options, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    learned = {name: p.full_tensor() for name, p in model.named_parameters() if p.requires_grad}
    if first:
        print(f"{len(learned)} tensors were learned")  # this rank may save them
        for step, entry in enumerate(trainer.state.log_history[:-1]):
            print(f"step {step:2d}  loss {entry['loss']}")


def split(mesh: dt.ProcessMesh, args: Any, kwargs: Any) -> Any:
    """Arguments with each batch of tensors split by rows."""

    def part(value: Any) -> Any:
        whole = not isinstance(value, torch.Tensor) or not value.ndim
        return value if whole else dt.shard_tensor(value, mesh, [dt.Shard(0)])

    return tuple(map(part, args)), {name: part(value) for name, value in kwargs.items()}


if __name__ == "__main__":
    main()
