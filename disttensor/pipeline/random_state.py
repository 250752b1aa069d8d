"""The random numbers of a micro-batch whose program pauses between its visits.

Ranks begin the visits of micro-batches in different orders. If all micro-batches drew from the
generators of the process, a micro-batch would draw other numbers on each rank. So each micro-batch
has a state of its own, set while its program runs: the counter of DistTensors, the generators of
torch, Python and NumPy, and each ``torch.Generator`` of the user. The first states follow from the
states before the run and the number of the micro-batch, so they are equal on ranks whose generators
were equal. A run moves a generator if one of its micro-batches drew from it: a run without random
numbers changes none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import compress
from typing import Any

import numpy as np
import torch

from disttensor.random import counter


class RandomState:
    """``with state.set():`` continues the numbers of one micro-batch in the block, and restores the
    numbers of the code around it at the end."""

    def __init__(self, seeds: tuple[int, ...], number: int) -> None:
        self._first: Any = (*seeds, number)
        self._saved: Any = None
        self._of_users: dict[torch.Generator, torch.Tensor] = {}
        self.drew = [False] * 4  # from the counter, torch, Python, NumPy
        self.drew_from: set[torch.Generator] = set()  # of users

    @contextmanager
    def set(self) -> Iterator[None]:
        around, of_users = _states(), _states_of_users()
        if self._saved is None:
            _seed(*self._first)
        else:
            _restore(self._saved)
        for generator in of_users:  # their states around are the same for all micro-batches
            if generator in self._of_users:
                generator.set_state(self._of_users[generator])
            else:
                generator.manual_seed(_derive(_draw_from(generator), self._first[-1]))
        before, users_before = _positions(), _states_of_users()
        try:
            yield
        finally:
            after = _positions()
            self.drew = [d or a != b for d, a, b in zip(self.drew, before, after, strict=True)]
            self._saved, self._of_users = _states(), _states_of_users()
            self.drew_from |= {
                g for g, state in self._of_users.items()
                if g not in users_before or not _equal(state, users_before[g])
            }  # fmt: skip
            _restore(around)
            for generator in self._of_users:
                if generator in of_users:
                    generator.set_state(of_users[generator])
                else:  # made in the block, at another place of it on each rank
                    generator.manual_seed(generator.initial_seed())


def seeds_of_run() -> tuple[int, ...]:
    """The seeds of a run, from the counter and from each generator, which stay as they are."""
    around = _states()
    seeds = *counter.count(), *(int(draw()) for draw in _DRAWS)
    _restore(around)
    return seeds


def end_run(states: Iterable[RandomState]) -> None:
    """Moves the counter and the generators from which a micro-batch drew, for the next run.

    All ranks move the counter alike, because they run the same calls on DistTensors.
    """
    states = list(states)
    drew = [any(of_one) for of_one in zip(*(state.drew for state in states), strict=True)]
    for draw in compress((counter.count, *_DRAWS), drew):
        draw()
    for generator in {g for state in states for g in state.drew_from}:
        _draw_from(generator)


_DRAWS: tuple[Callable[[], Any], ...] = (
    lambda: torch.randint(1 << 31, ()),
    lambda: random.randrange(1 << 31),
    lambda: np.random.randint(1 << 31),
)


def _seed(seed: int, call: int, of_torch: int, of_python: int, of_numpy: int, number: int) -> None:
    torch.manual_seed(_derive(of_torch, number))
    counter.set_state(_derive(seed, call, number), 0)
    random.seed(_derive(of_python, number))
    np.random.seed(_derive(of_numpy, number))


def _derive(*values: int) -> int:
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=4).digest())


def _draw_from(generator: torch.Generator) -> int:
    device = generator.device
    return int(torch.randint(1 << 31, (), generator=generator, device=device))


def _states_of_users() -> dict[torch.Generator, torch.Tensor]:
    return {generator: generator.get_state() for generator in counter.generators()}


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bytes(one.numpy()) == bytes(other.numpy())


def _positions() -> tuple[Any, ...]:
    of_numpy: Any = np.random.get_state()
    of_torch = bytes(torch.default_generator.get_state().numpy())
    if torch.cuda.is_initialized():
        of_torch += bytes(torch.cuda.get_rng_state().numpy())
    return counter.get_state(), of_torch, random.getstate(), (of_numpy[1].tobytes(), *of_numpy[2:])


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
