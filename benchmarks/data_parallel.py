"""Whole training steps under data parallelism, ours and torch's DDP and FSDP2 side by side: time, and bytes on the wire.

    python benchmarks/data_parallel.py --ranks 4

Processes over gloo with one thread each. The sides of a row take turns, step by step, so that noise hits them alike, and they
must compute the same losses.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from replicas import Settings, Side, ddp, free_port, fsdp, kept, ours, zero3
from torch.utils._python_dispatch import TorchDispatchMode

import disttensor as dt


@dataclass(frozen=True)
class Row:
    name: str
    ours: Side
    theirs: Side
    micro: int = 1
    ranks: int = 2  # the least


def rows(ranks: int) -> list[Row]:
    two = (2, ranks // 2)
    return [
        Row("replicas / DDP, buckets as views", partial(ours, shard_axis=None), partial(ddp, gradient_as_bucket_view=True)),
        Row("replicas / DDP", partial(ours, shard_axis=None), ddp),
        Row("stage 3 / FSDP2", zero3, fsdp),
        Row("stage 3, kept after forward / FSDP2", kept, partial(fsdp, after_forward=False)),
        Row("stage 3, 4 micro-batches, scatter / FSDP2", zero3, fsdp, 4),
        Row("stage 3, 4 micro-batches, none / FSDP2", partial(zero3, reduce="none"), partial(fsdp, reduce="none"), 4),
        Row("HSDP / FSDP2", partial(zero3, shape=two, replicate_axis="rep"), partial(fsdp, shape=two), 1, 4),
        Row("HSDP, 4 micro-batches, scatter / FSDP2", partial(zero3, shape=two, replicate_axis="rep"),
            partial(fsdp, shape=two, reduce="scatter"), 4, 4),
    ]  # fmt: skip


@dataclass
class Result:
    row: str
    seconds: tuple[list[float], list[float]]  # of each step, ours and theirs
    cpu: tuple[
        list[float], list[float]
    ]  # seconds of the processor, of this rank with all its threads
    sent: tuple[int, int]  # bytes per rank and step

    @property
    def ratio(self) -> float:
        """Of the best steps."""
        return min(self.seconds[0]) / min(self.seconds[1])

    @property
    def work(self) -> float:
        """Of the processor's time: what other processes take away does not count."""
        return statistics.median(self.cpu[0]) / statistics.median(self.cpu[1])


def paired(seconds: tuple[list[float], list[float]]) -> float:
    """The median of the ratios of neighbours in time."""
    return statistics.median(a / b for a, b in zip(*seconds, strict=True))


class Wire(TorchDispatchMode):
    """Counts what this rank sends (ring algorithms), whoever asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if name != func._schema.name:
            tensors, n = _tensors(args), _group(args).size()
            if name.startswith("allreduce"):
                self.bytes += 2 * (n - 1) * sum(t.nbytes for t in tensors) // n
            elif name.startswith(
                ("_allgather_base", "_reduce_scatter_base", "allgather", "reduce_scatter")
            ):
                self.bytes += (n - 1) * min(t.nbytes for t in tensors)
            elif name != "barrier":
                raise NotImplementedError(f"{func._schema}")
        return func(*args, **(kwargs or {}))


def _tensors(args: Any) -> list[Any]:
    lists = [a if isinstance(a, (list, tuple)) else [a] for a in args]
    return [t for some in lists for t in some if isinstance(t, torch.Tensor)]


def _group(args: Any) -> Any:
    found = next(a for a in args if isinstance(a, torch.ScriptObject))
    return dist.ProcessGroup.unbox(found)


def measure(rank: int, port: int, args: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args.ranks)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dt.init_mesh((args.ranks,), ("dp",))
    settings = Settings(args.width, args.depth, args.rows, args.time)
    if rank == 0:
        print(
            f"{args.ranks} ranks, {settings.numel * 4 / 1e6:.1f} MB of parameters, {settings}",
            flush=True,
        )
    for row in rows(args.ranks):
        if args.only.lower() in row.name.lower() and args.ranks >= row.ranks:
            result = measured(row, settings, args.repeats)
            if rank == 0:
                report(result)
    dist.destroy_process_group()


def measured(row: Row, settings: Settings, repeats: int) -> Result:
    settings = replace(settings, micro=row.micro)
    steps = [side(settings) for side in (row.ours, row.theirs)]
    sent = []
    for _ in range(3):  # the warm-up
        losses = [step() for step in steps]
        for loss in losses:
            dist.all_reduce(loss)
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    for step in steps:
        with Wire() as wire:
            step()
        sent.append(wire.bytes)
    seconds: tuple[list[float], list[float]] = [], []
    cpu: tuple[list[float], list[float]] = [], []
    gc.collect()
    gc.freeze()
    for _ in range(repeats):
        for step, taken, worked in zip(steps, seconds, cpu, strict=True):
            gc.collect()
            gc.disable()
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            step()
            worked.append(time.process_time() - busy)
            dist.barrier()
            taken.append(time.perf_counter() - start)
            gc.enable()
    gc.unfreeze()
    return Result(row.name, seconds, cpu, (sent[0], sent[1]))


def report(result: Result) -> None:
    a, b = (1e3 * min(some) for some in result.seconds)
    x, y = (some / 1e6 for some in result.sent)
    print(
        f"{result.row:<45} {a:8.1f} ms {b:8.1f} ms  {result.ratio:.2f}x (in pairs {paired(result.seconds):.2f}x, CPU {result.work:.2f}x)"
        f"  {x:.2f} MB / {y:.2f} MB sent",
        flush=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=4, help="blocks")
    parser.add_argument("--rows", type=int, default=1, help="of the batch of a rank")
    parser.add_argument("--time", type=int, default=64, help="tokens of a row")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has it")
    args = parser.parse_args()
    mp.spawn(measure, (free_port(), args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
