"""Training set-ups (tests/fuzz/training_setups.py) under ``dt.compile`` with a backend that keeps
numbers: a few steps have the bits of eager calls, in losses, gradients, norms, parameters and
statistics.

    python -m tests.fuzz.fuzz_compiled_training --seeds 0:500 --world 4
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from tests.fuzz.command_line import each_on_ranks, fuzz
from tests.fuzz.fuzz_training import Run, run
from tests.fuzz.training_setups import Setup, make
from tests.support import pool

BACKEND = "aot_eager"
RUNS = [0]  # compiled calls
# Under autocast AOTAutograd casts a weight for each use, and adds up gradients after the casts.
ROUNDING = 0.05


def differing(setup: Setup) -> list[str]:
    """What differs on this rank."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = Run(setup, True).seen()
        fast = Run(setup, True, BACKEND)
        got = fast.seen()
    RUNS[0] += sum(forward.replays for forward in forwards(fast.model))
    return [
        f"at {number}, {name}: {distance(mine.get(name), wanted.get(name)):.2g}"
        for number, (mine, wanted) in enumerate(zip(got, expected, strict=True))
        for name in {**mine, **wanted}
        if not same(setup, mine.get(name), wanted.get(name))
    ]


def checked(setups: Sequence[Setup]) -> list[str]:
    """Reports of the set-ups that differ, or of none that compiled anything."""
    RUNS[0] = 0
    reports = run(setups, differing=differing)
    return reports if RUNS[0] else [*reports, "no call was compiled"]


def forwards(model: Any) -> list[Any]:
    """The compiled forwards in a model."""
    held = [module.__dict__.get("forward") for module in model.modules()]
    held = [getattr(forward, "inner", None) or forward for forward in held]
    return [forward for forward in held if hasattr(forward, "breaks")]


def same(setup: Setup, a: Any, b: Any) -> bool:
    """AOTAutograd gives zeros in place of no gradient."""
    if a is None or b is None:
        some = b if a is None else a
        return some is None or not some.any()
    equal = a.shape == b.shape and a.dtype == b.dtype and a.nan_to_num(7).equal(b.nan_to_num(7))
    return equal or bool(setup.amp and setup.tied and distance(a, b) < ROUNDING)


def distance(a: Any, b: Any) -> float:
    """The largest difference, to the largest number."""
    if a is None or b is None or a.shape != b.shape:
        return float("inf")
    return float((a - b).double().abs().max() / b.double().abs().max())


def main(first: int, last: int, world: int) -> int:
    """How many of these seeds fail; each is printed."""
    pool.warning_filters[:] = ["ignore"]  # those of Dynamo
    setups = [make(seed, world) for seed in range(first, last)]
    return each_on_ranks(world, run, setups, 600.0, differing)


if __name__ == "__main__":
    from tests.fuzz import fuzz_compiled_training  # not __main__: ranks find functions by name

    fuzz(__doc__, "set-ups", fuzz_compiled_training.main)
