"""How long a rank waits for each collective of a tensor-parallel block, with reductions of the
backward begun ahead of the gradients of weights, and with each where its result is needed.

    python benchmarks/tensor_parallel.py
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from replicas import free_port
from table import machine
from torch import Tensor, nn

import disttensor as dt
from disttensor.autograd import grad_types
from disttensor.comm import collectives
from disttensor.comm.work import Work

HEAD = 64
SPLIT = {f"{name}.weight": [dt.Shard(0)] for name in ("q", "k", "v", "gate", "up")}
SPLIT |= {f"{name}.weight": [dt.Shard(1)] for name in ("o", "down")}
NAMES = (  # in the order of a step
    "forward: attention's result", "forward: MLP's result",
    "backward: MLP's input, beside gate and up", "backward: attention's input, beside q, k and v",
)  # fmt: skip


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(-2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Span(NamedTuple):
    """Seconds: from its begin to the end of the wait for it, and what of that was waiting."""

    lasts: float
    waits: float


@contextmanager
def watched(spans: list[Span]) -> Iterator[None]:
    """A span for each collective, in the order in which they begin."""
    run, start, wait = collectives.run, collectives.start, Work.wait
    begun: dict[Any, tuple[int, float]] = {}

    def ran(*args: Any, **options: Any) -> Any:
        at = time.perf_counter()
        result = run(*args, **options)
        spent = time.perf_counter() - at
        spans.append(Span(spent, spent))
        return result

    def started(*args: Any, **options: Any) -> Any:
        at = time.perf_counter()
        work = start(*args, **options)
        begun[work] = len(spans), at
        spans.append(Span(0, 0))
        return work

    def waited(work: Any) -> Any:
        at = time.perf_counter()
        result = wait(work)
        if work in begun:
            number, since = begun.pop(work)
            now = time.perf_counter()
            spans[number] = Span(now - since, now - at)
        return result

    waiting = mock.patch.object(Work, "wait", waited)
    with mock.patch.multiple(collectives, run=ran, start=started), waiting:
        yield


def measure(rank: int, port: int, args: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args.ranks)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh = dt.init_mesh((args.ranks,), ("tp",))
    block = dt.shard_module(Block(args.width, args.hidden), mesh, SPLIT)
    x = dt.shard_tensor(torch.randn(1, args.time, args.width), mesh).requires_grad_()
    sides = {
        "in turn": lambda: mock.patch.object(grad_types, "reduction", lambda *_: None),
        "ahead": nullcontext,
    }
    found: dict[str, list[list[Span]]] = {side: [] for side in sides}
    steps: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(args.repeats + 2):
        for side, way in sides.items():
            block.zero_grad()
            spans: list[Span] = []
            dist.barrier()
            at = time.perf_counter()
            with way(), watched(spans):
                block(x * 1.0).square().mean().backward()
            if repeat >= 2:  # after the warm-up
                steps[side].append(time.perf_counter() - at)
                found[side].append(spans)
    if rank == 0:
        print(machine(), end="\n\n")
        print(report(found, steps))
    dist.destroy_process_group()


def report(found: dict[str, list[list[Span]]], steps: dict[str, list[float]]) -> str:
    """The least of the repeats, in milliseconds."""

    def of(side: str, number: int, what: str) -> str:
        return f"{1e3 * min(getattr(spans[number], what) for spans in found[side]):.2f}"

    rows = [("collective", "waited, in turn", "under way, ahead", "waited, ahead")]
    for number, name in enumerate(NAMES):
        cells = of("in turn", number, "waits"), of("ahead", number, "lasts")
        rows.append((name, *cells, of("ahead", number, "waits")))
    turn, ahead = (f"{1e3 * min(steps[side]):.2f}" for side in steps)
    rows.append(("forward and backward", turn, "", ahead))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        "| " + " | ".join(c.ljust(w) if not i else c.rjust(w) for i, (c, w) in cells) + " |"
        for cells in (list(enumerate(zip(row, widths, strict=True))) for row in rows)
    ]
    rule = "| " + " | ".join("-" * (w - 1) + ("-" if not i else ":") for i, w in enumerate(widths))
    return "\n".join([lines[0], rule + " |", *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--time", type=int, default=512, help="tokens")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    mp.spawn(measure, (free_port(), args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
