"""Whole training steps under data parallelism, ours and torch's DDP and FSDP2 side by side: time,
and bytes on the wire.

    python benchmarks/data_parallel.py                                  # 2 and then 4 ranks
    python benchmarks/data_parallel.py --ranks 2 --only "stage 3"
    python benchmarks/data_parallel.py --markdown docs/performance.md  # and write the section

Processes over gloo with one thread each. The sides of a row take turns, step by step, so that noise
hits them alike, and they must compute the same losses.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from replicas import GPT, Settings, Side, compiled, ddp, free_port, fsdp, kept, ours, zero3
from table import OTHERS, machine, markdown
from torch.utils._python_dispatch import TorchDispatchMode

import disttensor as dt


class Moves(NamedTuple):
    """What theory sends in a step: how often all parameters are gathered, and those of the blocks
    once more; how often gradients are reduce-scattered; and how often what a rank holds of them is
    all-reduced among replicas."""

    gathers: int
    again: int
    scatters: int
    reduces: int

    def bytes(self, settings: Settings, shape: Sequence[int]) -> float:
        """Of one rank, for a mesh of (replicas, shards), with ring algorithms."""
        model = GPT(settings)
        whole, blocks = (4 * sum(p.numel() for p in m.parameters()) for m in (model, model.blocks))
        replicas, shards = shape
        moved = whole * (self.gathers + self.scatters) + blocks * self.again
        return (
            moved * (shards - 1) / shards
            + 2 * self.reduces * whole / shards * (replicas - 1) / replicas
        )


@dataclass(frozen=True)
class Row:
    name: str
    peer: str
    ours: Side
    theirs: Side
    shape: tuple[int, int]  # replicas, shards
    moves: Moves
    micro: int = 1


def rows(n: int) -> list[Row]:
    """Those that n ranks can run."""
    spread, once, twice = (1, n), Moves(1, 0, 1, 0), Moves(1, 1, 1, 0)
    replicas = partial(ours, shard_axis=None)
    out = [
        Row("replicas", "DDP", replicas, ddp, (n, 1), Moves(0, 0, 0, 1)),
        Row("replicas", "DDP, gradients as views of buckets", replicas,
            partial(ddp, gradient_as_bucket_view=True),
            (n, 1), Moves(0, 0, 0, 1)),
        Row("replicas, compiled", "DDP, compiled", partial(compiled, replicas),
            partial(compiled, ddp), (n, 1), Moves(0, 0, 0, 1)),
        Row("stage 3", "FSDP2", zero3, fsdp, spread, twice),
        Row("stage 3, compiled", "FSDP2, blocks compiled", partial(compiled, zero3),
            partial(compiled, fsdp), spread, twice),
        Row("stage 3, kept after the forward", "FSDP2", kept, partial(fsdp, after_forward=False),
            spread, once),
        Row('stage 3, accumulate "scatter"', "FSDP2", zero3, fsdp, spread, Moves(4, 4, 4, 0), 4),
        Row('stage 3, accumulate "none"', "FSDP2, gradient sync at the last",
            partial(zero3, reduce="none"),
            partial(fsdp, reduce="none"), spread, Moves(4, 4, 1, 0), 4),
        Row('stage 3 kept, accumulate "scatter"', "FSDP2", kept,
            partial(fsdp, after_forward=False), spread, Moves(4, 0, 4, 0), 4),
        Row('stage 3 kept, accumulate "none"', "FSDP2, gradient sync at the last",
            partial(kept, reduce="none"),
            partial(fsdp, after_forward=False, reduce="none"), spread, Moves(4, 0, 1, 0), 4),
    ]  # fmt: skip
    if n >= 4:
        two = (2, n // 2)
        hybrid, torchs = partial(zero3, shape=two, replicate_axis="rep"), partial(fsdp, shape=two)
        out += [
            Row("HSDP", "FSDP2", hybrid, torchs, two, Moves(1, 1, 1, 1)),
            Row('HSDP, accumulate "scatter"', "FSDP2, all-reduce at the last", hybrid,
                partial(torchs, reduce="scatter"), two, Moves(4, 4, 4, 1), 4),
            Row('HSDP, accumulate "none"', "FSDP2, gradient sync at the last",
                partial(hybrid, reduce="none"),
                partial(torchs, reduce="none"), two, Moves(4, 4, 1, 1), 4),
        ]  # fmt: skip
    return out


@dataclass
class Result:
    """Of each side, ours first: ``seconds`` and ``cpu`` (of one rank with all its threads) of each
    step, and bytes."""

    row: str
    peer: str
    ranks: int
    seconds: tuple[list[float], list[float]]
    cpu: tuple[list[float], list[float]]
    sent: tuple[int, int]
    theory: float

    def cells(self) -> list[str]:
        best = min(self.seconds[0]) / min(self.seconds[1])
        pairs = statistics.median(a / b for a, b in zip(*self.seconds, strict=True))
        cpu = statistics.median(self.cpu[0]) / statistics.median(self.cpu[1])
        sent = [f"{some / 1e6:.2f}" for some in (*self.sent, self.theory)]
        return [
            self.row,
            str(self.ranks),
            self.peer,
            *(f"{x:.2f}x" for x in (best, pairs, cpu)),
            *sent,
        ]


COLUMNS = ("", "ranks", "peer", "best step", "pairs", "CPU", "MB sent", "by peer", "theory")


class Wire(TorchDispatchMode):
    """Counts what this rank sends (ring algorithms), for the model or for its sharded state."""

    sees_engine = True  # of disttensor.fsdp

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if name != func._schema.name:
            tensors, n = _tensors(args), _group(args).size()
            if name.startswith("allreduce"):
                self.bytes += 2 * (n - 1) * sum(t.nbytes for t in tensors) // n
            elif name.startswith("alltoall_base"):
                self.bytes += (n - 1) * tensors[0].nbytes // n
            elif name.startswith(("_allgather_base", "_reduce_scatter_base")):
                self.bytes += (n - 1) * min(t.nbytes for t in tensors)
            else:
                raise NotImplementedError(f"how much does {func._schema} send?")
        return func(*args, **(kwargs or {}))


def _tensors(args: Any) -> list[Any]:
    lists = [a if isinstance(a, (list, tuple)) else [a] for a in args]
    return [t for some in lists for t in some if isinstance(t, torch.Tensor)]


def _group(args: Any) -> Any:
    found = next(a for a in args if isinstance(a, torch.ScriptObject))
    return dist.ProcessGroup.unbox(found)


def measure(rank: int, port: int, n: int, args: argparse.Namespace, results: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(n)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dt.init_mesh((n,), ("dp",))
    for row in rows(n):
        if args.only.lower() in f"{row.name} / {row.peer}".lower():
            result = measured(row, replace(settings_of(args), micro=row.micro), args.repeats)
            if rank == 0:
                times = [f"{1e3 * min(some):.1f} ms" for some in result.seconds]
                print(*result.cells(), *times, sep="  ", file=sys.stderr, flush=True)
                results.put(result)
    dist.destroy_process_group()


def measured(row: Row, settings: Settings, repeats: int) -> Result:
    """Raises AssertionError where the two sides' losses differ."""
    steps = [side(settings) for side in (row.ours, row.theirs)]
    for _ in range(4):  # the warm-up
        losses = [step() for step in steps]
        for loss in losses:
            dist.all_reduce(loss)
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    sent = []
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
    theory = row.moves.bytes(settings, row.shape)
    ranks = dist.get_world_size()
    return Result(row.name, row.peer, ranks, seconds, cpu, (sent[0], sent[1]), theory)


