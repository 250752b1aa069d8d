"""Measures the time of a step on a rank of a running world."""

from __future__ import annotations

import time
from typing import Any

import torch

REPEATS = 12  # the fastest step of so many counts


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
