"""Optimizers of other libraries on two ranks, without and with owners, against one process.

    python -m tests.zoo.optimizers            prints a table

Each trains four steps of a network in float64 at stage 3. "noise": the largest difference between
two runs of one process, of which one has inputs that differ by 1e-15. Some optimizers that
decompose matrices are that sensitive. Libraries: ``strangers.txt``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytorch_optimizer
import torch
import torch.distributed as dist
from prodigyopt import Prodigy
from torch import nn

import disttensor as dt
from tests.support.ports import free_port

NAMES = "Shampoo ScalableShampoo SOAP Kron AdaFactor SPlus Adan GaLore APOLLO Conda Alice RACS"
COMBINING = "Lamb LARS Prodigy DAdaptAdam"  # a norm or a sum over all parameters


def optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    made: dict[str, Any] = {"torch.optim.Muon": torch.optim.Muon}
    made["torch.optim.Adafactor"] = torch.optim.Adafactor
    made |= {n: getattr(pytorch_optimizer, n) for n in (*NAMES.split(), *COMBINING.split())}
    return made | {"prodigyopt": Prodigy}


def train(make: Any, mesh: Any = None, own: bool = False, noise: float = 0.0) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6), nn.Linear(6, 4))
    if mesh is not None:
        dt.shard_data_parallel(model, mesh)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    used = [make(matrices), torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2])]
    if own:
        used[0] = dt.optim.own(used[0])
    for i in range(4):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(i))
        x += noise * torch.rand(64, 8, generator=torch.Generator().manual_seed(i + 1))
        model(
            x if mesh is None else dt.shard_tensor(x, mesh, [dt.Shard(0)])
        ).square().sum().backward()
        for optimizer in used:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() if mesh is None else p.full_tensor().detach() for p in model.parameters()]


def difference(want: list[Any], run: Callable[[], list[Any]]) -> str:
    try:
        return f"{max(float((a - b).abs().max()) for a, b in zip(want, run(), strict=True)):.0e}"
    except RuntimeError as error:
        if "combines" not in str(error):
            raise
        return "RuntimeError: combines parameters"


def main(rank: int, port: int) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ["WORLD_SIZE"] = "2"
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    mesh = dt.init_mesh((2,), ("fsdp",))
    if rank == 0:
        print("| optimizer | noise | without owners | with owners |\n|---|--:|--:|--:|")
    for name, make in optimizers().items():
        want = train(make)
        noise = difference(want, lambda: train(make, noise=1e-15))
        without = difference(want, lambda: train(make, mesh))
        owned = difference(want, lambda: train(make, mesh, own=True))
        if rank == 0:
            print(f"| {name} | {noise} | {without} | {owned} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, (free_port(),), nprocs=2)