SECTION = """\
{heading}

Whole training steps (zero_grad, forward, backward, fused AdamW) of one GPT, by
`dt.shard_data_parallel` and by torch. Ratios are ours divided by the peer's: below 1 is faster.

{table}

- {machine}.
- Command: `{command}`.
- Processes on this one machine over gloo, one thread each, {cores}.
- Model: {model}
- The two sides of a row live in the same processes and take turns, step by step, {repeats} each
  after a warm-up, in which their losses must agree. *best step*: ratio of the fastest steps, in
  wall-clock time. *pairs*: the median over consecutive steps. *CPU*: processor time of a rank with
  all its threads, medians; time used by other programs does not count.
- *MB sent*: bytes that one rank sends in a step, counted at the collectives of both sides, for ring
  algorithms. *theory*: an all-reduce sends 2 (n-1)/n of its size, an all-gather or a reduce-scatter
  (n-1)/n. Ours adds 4 bytes per parameter tensor (on how many ranks it has a gradient) and pads
  tensors that do not divide evenly.
- Replicas: our default segments; DDP's default buckets (25 MB). Stage 3 and FSDP2: a segment per
  block, and the rest. Accumulation: 4 micro-batches. HSDP: 2 replicas of {shards}.

This picture shows one rank during a step: `python benchmarks/overlap.py --svg docs/overlap.svg`

![Collectives under way during the backward](overlap.svg)
"""


def settings_of(args: argparse.Namespace) -> Settings:
    return Settings(args.width, args.depth, args.rows, args.time)


def section(results: Sequence[Result], args: argparse.Namespace) -> str:
    settings = settings_of(args)
    model = (
        f"{settings.depth} blocks of width {settings.width}, {settings.numel * 4 / 1e6:.0f} MB of "
        f"parameters in fp32, {settings.rows} x {settings.time} tokens per rank and micro-batch."
    )
    cores = f"{os.cpu_count()} cores for {' or '.join(map(str, args.ranks))} ranks"
    return SECTION.format(
        heading=OTHERS,
        table=markdown(COLUMNS, [r.cells() for r in results], texts=(0, 2)),
        machine=machine(),
        command=" ".join(["python benchmarks/data_parallel.py", *sys.argv[1:]]),
        cores=cores,
        model=model,
        repeats=args.repeats,
        shards=max(args.ranks) // 2,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=4, help="blocks")
    parser.add_argument("--rows", type=int, default=1, help="of the batch of a rank")
    parser.add_argument("--time", type=int, default=64, help="tokens of a row")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has it")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the section there too")
    args = parser.parse_args()
    results: list[Result] = []
    for n in args.ranks:
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(measure, (free_port(), n, args, queue), nprocs=n)
        while not queue.empty():
            results.append(queue.get())
    print(markdown(COLUMNS, [r.cells() for r in results], texts=(0, 2)))
    if args.markdown:
        page = args.markdown.read_text(encoding="utf-8") if args.markdown.exists() else ""
        before = page.split(OTHERS)[0].rstrip()
        after = "".join(page.partition(OTHERS)[2].partition("\n## ")[1:])  # other sections
        whole = f"{before}\n\n{section(results, args)}{after}".rstrip() + "\n"
        args.markdown.write_text(whole, encoding="utf-8")


if __name__ == "__main__":
    main()
