"""The step of Muon: in one process, under DDP, and by us without and with owners, in one run.

    python benchmarks/owners.py                       # 2 and then 4 ranks
    python benchmarks/owners.py --ranks 2 --width 512

Processes over gloo with one thread each. The sides take turns, round by round, so that noise hits
them alike. A time lies between two barriers: it is the time of the slowest rank. "cpu" is the
processor's time of the rank that computes most, which other programs on the machine do not change
much. The gradients of DDP are summed in its backward, ours in the step. "aim" is 1.15 times the sum
of (one process / ranks) and the time of AdamW's step of the same matrices.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from replicas import GPT, Settings, batches, made, on_ranks
from table import machine
from torch.nn.parallel import DistributedDataParallel

import disttensor as dt

Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
WAYS: dict[str, dict[str, Any]] = {
    "dp": {"shard_axis": None}, "stage 1": {"stage": 1}, "stage 3": {"stage": 3},
}  # fmt: skip


def muon(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.01)


def owned(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return dt.optim.own(muon(params))


def adamw(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


class Side:
    """A model, its batch, and the optimizer of the matrices of its blocks."""

    def __init__(self, settings: Settings, make: Make, way: dict[str, Any] | str) -> None:
        model: Any = made(settings)
        data = batches(settings)[0]
        if isinstance(way, dict):
            mesh = dt.init_mesh((dist.get_world_size(),), ("fsdp",))
            model = dt.shard_data_parallel(model, mesh, **way)
            self.data = [dt.shard_tensor(x, mesh, [dt.Shard(0)]) for x in data]
        else:
            rank, n = dist.get_rank(), dist.get_world_size()
            self.data = [*data] if way == "one process" else [x.chunk(n)[rank] for x in data]
        blocks = model.blocks
        if way == "DDP":
            model = DistributedDataParallel(model)
        self.model, self.matrices = model, [p for p in blocks.parameters() if p.ndim == 2]
        self.optimizer = make(self.matrices)

        self.runs = way != "one process" or dist.get_rank() == 0

    def backward(self) -> None:
        self.model.zero_grad()
        if self.runs:
            self.model(*self.data).backward()
        dist.barrier()

    def __call__(self) -> tuple[float, float]:
        """Returns the time of a step of the optimizer, and the processor's time of this rank."""
        self.backward()
        wall, cpu = time.perf_counter(), time.process_time()
        if self.runs:
            self.optimizer.step()
        cpu = time.process_time() - cpu
        dist.barrier()
        return time.perf_counter() - wall, cpu


def sides(settings: Settings) -> dict[str, Side]:
    out = {
        "one process, Muon": Side(settings, muon, "one process"),
        "DDP, Muon": Side(settings, muon, "DDP"),
    }
    for name, way in WAYS.items():
        out[f"{name}, AdamW"] = Side(settings, adamw, way)
        out[f"{name}, Muon"] = Side(settings, muon, way)
        out[f"{name}, Muon, owners"] = Side(settings, owned, way)
    return out


def rank_main(rank: int, n: int, port: int, args: Any, results: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ["WORLD_SIZE"] = str(n)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    settings = Settings(width=args.width, depth=args.depth)
    runs = {k: v for k, v in sides(settings).items() if k.startswith(("one", *args.only))}
    sent = {}
    for name, side in runs.items():
        side()  # makes state, groups and plans
        with dt.debugging.record_comms() as comms:
            side.optimizer.step()
        sent[name] = comms.total_bytes
        dist.barrier()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, side in runs.items():
            taken[name].append(side())
    everyone: list[Any] = [None] * n
    dist.all_gather_object(everyone, (taken, sent))
    if rank == 0:
        results[n] = {
            name: (
                statistics.median(wall for wall, _ in taken[name]),
                max(statistics.median(cpu for _, cpu in theirs[name]) for theirs, _ in everyone),
                max(bytes_[name] for _, bytes_ in everyone),
            )
            for name in runs
        }
        results["matrices"] = sum(4 * p.numel() for p in GPT(settings).blocks.parameters())
    dist.destroy_process_group()


def table(n: int, of: dict[str, tuple[float, float, int]], size: int) -> list[str]:
    one, one_cpu, _ = of["one process, Muon"]
    lines = [
        f"| {n} ranks | step, ms | of one process | cpu, ms | of one process | aim, ms | sent, of "
        "the matrices |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (wall, cpu, sent) in of.items():
        aim = ""
        if name.endswith("owners"):
            plain = of[name.replace("Muon, owners", "AdamW")]
            goals = 1.15e3 * (one / n + plain[0]), 1.15e3 * (one_cpu / n + plain[1])
            aim = f"{goals[0]:.0f} (cpu {goals[1]:.0f})"
        lines.append(
            f"| {name} | {1e3 * wall:.0f} | {wall / one:.2f} | {1e3 * cpu:.0f} | "
            f"{cpu / one_cpu:.2f} | {aim} | {sent / size:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=["DDP", *WAYS], help="sides, by their names")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    print(f"{args.depth} blocks of width {args.width}; {machine()}\n")
    for n in args.ranks:
        results = on_ranks([n], rank_main, args)
        print("\n".join(table(n, results[n], results["matrices"])), end="\n\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
