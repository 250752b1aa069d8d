"""The example's GPT as ``simulate`` takes it, and as real ranks train it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import disttensor as dt
from disttensor import pipeline
from tests.support.examples import ROOT, example

TINY = "--layers=3 --width=32 --heads=4 --context=16"


def build(options: str) -> Callable[[], None]:
    """Model, optimizer and one step as in examples/train_gpt.py, without files and prints."""
    with _command_line(options):
        script = example("train_gpt")
        args = script.parse_args()
    torch.set_default_dtype(getattr(torch, args.dtype))
    strategy = args.strategy
    stages = pipeline.visits(strategy.stages(), args.schedule)
    dt.manual_seed(0)
    with torch.device("meta"):
        sizes = args.layers, args.width, args.heads, args.context, args.tie
        model = script.GPT(script.GPTConfig(256, *sizes))
    strategy.apply(model, plan=script.PLAN, layers=script.LAYERS, visits=stages)
    script.init_weights(model)
    optimizer = torch.optim.AdamW(script.parameter_groups(model), lr=1e-3)
    scaler = strategy.scaler()
    text = torch.arange(1000).remainder(251).to(torch.uint8)

    def share_of_loss(batch: Any) -> Any:
        inputs = dt.shard_tensor(batch[0], stages[0], strategy.batch())
        targets = dt.shard_tensor(batch[1], stages[-1], strategy.batch())
        with strategy.autocast():
            logits = model(inputs).to(torch.get_default_dtype())
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return scaler.scale(loss / args.accumulate)

    def step() -> None:
        batch = script.sample_batch(text, args.batch, args.context, 0, 0)
        parts = zip(*(half.chunk(args.accumulate) for half in batch), strict=True)
        shares = pipeline.run(share_of_loss, parts, args.schedule, stages=stages)
        dt.broadcast_value(sum(shares)).item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@contextlib.contextmanager
def _command_line(options: str) -> Iterator[None]:
    before, environment = sys.argv, os.environ.get("WORLD_SIZE")
    sys.argv = ["train_gpt.py", *TINY.split(), *options.split()]
    sys.path.insert(0, str(ROOT / "examples"))
    os.environ["WORLD_SIZE"] = str(dist.get_world_size() if dist.is_initialized() else 1)
    try:
        yield
    finally:
        sys.argv = before
        sys.path.remove(str(ROOT / "examples"))
        os.environ.pop("WORLD_SIZE")
        if environment is not None:
            os.environ["WORLD_SIZE"] = environment
