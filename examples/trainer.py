"""Tune a tiny Llama by transformers' Trainer and PEFT's LoRA, both as they are, by any strategy:

    pip install -e '.[examples]'
    python examples/trainer.py                                       # one process
    torchrun --nproc-per-node 2 examples/trainer.py                  # the same losses
    torchrun --nproc-per-node 4 examples/trainer.py --tp 2           # and these: dp 2 x tp 2

Nothing is downloaded: the weights are random, the text is this file.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

import disttensor as dt

STEPS, BATCH, TIME = 6, 8, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for axis in ("sharding", "tp", "pp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    strategy = dt.Strategy(**vars(parser.parse_args()))  # dp is what is left

    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TIME,
    )  # fmt: skip
    targets = ["q_proj", "v_proj"]
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=targets, modules_to_save=["lm_head"])
    model: Any = get_peft_model(LlamaForCausalLM(config), lora)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    rows = [{"input_ids": row, "labels": row} for row in text.split(TIME) if len(row) == TIME]

    with dt.integrations.one_process() as process, tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=0.03,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=options, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        dt.integrations.shard_trainer(trainer, strategy)
        trainer.train()
        trainer.save_model()  # the adapters, by the first rank
        files = sorted(path.name for path in Path(folder).iterdir())
    if process.is_first:
        print("written:", *files)
        for step, entry in enumerate(trainer.state.log_history[:-1]):
            print(f"step {step:2d}  loss {entry['loss']}")


if __name__ == "__main__":
    main()
