"""What the first training step costs beside a warm one, in plain torch and on meshes.

    python benchmarks/first_step.py                # a table
    python benchmarks/first_step.py --repeats 9    # of so many processes for each side

Each side runs in processes of its own, in turns, as what is first happens once in a process: rank 0
of a world of eight whose process group is PyTorch's ``fake`` backend, with one thread. A step is
that of the example's GPT: forward, backward, AdamW, zero_grad; in the sizes that the example has by
default, and tiny, where a step is hardly more than its calls. CPU time; the best process counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from table import machine, markdown
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig

SIDES = ("plain", "one rank", "dp 8", "tp 8", "dp 2, tp 4", "pp 2, another stage")
COLUMNS = ("", "model", "first step", "warm step", "first - warm", "first / warm", "aim", "met")
AIM = 1.5
STEPS = 8  # after the first


class Size(NamedTuple):
    """batch: sequences of a global step."""

    config: GPTConfig
    batch: int


SIZES = {
    "the example's": Size(GPTConfig(), 8),
    "tiny": Size(GPTConfig(layers=4, width=64, heads=4, context=32), 8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="processes of each side (5)")
    parser.add_argument("--only", default="", metavar="TEXT", help="sides whose name has it")
    parser.add_argument("--child", nargs=2, metavar=("SIZE", "SIDE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        size, side = args.child
        print(json.dumps(seconds(SIZES[size], side)))
        return
    which = [(size, side) for size in SIZES for side in SIDES if args.only in side]
    runs: dict[tuple[str, str], list[tuple[float, float]]] = {one: [] for one in which}
    for _ in range(args.repeats):
        for one in which:
            command = [sys.executable, __file__, "--child", *one]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            runs[one].append(json.loads(done.stdout))
    rows = [cells(*one, *map(min, zip(*times, strict=True))) for one, times in runs.items()]
    print(f"{markdown(COLUMNS, rows, texts=(0, 1))}\n\n{machine()}")


def cells(size: str, side: str, first: float, warm: float) -> list[str]:
    ratio = first / warm
    aim = ["", ""] if side == "plain" else [f"≤ {AIM:g}x", "yes" if ratio <= AIM else "no"]
    times = [f"{some * 1e3:.1f} ms" for some in (first, warm, first - warm)]
    return [side, size, *times, f"{ratio:.2f}x", *aim]


def seconds(size: Size, side: str) -> tuple[float, float]:
    """CPU seconds of the first step in this process, and of the best of those that follow."""
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(1)
    step = plain(size) if side == "plain" else ours(size, side)
    times = []
    for _ in range(1 + STEPS):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return times[0], min(times[1:])


def plain(size: Size) -> Callable[[], None]:
    torch.manual_seed(0)
    ids, targets = tokens(size)
    return training(GPT(size.config), lambda: (ids, targets))


def ours(size: Size, side: str) -> Callable[[], None]:
    from sides import start_fake_world
    from train_gpt import LAYERS, PLAN

    import disttensor as dt

    start_fake_world()
    dt.manual_seed(0)
    degrees = {name: int(n) for name, n in (w.split() for w in side.split(", ") if w[-1].isdigit())}
    if side == "one rank":
        mesh = dt.ProcessMesh([0], ("dp",))
        stages, placements = [mesh, mesh], [dt.Replicate()]
        model = dt.shard_module(GPT(size.config), mesh, {})
    else:
        strategy = dt.Strategy(**(degrees if "pp" not in degrees else {"pp": 2, "dp": 4}))
        stages, placements = strategy.stages(), strategy.batch()
        if "pp" in degrees:  # this is rank 0: it is to be in the other one
            stages = stages[::-1]
        model = GPT(size.config)
        strategy.apply(model, plan=PLAN, layers=LAYERS, visits=stages)
    ids, targets = tokens(size)

    def batch() -> tuple[Tensor, Tensor]:
        return (
            dt.shard_tensor(ids, stages[0], placements),
            dt.shard_tensor(targets, stages[-1], placements),
        )

    return training(model, batch)


def tokens(size: Size) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the whole batch."""
    shape = (size.batch, size.config.context)
    return torch.randint(size.config.vocab, shape), torch.randint(size.config.vocab, shape)


def training(model: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        ids, targets = batch()
        F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
