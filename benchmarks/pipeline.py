"""1F1B on two real ranks: our pipeline.run against torch.distributed.pipelining, and the measured
bubble against theory.

    python benchmarks/pipeline.py                # prints a table
    python benchmarks/pipeline.py --svg out.svg  # and draws what the ranks did

Two processes over gloo with one thread each, two equal stages of MLP layers. Both sides run in the
same processes and take turns, so that noise hits them alike; of every side the best step counts.
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import disttensor as dt
from disttensor import pipeline

STAGES = 2


def layers(width: int, depth: int) -> nn.Sequential:
    """The same weights in every process: [rows, width] -> the same"""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


def ours(args: argparse.Namespace, data: Tensor) -> Callable[[], object]:
    model = layers(args.width, args.depth)
    meshes = [dt.ProcessMesh([rank], ("x",)) for rank in range(STAGES)]
    half = args.depth // STAGES
    for number, layer in enumerate(model):
        dt.shard_module(layer, meshes[number // half])

    def step(batch: Tensor) -> Tensor:
        x = dt.shard_tensor(batch, meshes[0])
        for number, layer in enumerate(model):
            x = layer(dt.reshard(x, meshes[number // half]) if number % half == 0 and number else x)
        return x.square().mean()

    def whole() -> object:
        model.zero_grad()
        return pipeline.run(step, data.chunk(args.micro_batches), "1f1b")

    return whole


def theirs(args: argparse.Namespace, data: Tensor) -> Callable[[], object]:
    rank = dist.get_rank()
    half = args.depth // STAGES
    mine = layers(args.width, args.depth)[rank * half : (rank + 1) * half]
    stage = PipelineStage(mine, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, args.micro_batches, loss_fn=lambda x, _: x.square().mean(), scale_grads=False
    )

    def whole() -> object:
        mine.zero_grad()
        if rank == 0:
            return schedule.step(data)
        losses: list[Tensor] = []
        schedule.step(target=data, losses=losses)
        return losses

    return whole


def measure(rank: int, port: int, args: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(STAGES)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dt.init_mesh((STAGES,), ("pp",))
    data = torch.randn(
        args.rows * args.micro_batches, args.width, generator=torch.Generator().manual_seed(1)
    )
    sides = {"pipeline.run": ours(args, data), "Schedule1F1B": theirs(args, data)}
    best = dict.fromkeys(sides, float("inf"))
    bubble, picture = 1.0, None
    for repeat in range(args.repeats + 1):
        for name, whole in sides.items():
            dist.barrier()
            start = time.perf_counter()
            with pipeline.record() as recorded:
                whole()
            dist.barrier()
            seconds = time.perf_counter() - start
            if repeat:  # the first is the warm-up
                best[name] = min(best[name], seconds)
            if name == "pipeline.run" and repeat:
                timeline = recorded.timeline()
                if timeline.bubble < bubble:
                    bubble, picture = timeline.bubble, timeline
    if rank == 0:
        report(args, best, bubble)
        if args.svg:
            print(
                pipeline.plot(picture, args.svg, title=f"1f1b, {args.micro_batches} micro-batches")
            )
    dist.destroy_process_group()


def report(args: argparse.Namespace, best: dict[str, float], bubble: float) -> None:
    print(machine())
    m = args.micro_batches
    theory = (STAGES - 1) / (m + STAGES - 1)
    print(
        f"{STAGES} ranks, {m} micro-batches of {args.rows} rows, width {args.width}, {args.depth} "
        "layers"
    )
    for name, seconds in best.items():
        print(f"{name:>14}  {1e3 * seconds:8.1f} ms a step  {seconds / best['Schedule1F1B']:.2f}x")
    print(f"        bubble  {bubble:.3f} measured, {theory:.3f} in theory  {bubble / theory:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description="1F1B on two ranks, ours and torch's.")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=256, help="of a micro-batch")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8, help="layers of the whole model")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--svg", help="draw the run with the smallest bubble")
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(measure, (port, args), nprocs=STAGES)


if __name__ == "__main__":
    main()
