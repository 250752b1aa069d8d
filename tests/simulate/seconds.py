"""How long steps take on a rank of a running world, and by what simulated ones are calibrated."""

from __future__ import annotations

import time
from typing import Any

import torch

import disttensor as dt
from disttensor.simulate.devices import Device, Network

REPEATS = 5  # the fastest step of so many counts


def calibrate() -> tuple[Device, Network]:
    """On each of the ranks at once."""
    return dt.devices.measure(0.3, together=True), dt.devices.measure_network()


def step_time(build: Any, options: str) -> float:
    """Of the second step on, which has its plans; the process is left as it was."""
    dtype, best = torch.get_default_dtype(), float("inf")
    try:
        step = build(options)
        step()
        for _ in range(REPEATS):
            start = time.perf_counter()
            step()
            best = min(best, time.perf_counter() - start)
        return best
    finally:
        torch.set_default_dtype(dtype)
