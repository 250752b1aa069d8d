"""Random chains of stages under ``pipeline.run`` with random schedules: losses and gradients as of
one process.

python -m tests.fuzz.fuzz_pipeline --seeds 0:100 --world 2
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from disttensor import pipeline
from disttensor.pipeline import Action, Schedule
from tests.fuzz.command_line import fuzz
from tests.support import pool
from tests.support.oracle import randn
from tests.support.stages import Stages, check_stages, stage_meshes

KINDS = {2: (2,), 4: (1, 3, 4)}  # of tests.support.stages.stage_meshes
WIDTH = 5


@dataclass(frozen=True)
class Chain:
    """``skips``: (from, to, how) of values between stages that are not neighbours, or are;
    ``ties``: (from, to) of parameters; ``redone``: stages that are computed again in the
    backward."""

    kind: int
    stages: int
    chunks: int
    rows: tuple[int, ...]
    skips: tuple[tuple[int, int, str], ...]
    ties: tuple[tuple[int, int], ...]
    redone: frozenset[int]
    schedule: Any
    seed: int

    def __call__(self, on: Stages) -> Any:
        visits = self.stages * self.chunks
        params = [on.leaf(randn(WIDTH, WIDTH, seed=v), v) for v in range(visits)]

        def step(numbered: tuple[int, Any]) -> Any:
            number, batch = numbered
            # placements drawn for each micro-batch: ranks do not run them in one order
            at = Stages(on.meshes, on.seed and on.seed * 100 + number)
            x, made = at.value(batch, 0), []
            for v, w in enumerate(params):
                x = x if v == 0 else at.to(x, v)
                for source, target, how in self.skips:
                    if target == v:
                        x = self.joined(at, x, made[source], v, how)
                for source, target in self.ties:
                    if target == v:
                        x = x @ at.to(params[source], v)
                x = self.layer(x, w, v in self.redone)
                made.append(x)
            return (x**2).mean()

        batches = [(i, randn(n, WIDTH, seed=i + 50)) for i, n in enumerate(self.rows)]
        if on.meshes is None:
            return [step(b) for b in batches]
        return pipeline.run(step, batches, self.schedule, stages=list(on.meshes) * self.chunks)

    def joined(self, on: Stages, x: Any, y: Any, v: int, how: str) -> Any:
        if how == "mask":
            return x * on.to(y > 0, v).double() + x
        return x + on.to(y.detach() if how == "detached" else y * 2 if how == "twice" else y, v)

    def layer(self, x: Any, w: Any, again: bool) -> Any:
        def run(x: Any) -> Any:
            return torch.tanh(torch.nn.functional.linear(x, w)) * x.sum().sin()

        return checkpoint(run, x, use_reentrant=False) if again else run(x)


def schedule_of(draw: random.Random, stages: int, batches: int, chunks: int) -> Schedule:
    """Any order that can be carried out: whatever is possible next, by chance."""
    orders: list[list[Action]] = [[] for _ in range(stages)]
    visits, done = stages * chunks, set()
    waiting: list[list[Action]] = [[] for _ in range(stages)]
    parts = draw.choice((0.0, 0.5, 1.0))  # of the backwards are I and W
    while len(done) < 2 * visits * batches:
        ready = [
            (kind, v, m)
            for m in range(batches)
            for v in range(visits)
            for kind, needs in (
                ("F", [("F", v - 1, m)] if v else []),
                ("B", [("F", v, m), *([("B", v + 1, m)] if v + 1 < visits else [])]),
            )
            if (kind, v, m) not in done and all(n in done for n in needs)
        ]
        put_off = [(stage, a) for stage, row in enumerate(waiting) for a in row]
        if put_off and draw.random() < 0.3:
            stage, action = draw.choice(put_off)
            waiting[stage].remove(action)
            orders[stage].append(action)
            continue
        kind, v, m = draw.choice(ready)
        done.add((kind, v, m))
        action = Action(kind, m, v // stages)
        if kind == "B" and draw.random() < parts:
            action = action._replace(kind="I")
            waiting[v % stages].append(action._replace(kind="W"))
        orders[v % stages].append(action)
    return Schedule([[*row, *late] for row, late in zip(orders, waiting, strict=True)])


def make(seed: int, world: int) -> Chain:
    draw = random.Random(f"{seed} {world}")
    kind = draw.choice(KINDS[world])
    stages = {1: 4, 2: 2, 3: 3, 4: 2}[kind]
    chunks, batches = draw.choice((1, 1, 2, 3)), draw.randint(1, 6)
    visits = stages * chunks
    pairs = [(a, b) for a in range(visits) for b in range(a + 1, visits)]
    skips = draw.sample(pairs, min(len(pairs), draw.randint(0, 2)))
    names = ["gpipe", *(("1f1b", "zero_bubble") if chunks == 1 else
                        ("interleaved_1f1b", "interleaved_zero_bubble"))]  # fmt: skip
    return Chain(
        kind,
        stages,
        chunks,
        tuple(draw.randint(1, 4) for _ in range(batches)),
        tuple((a, b, draw.choice(("", "twice", "mask", "detached"))) for a, b in skips),
        tuple(draw.sample(pairs, min(len(pairs), draw.randint(0, 1)))),
        frozenset(v for v in range(visits) if draw.random() < 0.2),
        draw.choice([*names, schedule_of(draw, stages, batches, chunks)]),
        draw.choice((0, seed)),
    )


def backward(losses: Sequence[Any]) -> None:
    for loss in losses:
        if loss.requires_grad:
            loss.backward()


def check(chain: Chain) -> None:
    check_stages(chain, stage_meshes(chain.kind), chain.seed, backward, same_flags=False)


def main(first: int, last: int, world: int) -> int:
    """How many of these seeds fail; each is printed."""
    failed = 0
    for seed in range(first, last):
        chain = make(seed, world)
        try:
            pool.run_on_ranks(world, check, chain, timeout=15.0)
        except pool.RanksFailed as error:
            failed += 1
            print(f"seed {seed}: {chain}\n{str(error)[:5000]}\n", flush=True)
    pool.stop()
    return failed


if __name__ == "__main__":
    from tests.fuzz import fuzz_pipeline  # not __main__: the ranks find its functions by name

    fuzz(__doc__, "chains", fuzz_pipeline.main)
