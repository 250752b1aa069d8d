"""World state: the state outside of tensors and attributes that a forward may change."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np

from disttensor.random import counter
from disttensor.runtime import current_runtime


class Untraceable(Exception):
    """The reason why a forward has no program."""


class WorldState(NamedTuple):
    """``calls``, ``seed``: of the random numbers of DistTensors. ``tags``: the number of messages
    by channel. ``others``: the states of Python's and numpy's generators."""

    calls: int
    seed: tuple[int, int]
    tags: dict[Any, int]
    others: tuple[Any, ...]

    def draws_until(self, after: WorldState) -> int:
        """Returns the number of random calls since. Raises Untraceable for other changes."""
        if self.seed != after.seed:
            raise Untraceable("it seeds random numbers")
        if self.tags != after.tags:
            raise Untraceable("it takes part in messages between ranks")
        if self.others != after.others:
            raise Untraceable("it draws numbers of Python's or numpy's generator")
        return after.calls - self.calls


def world_state() -> WorldState:
    seed, calls = counter.get_state()
    numpy_state: Any = np.random.get_state()
    others = random.getstate(), numpy_state[1].tobytes(), *numpy_state[2:]
    tags = dict(current_runtime().tags)
    return WorldState(calls, (seed, counter._State.restarts), tags, others)
