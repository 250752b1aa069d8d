"""A training run that is saved under one strategy and resumed under another.

    python -m tests.checkpoint.runs        the full square (make square): each pair of strategies

The model has dropout and an uneven vocabulary, data come from a shuffled ``dt.shard_loader`` in
batches that divide by no number of ranks, the learning rate has a schedule. What resumes must have
the bits of what was saved, and go on with the losses of one process that was never interrupted.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import disttensor as dt
from disttensor import pipeline
from disttensor.comm import objects
from disttensor.comm.groups import world_group
from tests.support.pool import run_on_ranks, stop

STRATEGIES: dict[str, dict[str, Any]] = {
    "one process": {"dp": 1},
    "dp 4": {"dp": 4},
    "sharding 4, stage 1": {"sharding": 4, "zero_stage": 1},
    "sharding 4, stage 2": {"sharding": 4, "zero_stage": 2},
    "sharding 4, stage 3": {"sharding": 4, "segments": dt.fsdp.SegmentBySize(0.002)},
    "tp 4": {"tp": 4},
    "pp 2 x tp 2": {"pp": 2, "tp": 2},
    "pp 2 x dp 2, interleaved": {"pp": 2, "dp": 2},
    "dp 2 x sharding 2": {"dp": 2, "sharding": 2},
    "cp 2 x tp 2": {"cp": 2, "tp": 2},
}
WITH_DROPOUT = ["cp 2 x tp 2", "pp 2 x tp 2"]  # in the suite
COLUMN, ROW = {"tp": dt.Shard(0)}, {"tp": dt.Shard(1)}
PLAN = {
    "tok.weight": COLUMN, "blocks.*.[qkv].*": COLUMN, "blocks.*.out.weight": ROW,
    "blocks.*.up.*": COLUMN, "blocks.*.down.weight": ROW, "head.weight": COLUMN,
}  # fmt: skip
VOCAB, WIDTH, TIME, BATCH, PARTS, DROP = 13, 12, 8, 3, 2, 0.1


class Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(drop) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Run:
    """One run under a strategy: ``saved()`` is what a checkpoint has of it."""

    def __init__(self, name: str, drop: float = 0.0) -> None:
        self.strategy = dt.Strategy(accumulate_steps=PARTS, **STRATEGIES[name])
        visits = 2 if "interleaved" in name else 1
        self.schedule = "interleaved_1f1b" if visits == 2 else "1f1b"
        self.stages = self.strategy.stages() * visits
        dt.manual_seed(3)
        torch.manual_seed(3)
        self.model = Model(drop).double()
        layers = ["tok", "blocks.*", "norm", "head"]
        self.strategy.apply(self.model, plan=PLAN, layers=layers, visits=visits)
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        plain = [p for p in self.model.parameters() if p.ndim == 1]
        groups: Any = [{"params": decayed, "weight_decay": 0.1}, {"params": plain}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        tokens = torch.randint(VOCAB, (25, TIME + 1), generator=torch.Generator().manual_seed(1))
        samples = TensorDataset(tokens[:, :-1], tokens[:, 1:])
        loader = DataLoader(
            samples, BATCH, shuffle=True, generator=torch.Generator().manual_seed(2), drop_last=True
        )
        ends = self.stages[0], self.stages[-1]
        self.loader = dt.shard_loader(loader, ends, self.strategy.batch())
        self.batches: Any = None

    def saved(self) -> dict[str, Any]:
        return {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler,
            "loader": self.loader,
        }  # fmt: skip

    def _next(self) -> Any:
        if self.batches is None:
            self.batches = iter(self.loader)
        batch = next(self.batches, None)
        if batch is None:
            self.batches = None
            return self._next()
        return batch

    def step(self) -> float:
        def share(batch: Any) -> Tensor:
            logits = self.model(batch[0])
            return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()) / PARTS

        with dt.random.rng("invariant"):
            parts = [self._next() for _ in range(PARTS)]
            shares = pipeline.run(share, parts, self.schedule, stages=self.stages)
            loss = dt.broadcast_value(sum(shares)).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss)

    def digests(self) -> dict[str, str]:
        """Of the whole value of each parameter and its state."""
        found: dict[str, Any] = {}
        for name, p in self.model.named_parameters():
            if p.is_initialized:
                state = {f"{name}.{k}": v for k, v in self.optimizer.state[p].items()}
                for key, x in {name: p.detach(), **state}.items():
                    whole = x.full_tensor() if isinstance(x, dt.DistTensor) else x
                    found[key] = objects.digest(whole)
        everyone = objects.gather_objects(found, world_group())
        return {key: digest for some in everyone for key, digest in some.items()}


def save(name: str, drop: float, folder: str, steps: int) -> Any:
    """Train so many steps, save, and one step more: the losses and what was saved."""
    run = Run(name, drop)
    losses = [run.step() for _ in range(steps)]
    kept = run.digests()
    checkpoints = dt.Checkpointer(folder)
    checkpoints.save(steps, background=True, **run.saved())
    losses.append(run.step())  # not in the checkpoint
    checkpoints.wait()
    return losses, kept


def resume(name: str, drop: float, folder: str, steps: int) -> Any:
    """Load the newest, and train so many steps: where it began, the losses and what was loaded."""
    run = Run(name, drop)
    start = dt.Checkpointer(folder).load(**run.saved())
    kept = run.digests()
    return start, [run.step() for _ in range(steps)], kept


def chain(names: Sequence[str], drop: float, folder: str, wanted: list[float]) -> None:
    """Each strategy of ``names`` resumes from the one before it, trains one step, and saves."""
    kept: dict[str, str] = {}
    for i, name in enumerate(names):
        checkpoints, run = dt.Checkpointer(folder, keep=2), Run(name, drop)
        start = checkpoints.load(**run.saved()) or 0
        if kept:
            same(run.digests(), kept, name)
        losses = [run.step()]
        kept = run.digests()
        checkpoints.save(start + 1, background=i % 2 == 0, **run.saved())
        if i % 2 == 0:
            losses.append(run.step())  # not in the checkpoint
            checkpoints.wait()
        close(losses, wanted[start : start + len(losses)], name)
        assert checkpoints.steps() == ([start] if start else []) + [start + 1]


def uninterrupted(steps: int, drop: float) -> list[float]:
    run = Run("one process", drop)
    return [run.step() for _ in range(steps)]


def close(got: list[float], want: list[float], what: str) -> None:
    worst = max(abs(g - w) for g, w in zip(got, want, strict=True))
    assert worst <= 1e-12, f"{what}: the losses are off by {worst}: {got}, not {want}"


def same(got: dict[str, str], want: dict[str, str], what: str) -> None:
    wrong = sorted(key for key in {**got, **want} if got.get(key) != want.get(key))
    assert not wrong, f"{what}: other bits: {', '.join(wrong)}"


def world_of(name: str) -> int:
    return 1 if name == "one process" else 4


def square() -> None:
    steps, more = 3, 2  # the epoch has four steps: the last one is in another order
    wanted = {p: run_on_ranks(1, uninterrupted, steps + more, p)[0] for p in (0.0, DROP)}
    for source in STRATEGIES:
        began = time.perf_counter()
        for drop, targets in by_dropout(source).items():
            with tempfile.TemporaryDirectory() as folder:
                ranks = run_on_ranks(
                    world_of(source), save, source, drop, folder, steps, timeout=300
                )
                for losses, _ in ranks:
                    close(losses, wanted[drop][: steps + 1], source)
                kept = ranks[0][1]
                for target in targets:
                    ranks = run_on_ranks(
                        world_of(target), resume, target, drop, folder, more, timeout=300
                    )
                    for start, losses, loaded in ranks:
                        assert start == steps
                        same(loaded, kept, f"{source} -> {target}")
                        close(losses, wanted[drop][steps:], f"{source} -> {target}")
        took = time.perf_counter() - began
        print(f"{source}: resumed under all {len(STRATEGIES)} ({took:.1f} s)", flush=True)
    stop()


def by_dropout(source: str) -> dict[float, list[str]]:
    """dropout -> the strategies to resume under. An interleaved schedule runs the parts of several
    micro-batches in turn, so that random calls come in another order than in one process."""
    turns = [name for name in STRATEGIES if "interleaved" in name or "interleaved" in source]
    rest = [name for name in STRATEGIES if name not in turns]
    return {drop: names for drop, names in ((DROP, rest), (0.0, turns)) if names}


if __name__ == "__main__":
    square()
