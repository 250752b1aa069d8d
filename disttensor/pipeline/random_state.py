"""The random numbers of a micro-batch whose program pauses between its visits.

Ranks begin the visits of micro-batches in different orders. If all micro-batches drew from the
generators of the process, a micro-batch would draw other numbers on each rank. So each micro-batch
has a state of its own, set while its program runs: the counter of DistTensors, and the generators
of torch, Python and NumPy. The first states follow from the states before the run and the number of
the micro-batch, so they are equal on ranks whose generators were equal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from disttensor.random import counter


class RandomState:
    """``with state.set():`` continues the numbers of one micro-batch in the block, and afterwards
    those of the code around it."""

    def __init__(self, seeds: tuple[int, ...], number: int) -> None:
        self._first: Any = (*seeds, number)
        self._saved: Any = None

    @contextmanager
    def set(self) -> Iterator[None]:
        around = _states()
        if self._saved is None:
            _seed(*self._first)
        else:
            _restore(self._saved)
        try:
            yield
        finally:
            self._saved = _states()
            _restore(around)


def draw_seeds() -> tuple[int, ...]:
    """Draws the seeds of a run: from the counter, and from each generator."""
    word = 1 << 31
    numbers = int(torch.randint(word, ())), random.randrange(word), np.random.randint(word)
    return *counter.count(), *map(int, numbers)


def _seed(seed: int, call: int, of_torch: int, of_python: int, of_numpy: int, number: int) -> None:
    def derive(*values: int) -> int:
        return int.from_bytes(blake2b(repr(values).encode(), digest_size=4).digest())

    torch.manual_seed(derive(of_torch, number))
    counter.set_state(derive(seed, call, number), 0)
    random.seed(derive(of_python, number))
    np.random.seed(derive(of_numpy, number))


def _states() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), random.getstate(), np.random.get_state(), cuda


def _restore(states: tuple[Any, ...]) -> None:
    of_torch, of_python, of_numpy, cuda = states
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
