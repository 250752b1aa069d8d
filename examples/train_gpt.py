"""Train a byte-level GPT on any mesh of processes. One script, the same losses everywhere:

    python examples/train_gpt.py                                       # one process
    torchrun --nproc-per-node 4 examples/train_gpt.py --dp 2 --tp 2    # four
    torchrun --nproc-per-node 4 examples/train_gpt.py --pp 2 --tp 2    # four, in two stages
    python examples/launch.py 4 examples/train_gpt.py --pp 2 --tp 2    # with shorter errors

The model (gpt.py) and the training loop are ordinary PyTorch. What puts them on a mesh is LAYERS, which
are dealt out to the stages, PLAN, which says how the parameters of each are split, and the few lines
with ``dt.`` or ``pipeline.`` in them.
"""

from __future__ import annotations

import json
import math
import os
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig, generate, init_weights
from one_voice import run
from options import parse_args
from progress import Progress, save_curve
from text import read_text, sample_batch, split
from torch import Tensor, nn

import disttensor as dt
from disttensor import pipeline

# The layers in the order in which the model runs them.
LAYERS = ["tok", "pos", "blocks.*", "norm", "head"]

# How tensors lie on the mesh ("dp", "tp") of a stage. Parameters that PLAN does not name are whole.
BATCH = [dt.Shard(0), dt.Replicate()]
COLUMN = [dt.Replicate(), dt.Shard(0)]  # a Linear's output features; an Embedding's vocabulary
ROW = [dt.Replicate(), dt.Shard(1)]  # a Linear's input features
PLAN = {
    "tok.weight": COLUMN,
    "blocks.*.attn.[qkv].*": COLUMN,
    "blocks.*.attn.out.weight": ROW,
    "blocks.*.mlp.up.*": COLUMN,
    "blocks.*.mlp.down.weight": ROW,
    "head.weight": COLUMN,
}

FIRST = os.environ.get("RANK", "0") == "0"  # the rank that prints and writes files


def main() -> None:
    args = parse_args()
    torch.set_default_dtype(getattr(torch, args.dtype))
    text, held_out = split(read_text(args.data, args.bytes), args.context)

    mesh = dt.init_mesh((args.pp, args.dp, args.tp), ("pp", "dp", "tp"))
    stages = [mesh[i] for i in range(args.pp)]
    if args.schedule == "interleaved_1f1b":
        stages = stages * 2  # each is visited twice
    dt.manual_seed(args.seed)
    with torch.device("meta"):  # no memory yet: each rank makes only what it will hold
        model = GPT(GPTConfig(256, args.layers, args.width, args.heads, args.context, args.tie))
    pipeline.split(LAYERS, stages, PLAN, of=model)
    init_weights(model)
    size = sum(parameter.numel() for parameter in model.parameters())
    shape = f"pp={args.pp} x dp={args.dp} x tp={args.tp}"
    say(f"{size:,} parameters on {shape}, {len(text):,} bytes of text")

    def loss_on(batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs = dt.shard_tensor(batch[0], stages[0], BATCH)
        targets = dt.shard_tensor(batch[1], stages[-1], BATCH)
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def share_of_loss(micro_batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_on(micro_batch) / args.micro_batches  # the losses add up to that of the batch

    optimizer = torch.optim.AdamW(parameter_groups(model), lr=args.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(lr_factor, steps=args.steps))
    progress = Progress(args.steps, args.batch * args.context, quiet=not FIRST)
    losses: list[float] = []
    started = time.perf_counter()
    for step in range(args.steps):
        with dt.record_comms() as comms:
            batch = sample_batch(text, args.batch, args.context, args.seed, step)
            parts = zip(*(half.chunk(args.micro_batches) for half in batch), strict=True)
            shares = pipeline.run(share_of_loss, parts, args.schedule, stages=stages)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(
                dt.broadcast_value(sum(shares)).item()
            )  # of the whole batch, on every rank
        progress.update(losses[-1], comms.total_bytes)
        if not math.isfinite(losses[-1]):
            raise SystemExit(f"the loss of step {step + 1} is {losses[-1]}: lower --lr {args.lr:g}")
    say(f"trained for {time.perf_counter() - started:.1f} s")

    with (
        torch.no_grad(),
        dt.values_everywhere(),
    ):  # every rank gets them, on whatever stage they are
        batches = (
            sample_batch(held_out, args.batch, args.context, args.seed + 1, step)
            for step in range(args.checks)
        )
        checks = [loss_on(batch).item() for batch in batches]
    if checks:
        nats = sum(checks) / len(checks)
        say(f"validation loss {nats:.4f} ({nats / math.log(2):.3f} bits per byte)")
    if args.sample:
        prompt = held_out[: min(args.context, 128)].long().unsqueeze(0)
        with dt.values_everywhere():
            sample = bytes(generate(model, prompt, args.sample)[0].tolist())
        say(f"{' a prompt ':-^80}\n{as_text(sample[: prompt.numel()])}")
        say(f"{' and what the model makes of it ':-^80}\n{as_text(sample[prompt.numel() :])}")
    if FIRST and args.losses:
        Path(args.losses).write_text(json.dumps({"losses": losses, "validation": checks}))
    if FIRST and args.plot:
        print(save_curve(losses, args.plot))


def parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    """Weight decay for matrices; none for biases and norms."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


def lr_factor(step: int, steps: int) -> float:
    """Up during the first tenth of the steps, then down along a cosine to a tenth of the peak."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


def as_text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def say(line: str) -> None:
    if FIRST:
        print(line, flush=True)


if __name__ == "__main__":
    run(main)
