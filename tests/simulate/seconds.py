"""How long things take on a rank of a running world: what a device and a network are calibrated by,
and steps that are compared with simulated ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import disttensor as dt
from disttensor.comm import collectives
from disttensor.simulate.devices import Device

LARGE, REPEATS = 1 << 22, 5  # elements of a large all-gather; the fastest of so many counts


def calibrate() -> tuple[Device, float, float]:
    """On each of the ranks at once: its device, and seconds of a small and a large all-gather."""
    device = dt.devices.measure(0.5)
    mesh = dt.init_mesh((torch.distributed.get_world_size(),), ("all",))
    group = mesh.group((0,))

    def gather(n: int) -> float:
        x = torch.ones(n)
        return fastest(lambda: collectives.all_gather(x, group))

    return device, gather(1), gather(LARGE)


def fastest(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def step_time(build: Any, options: str) -> float:
    """Of the second step on, which has its plans; the process is left as it was."""
    dtype = torch.get_default_dtype()
    try:
        step = build(options)
        step()
        return fastest(step)
    finally:
        torch.set_default_dtype(dtype)
