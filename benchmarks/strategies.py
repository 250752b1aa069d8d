"""Does ``plan_strategy`` find the fastest strategy? All legal ones of the example's GPT on four
gloo processes here, and the one that it chooses.

    python benchmarks/strategies.py                # all but recomputation and larger segments
    python benchmarks/strategies.py --everything   # these, too: four times as long
    python benchmarks/strategies.py --plan         # what is chosen, and nothing is timed

The device, which is a core that ranks share, and the network are measured first, on the four ranks
together. Every strategy then runs a few steps, from barrier to barrier. The fastest of them and the
chosen one run again, taking turns, so that noise hits them alike; of each the best step counts. The
machine has to be idle.
"""

from __future__ import annotations

import argparse
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from calibrate.measure import measure as measure_device
from calibrate.measure import measure_network
from table import machine

import disttensor as dt
from disttensor import pipeline
from disttensor.simulate.candidates import ProgramShape, strategies
from disttensor.simulate.strategy_table import named

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from gpt import GPT, GPTConfig, init_weights
from train_gpt import LAYERS, PLAN

RANKS, BATCH, BLOCKS = 4, 8, 4
FINAL, ROUNDS = 12, 15  # strategies that run again, and how often
Build = Callable[[dt.Strategy], Callable[[], None]]


def build_with(config: GPTConfig) -> Build:
    """A step of the GPT on BATCH sequences."""

    def build(strategy: dt.Strategy) -> Callable[[], None]:
        stages = strategy.visits()
        dt.manual_seed(0)
        with torch.device("meta"):
            model = GPT(config)
        strategy.apply(model, plan=PLAN, layers=LAYERS)
        init_weights(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        text = torch.arange(BATCH * (config.context + 1)).remainder(251).view(BATCH, -1)

        def share_of_loss(rows: torch.Tensor) -> Any:
            inputs = dt.shard_tensor(rows[:, :-1], stages[0], strategy.batch())
            targets = dt.shard_tensor(rows[:, 1:], stages[-1], strategy.batch())
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            return loss / strategy.accumulate_steps

        def step() -> None:
            parts = text.chunk(strategy.accumulate_steps)
            pipeline.run(share_of_loss, parts, strategy.schedule, stages=stages)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


def legal(everything: bool) -> list[dt.Strategy]:
    """All that four ranks can do with this model and batch."""
    names = ["tok", "pos", *(f"blocks.{i}" for i in range(BLOCKS)), "norm", "head"]
    program = ProgramShape(BATCH, tuple(names), tuple(names[2 : 2 + BLOCKS]))
    network = dt.simulate.devices.Network(ranks_per_node=RANKS)
    found = [s for s, reason in strategies(RANKS, network, program, dt.Strategy()) if not reason]
    return [s for s in found if everything or not (s.recompute or s.segments)]


# On the ranks -------------------------------------------------------------------------------------


def seconds(run: Callable[[], object], times: int = 3) -> float:
    """From barrier to barrier; the best of some."""
    best = float("inf")
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        run()
        dist.barrier()
        best = min(best, time.perf_counter() - start)
    return best


def calibrate() -> tuple[dt.simulate.devices.Device, dt.simulate.devices.Network]:
    """Measures this machine, whose cores the ranks share, and the network between them."""
    return measure_device(0.3, together=True), measure_network()


def measure(config: GPTConfig, chosen: dt.Strategy, found: Sequence[dt.Strategy]) -> Any:
    """(seconds of each strategy once, those of the best ones again)"""
    build = build_with(config)
    once: dict[dt.Strategy, float] = {}
    refused: dict[dt.Strategy, str] = {}
    for i, strategy in enumerate(found):
        try:
            step = build(strategy)
            step()
            once[strategy] = same(seconds(step, 2))
        except (ValueError, TypeError) as error:
            refused[strategy] = f"{type(error).__name__}: {error}"
        if dist.get_rank() == 0 and i % 20 == 0:
            print(f"{i} of {len(found)} strategies", file=sys.stderr, flush=True)
    order = sorted(once, key=lambda s: once[s])
    steps = {s: build(s) for s in dict.fromkeys([*order[:FINAL], chosen])}
    for step in steps.values():
        step()
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(ROUNDS):
        for strategy, step in steps.items():
            best[strategy] = min(best[strategy], seconds(step, 1))
    return once, best, refused


def same(value: float) -> float:
    """What rank 0 has measured: all ranks decide alike."""
    number = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(number, 0)
    return float(number)


def _rank(rank: int, world: int, port: int, folder: str, run: Any, args: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "LOCAL_RANK": str(rank),
    }  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = run(*args)
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(world: int, run: Any, *args: Any) -> list[Any]:
    """What ``run(*args)`` gives on each rank."""
    with socket.socket() as s, tempfile.TemporaryDirectory() as folder:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        s.close()
        mp.spawn(_rank, (world, port, folder, run, args), nprocs=world)
        return [pickle.loads(Path(folder, str(r)).read_bytes()) for r in range(world)]


# All of it ----------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--everything", action="store_true")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    args = parser.parse_args()
    config = GPTConfig(layers=BLOCKS, width=args.width, heads=4, context=args.context)
    started = time.perf_counter()
    device, network = on_ranks(RANKS, calibrate)[0]
    print(machine(), device, network, sep="\n", flush=True)
    torch.set_num_threads(1)
    table = dt.simulate.plan_strategy(build_with(config), RANKS, device=device, network=network)
    print(table, f"planned after {time.perf_counter() - started:.0f} s", sep="\n", flush=True)
    if args.plan:
        return
    found = legal(args.everything)
    once, best, refused = on_ranks(RANKS, measure, config, table.best, found)[0]
    said = {c.strategy: c.step_time for c in table.candidates}
    print(f"\n{len(once)} strategies ran, {len(refused)} were refused; the fastest again:")
    print("step, real | once | simulated (or estimated) | strategy")
    for s in sorted(best, key=lambda s: best[s]):
        figures = f"{best[s] * 1e3:.1f} ms | {once.get(s, 0) * 1e3:.1f} ms | {said[s] * 1e3:.1f} ms"
        print(f"{figures} | {named(s, RANKS)}{' (chosen)' * (s == table.best)}")
    for s, why in list(refused.items())[:5]:
        print(f"refused: {named(s, RANKS)}: {why[:200]}")
    fastest = min(best.values())
    print(f"the chosen one takes {best[table.best] / fastest - 1:+.1%} of the fastest's time")
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
