"""Train a byte-level GPT on any number of processes. One script, the same losses everywhere:

    python examples/train_gpt.py                                              # one process
    torchrun --nproc-per-node 4 examples/train_gpt.py --dp 2 --tp 2           # four
    torchrun --nproc-per-node 4 examples/train_gpt.py --pp 2 --tp 2           # four, in two stages
    torchrun --nproc-per-node 4 examples/train_gpt.py --sharding 4 --zero 3   # each holds a quarter
    torchrun --nproc-per-node 4 --max-restarts 3 examples/train_gpt.py --save out/run   # goes on
    torchrun --nproc-per-node 4 examples/train_gpt.py --sharding 4 --experts 8    # two on each rank
    python -m disttensor.run --nproc 4 examples/train_gpt.py --pp 2 --tp 2    # with shorter errors

The model (gpt.py) and the training loop are ordinary PyTorch. They run on several processes by a
``dt.Strategy``, which options.py makes from the command line; by PLAN, the split of layers by
tensor parallelism; by LAYERS, which are divided among the stages; and by the few lines with
``strategy.``, ``dt.`` or ``pipeline.`` in them.
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
from errors import run
from gpt import GPT, GPTConfig, generate, init_weights
from mixture import Mixture
from options import parse_args
from progress import Progress, save_curve
from text import read_text, sample_batch, split
from torch import Tensor, nn

import disttensor as dt
from disttensor import pipeline

# The layers in the order in which the model runs them.
LAYERS = ["tok", "pos", "blocks.*", "norm", "head"]

# How tensor parallelism splits parameters. Those that PLAN does not name are whole.
COLUMN = {"tp": dt.Shard(0)}  # a Linear's output features; an Embedding's vocabulary
ROW = {"tp": dt.Shard(1)}  # a Linear's input features
PLAN = {
    "tok.weight": COLUMN,
    "blocks.*.attn.[qkv].*": COLUMN,
    "blocks.*.attn.out.weight": ROW,
    "blocks.*.mlp.up.*": COLUMN,
    "blocks.*.mlp.down.weight": ROW,
    "head.weight": COLUMN,
}
EXPERTS = {  # each on one rank of its stage: tokens that the ranks share go there
    f"blocks.*.mlp.{name}": dict.fromkeys(("dp", "sharding", "cp", "tp"), dt.Shard(0))
    for name in ("up", "down")
}

FIRST = os.environ.get("RANK", "0") == "0"  # the rank that prints and writes files


def main() -> None:
    args = parse_args()
    torch.set_default_dtype(getattr(torch, args.dtype))
    text, held_out = split(read_text(args.data, args.bytes), args.context)

    strategy = args.strategy
    stages = pipeline.visits(strategy.stages(), args.schedule)
    dt.manual_seed(args.seed)
    with torch.device("meta"):  # no memory yet: a rank makes what its stage holds
        model = GPT(GPTConfig(256, args.layers, args.width, args.heads, args.context, args.tie))
        for block in model.blocks if args.experts else ():
            block.mlp = Mixture(args.width, args.experts)
    plan = PLAN
    if args.experts:
        plan = {name: PLAN[name] for name in PLAN if ".mlp." not in name} | EXPERTS
    strategy.apply(model, plan=plan, layers=LAYERS, visits=stages)
    init_weights(model)
    size = sum(parameter.numel() for parameter in model.parameters())
    say(f"{size:,} parameters on {strategy.degrees()}, {len(text):,} bytes of text")
    say(f"calls are carried out in {dt.debugging.info()['dispatch']}")

    def loss_on(batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs = dt.shard_tensor(batch[0], stages[0], strategy.batch())
        targets = dt.shard_tensor(batch[1], stages[-1], strategy.batch())
        with strategy.autocast():
            logits = model(inputs).to(torch.get_default_dtype())
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def share_of_loss(micro_batch: tuple[Tensor, Tensor]) -> Tensor:
        return scaler.scale(loss_on(micro_batch) / args.accumulate)  # they add up to the batch's

    optimizer = torch.optim.AdamW(parameter_groups(model), lr=args.lr, betas=(0.9, 0.95))
    scaler = strategy.scaler()  # scales with --amp fp16 only
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(lr_factor, steps=args.steps))
    losses: list[float] = []
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    state["losses"] = losses
    checkpoints = dt.Checkpointer(args.save) if args.save else None
    done = (checkpoints and checkpoints.load(**state)) or 0
    if done:
        say(f"going on after step {done}, from {args.save}")
    progress = Progress(args.steps, args.batch * args.context, quiet=not FIRST, done=done)
    started = time.perf_counter()
    for step in range(done, args.steps):
        with dt.debugging.record_comms() as comms:
            batch = sample_batch(text, args.batch, args.context, args.seed, step)
            parts = zip(*(half.chunk(args.accumulate) for half in batch), strict=True)
            shares = pipeline.run(share_of_loss, parts, args.schedule, stages=stages)
            loss = dt.broadcast_value(sum(shares)).item() / scaler.get_scale()  # on every rank
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss)
        progress.update(losses[-1], comms.total_bytes)
        if not math.isfinite(losses[-1]):
            raise SystemExit(f"the loss of step {step + 1} is {losses[-1]}: lower --lr {args.lr:g}")
        if checkpoints and ((step + 1) % args.every == 0 or step + 1 == args.steps):
            checkpoints.save(step + 1, background=True, **state)
    if checkpoints:
        checkpoints.wait()
    say(f"trained for {time.perf_counter() - started:.1f} s")

    # Every rank gets the values, on whatever stage they are.
    with torch.no_grad(), dt.values_everywhere():
        batches = (
            sample_batch(held_out, args.batch, args.context, args.seed + 1, step)
            for step in range(args.checks)
        )
        checks = [loss_on(batch).item() for batch in batches]
    if checks:
        nats = sum(checks) / len(checks)
        say(f"validation loss {nats:.4f} ({nats / math.log(2):.3f} bits per byte)")
    if args.experts:
        say(f"{' experts in the last forward ':-^80}\n{dt.experts.expert_load(model)}")
    if args.sample:
        start = bytes(held_out[: -args.context].tolist()).find(b"\n\n") + 2  # of a paragraph
        prompt = held_out[start : start + min(args.context, 128)].long().unsqueeze(0)
        prompt = prompt.to(args.device or "cpu")
        with dt.values_everywhere():
            sample = bytes(generate(model, prompt, args.sample, temperature=0.6)[0].tolist())
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
