"""Schedules on real ranks: our pipeline.run against torch.distributed.pipelining's schedules of the
same name, zero bubble against our own 1f1b, and the measured bubble against theory.

    python benchmarks/pipeline.py                    # prints a table
    python benchmarks/pipeline.py --schedules zbv    # of one schedule (and 1f1b)
    python benchmarks/pipeline.py --svg out.svg      # and draws what the ranks did

A process for each stage over gloo with one thread each, equal stages of MLP layers. All sides run
in the same processes and take turns, so that noise hits them alike; of every side the best step
counts. More stages than cores measure the cores: what counts there is the time of the processors,
of all ranks together.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from table import machine
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import disttensor as dt
from disttensor import pipeline

# ours -> torch's. ZB-H1 has no name there: it is the interleaved one with one visit.
THEIRS = {
    "1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "zero_bubble": ScheduleInterleavedZeroBubble,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble, "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}  # fmt: skip


def layers(width: int, depth: int) -> nn.Sequential:
    """The same weights in every process: [rows, width] -> the same"""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


def visits(args: argparse.Namespace, name: str) -> list[dt.ProcessMesh]:
    meshes = [dt.ProcessMesh([rank], ("x",)) for rank in range(args.stages)]
    return pipeline.visits(meshes, name)


def ours(args: argparse.Namespace, data: Tensor, name: str) -> Callable[[], object]:
    model, order = layers(args.width, args.depth), visits(args, name)
    pipeline.split(model, order)
    several = len(order) > args.stages

    def step(batch: Tensor) -> Tensor:
        return model(dt.shard_tensor(batch, order[0])).square().mean()

    def whole() -> object:
        model.zero_grad()
        parts = data.chunk(args.micro_batches)
        return pipeline.run(step, parts, name, stages=order if several else None)

    return whole


def theirs(args: argparse.Namespace, data: Tensor, name: str) -> Callable[[], object]:
    rank, order = dist.get_rank(), visits(args, name)
    count, model = len(order), layers(args.width, args.depth)
    mine = [i for i, mesh in enumerate(order) if mesh.ranks == (rank,)]
    part = args.depth // count
    parts = [model[i * part : (i + 1) * part] for i in mine]
    device = torch.device("cpu")
    stages = [PipelineStage(p, i, count, device) for p, i in zip(parts, mine, strict=True)]
    schedule = THEIRS[name](
        stages[0] if name in ("1f1b", "gpipe") else stages, args.micro_batches,
        loss_fn=lambda x, _: x.square().mean(), scale_grads=False,
    )  # fmt: skip

    def whole() -> object:
        for each in parts:
            each.zero_grad()
        losses: list[Tensor] = []
        last = {"target": data, "losses": losses} if count - 1 in mine else {}
        schedule.step(*((data,) if 0 in mine else ()), **last)
        return losses

    return whole


def measure(rank: int, port: int, args: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args.stages)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dt.init_mesh((args.stages,), ("pp",))
    data = torch.randn(
        args.rows * args.micro_batches, args.width, generator=torch.Generator().manual_seed(1)
    )
    sides = {}
    for name in args.schedules:
        sides[name, "ours"] = ours(args, data, name)
        sides[name, "torch"] = theirs(args, data, name)
    best = dict.fromkeys(sides, float("inf"))
    carried = dict.fromkeys(sides, float("inf"))  # seconds of the processors
    pictures: dict[str, pipeline.Timeline] = {}
    for repeat in range(args.repeats + 1):
        for (name, side), whole in sides.items():
            dist.barrier()
            start, processor = time.perf_counter(), time.process_time()
            with pipeline.record() as recorded:
                whole()
            dist.barrier()
            seconds = time.perf_counter() - start
            everyone = torch.tensor(time.process_time() - processor)
            dist.all_reduce(everyone)
            if repeat:  # the first is the warm-up
                best[name, side] = min(best[name, side], seconds)
                carried[name, side] = min(carried[name, side], everyone.item())
            if side == "ours" and repeat:
                timeline = recorded.timeline()
                if name not in pictures or timeline.bubble < pictures[name].bubble:
                    pictures[name] = timeline
    if rank == 0:
        report(args, best, carried, pictures)
        if args.svg:
            name = args.schedules[-1]
            title = f"{name}, {args.micro_batches} micro-batches"
            print(pipeline.plot(pictures[name], args.svg, title=title))
    dist.destroy_process_group()


def report(
    args: argparse.Namespace, best: dict[tuple[str, str], float],
    carried: dict[tuple[str, str], float], pictures: dict[str, pipeline.Timeline],
) -> None:  # fmt: skip
    print(machine())
    p, m = args.stages, args.micro_batches
    print(
        f"{p} ranks, {m} micro-batches of {args.rows} rows, width {args.width}, {args.depth} layers"
    )
    print(f"{'ms a step':<24}{'ours':>8}{'torch':>8}{'ratio':>7}{'bubble':>8}{'theory':>8}", end="")
    print(f"{'CPU ms, ours':>14}{'torch':>8}{'ratio':>7}")
    spans = {}
    for name in args.schedules:
        one, other = 1e3 * best[name, "ours"], 1e3 * best[name, "torch"]
        made = pipeline.named(name, p, m, len(visits(args, name)) // p)
        theory = made.bubble(1, 2, 1)
        spans[name] = (m * 3) / (1 - theory)
        mine, torchs = 1e3 * carried[name, "ours"], 1e3 * carried[name, "torch"]
        print(
            f"{name:<24}{one:8.1f}{other:8.1f}{one / other:6.2f}x{pictures[name].bubble:8.3f}"
            f"{theory:8.3f}{mine:14.1f}{torchs:8.1f}{mine / torchs:6.2f}x"
        )
    if {"1f1b", "zero_bubble"} <= set(args.schedules):
        gain = 1 - best["zero_bubble", "ours"] / best["1f1b", "ours"]
        theory = 1 - spans["zero_bubble"] / spans["1f1b"]
        print(
            f"zero_bubble against 1f1b, ours: {100 * gain:.1f} % less time, "
            f"{100 * theory:.1f} % in theory, {100 * gain / theory:.0f} % of it"
        )
        measured = {
            name: pipeline.Costs.of(pictures[name]).span(pipeline.named(name, p, m))
            for name in ("1f1b", "zero_bubble")
        }
        possible = 1 - measured["zero_bubble"] / measured["1f1b"]
        print(f"{100 * possible:.1f} % by the times of F, B, I and W that were measured")


def main() -> None:
    parser = argparse.ArgumentParser(description="Schedules, ours and torch's.")
    parser.add_argument("--schedules", nargs="+", choices=THEIRS, default=[*THEIRS])
    parser.add_argument("--stages", type=int, default=2, help="and ranks")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=256, help="of a micro-batch")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8, help="layers of the whole model")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--svg", help="draw the run of the last schedule with the smallest bubble")
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(measure, (port, args), nprocs=args.stages)


if __name__ == "__main__":
    main()
