"""Measures the time of a step on a rank of a running world, and calibrates simulated steps."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.calibrate.measure import measure, measure_network
from disttensor.simulate.devices import Device, Network

REPEATS = 5  # the fastest step of so many counts


def calibrate() -> tuple[Device, Network]:
    """Measures on all ranks at once."""
    return measure(0.3, together=True), measure_network()


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
