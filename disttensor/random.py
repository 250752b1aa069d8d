"""Random numbers: replicas draw the same, shards draw different ones, and torch's own generator is left alone.

The position in the program decides: every random call takes the next number of a counter that all ranks keep alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from disttensor.philox import derive


class _State:
    """The seed and the number of the next random call."""

    seed = 0
    call = 0


def manual_seed(seed: int) -> None:
    """Start the random numbers of DistTensors anew: the same seed on all ranks, please."""
    _State.seed, _State.call = int(seed), 0


def next_call() -> int:
    """The number of this random call, the same on all ranks."""
    _State.call += 1
    return _State.call


@contextmanager
def forked(mesh: Any) -> Iterator[None]:
    """torch's generator seeded alike on all ranks, and put back afterwards."""
    state = torch.get_rng_state()
    torch.random.default_generator.manual_seed(derive(_State.seed, next_call()))
    try:
        yield
    finally:
        torch.set_rng_state(state)


def born(fn: Any, spec: Any, args: Any, kwargs: Any) -> Any:
    """This rank's piece of a random factory's tensor, or None for a factory that is not random."""
    return None
