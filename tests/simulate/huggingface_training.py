"""Models of Hugging Face transformers as ``simulate`` takes them, and as real ranks train them."""

from __future__ import annotations

from collections.abc import Callable

import torch

import disttensor as dt
from tests.support.models import huggingface

BATCH = 8


def build(options: str) -> Callable[[], None]:
    """``options``: the name of a model, and fields of a Strategy, as "llama dp=2 tp=2"."""
    name, *words = options.split()
    fields: dict[str, int] = {key: int(n) for key, n in (word.split("=") for word in words)}
    strategy = dt.Strategy(**fields)  # type: ignore[arg-type]
    (stage,) = strategy.stages()
    torch.manual_seed(0)
    model = getattr(huggingface, name)()
    plan = dt.plans.megatron(model, "tp", stage) if strategy.degrees().tp > 1 else None
    model, optimizer = strategy.apply(model, torch.optim.AdamW, plan)
    batch = huggingface.language(BATCH)

    def step() -> None:
        parts = {key: x.chunk(strategy.accumulate_steps) for key, x in batch.items()}
        for i in range(strategy.accumulate_steps):
            given = {key: dt.shard_tensor(x[i], stage, strategy.batch(sequence=None))
                     for key, x in parts.items()}  # fmt: skip
            (model(**given).loss / strategy.accumulate_steps).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
