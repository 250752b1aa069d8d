"""Saving and loading a model and its AdamW state: dt.Checkpointer beside
torch.distributed.checkpoint on FSDP2.

    python benchmarks/checkpoint.py --markdown docs/performance.md

writes its section into the page; without the option the table is printed. Four processes over gloo
with one thread each hold the GPT of examples/ with 100 M parameters in float32, on both sides. The
sides take turns; the best of each counts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from replicas import free_port
from table import CHECKPOINTS, machine, markdown
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import disttensor as dt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from gpt import GPT, GPTConfig
from train_gpt import LAYERS, PLAN

RANKS = 4
ROWS = {"sharding 4": {"sharding": 4}, "pp 2 x tp 2": {"pp": 2, "tp": 2}}
COLUMNS = (
    "", "save", "by DCP", "ratio", "load", "by DCP", "ratio", "bytes / state", "background: call",
    "all of the loop", "peak of load", "by DCP",
)  # fmt: skip
SECTION = """\
{heading}

Saving and loading a GPT of {numel:.0f} M parameters in float32 with its AdamW state ({size:.1f} GB)
on four processes: `dt.Checkpointer`, and torch.distributed.checkpoint (DCP) on the DTensors of
FSDP2.

{table}

- {machine}.
- Command: `{command}`.
- The two sides of a row live in the same processes and take turns, {repeats} each after a warm-up;
  the best counts. Both write to the disk and sync; loaded files are in the page cache. Ours
  verifies the checksums of all files before it loads.
- *bytes / state*: the bytes of all files, divided by the bytes of the state.
- *background*: the time that `save(background=True)` costs a training loop, divided by the time of
  a blocking save. *call*: the call itself. *all of the loop*: including the time that a loop on
  {cores} busy cores with four ranks loses until the checkpoint is written.
- *peak of load*: the additional memory of a rank during a load, divided by the size of its own part
  of the state.
"""


class Side:
    """A model whose optimizer has made a step."""

    def __init__(self, config: GPTConfig, degrees: dict[str, int] | None) -> None:
        with torch.device("meta"):
            self.model: Any = GPT(config)
        if degrees is None:
            mesh = init_device_mesh("cpu", (RANKS,))
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            self.model.to_empty(device="cpu")
        else:
            strategy = dt.Strategy(dp=1, **degrees)
            strategy.apply(self.model, plan=PLAN, layers=LAYERS)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        with torch.no_grad():
            for p in self.model.parameters():
                p.fill_(0.5)
                state = {"step": torch.tensor(1.0)}
                state |= {k: torch.full_like(p.detach(), 0.25) for k in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[p] = state

    def flat(self) -> dict[str, Any]:
        """What DCP saves."""
        names = dict(self.model.named_parameters())
        state = {
            f"{name}.{key}": x for name, p in names.items()
            for key, x in self.optimizer.state[p].items()
        }  # fmt: skip
        return {"model": self.model.state_dict(), "optimizer": state}


def timed(call: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start


def memory(what: str) -> int:
    """VmRSS, or the most it was since ``forget_peak`` (VmHWM), in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


def peak(call: Callable[[], Any]) -> int:
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    call()
    return memory("VmHWM") - before


def most(value: float) -> float:
    """Over all ranks."""
    x = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.item()


def work(turns: int) -> float:
    """Seconds of so many turns of something to compute, as a training loop has."""
    a = torch.ones(256, 256)

    def turn() -> None:
        for _ in range(turns):
            torch.mm(a, a).sum().item()

    return timed(turn)


def measure(name: str, config: GPTConfig, repeats: int, folder: Path) -> list[str]:
    ours, theirs = Side(config, ROWS[name]), Side(config, None)
    kept = {"model": ours.model, "optimizer": ours.optimizer}
    checkpoints = dt.Checkpointer(folder / name.replace(" ", "-"), keep=1)
    numel = sum(p.numel() for p in ours.model.parameters())
    other = str(folder / "dcp")
    times: dict[str, list[float]] = {k: [] for k in ("save", "dcp save", "load", "dcp load")}
    step = 0
    for turn in range(repeats + 1):  # the first is a warm-up
        step += 1
        if dist.get_rank() == 0:
            shutil.rmtree(other, ignore_errors=True)
        taken = {
            "save": timed(lambda: checkpoints.save(step, **kept)),
            "dcp save": timed(lambda: dcp.save(theirs.flat(), checkpoint_id=other)),
            "load": timed(lambda: checkpoints.load(**kept)),
            "dcp load": timed(lambda: dcp.load(theirs.flat(), checkpoint_id=other)),
        }
        for key, seconds in taken.items():
            times[key] += [seconds] if turn else []
    path = max((folder / name.replace(" ", "-")).glob("0*"))
    written = sum(file.stat().st_size for file in path.iterdir())
    save, dcp_save, load, dcp_load = (min(some) for some in times.values())
    checkpoints.save(step + 1, background=True, **kept)  # its memory is new
    checkpoints.wait()
    speed = 200 / work(200)
    turns = int(2 * save * speed)
    alone = min(work(turns) for _ in range(2))
    calls, loops = [], []
    for i in range(repeats):
        calls.append(timed(lambda: checkpoints.save(step + 2 + i, background=True, **kept)))
        loops.append(calls[-1] + work(turns) - alone)
        checkpoints.wait()
    own = 12 * numel / RANKS
    peaks = [most(peak(lambda: checkpoints.load(**kept)) / own)]
    peaks.append(most(peak(lambda: dcp.load(theirs.flat(), checkpoint_id=other)) / own))
    return [
        name, f"{save:.2f} s", f"{dcp_save:.2f} s", f"{save / dcp_save:.2f}x", f"{load:.2f} s",
        f"{dcp_load:.2f} s", f"{load / dcp_load:.2f}x", f"{written / (12 * numel):.4f}",
        f"{min(calls) / save:.1%}", f"{min(loops) / save:.1%}", *(f"{p:.2f}" for p in peaks),
    ]  # fmt: skip


def run(rank: int, port: int, args: argparse.Namespace, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    dt.init_mesh((RANKS,))
    config = GPTConfig(args.vocab, args.layers, args.width, 8, 128)
    lines = []
    for name in ROWS:
        if args.only in name:
            lines.append(measure(name, config, args.repeats, Path(folder)))
            if rank == 0:
                print(*lines[-1], sep="  ", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    if rank == 0:
        table = markdown(COLUMNS, lines)
        print(f"{machine()}\n\n{table}")
        if args.markdown:
            with torch.device("meta"):
                numel = sum(p.numel() for p in GPT(config).parameters())
            command = " ".join(["python benchmarks/checkpoint.py", *args.words])
            section = SECTION.format(
                heading=CHECKPOINTS, numel=numel / 1e6, size=12 * numel / 1e9, table=table,
                machine=machine(), command=command, repeats=args.repeats, cores=os.cpu_count(),
            )  # fmt: skip
            before = args.markdown.read_text(encoding="utf-8").partition(CHECKPOINTS)[0].rstrip()
            args.markdown.write_text(f"{before}\n\n{section}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=9600)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has it")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    args = parser.parse_args()
    args.words = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (free_port(), args, folder), nprocs=RANKS)


if __name__ == "__main__":
    main()
