"""The seed and the number of random calls so far, kept in the state of torch's default generator.

torch's functions that set, read and restore random numbers do the same for DistTensors:

    torch.manual_seed(s)         the seed is s, and no call has drawn
    torch.get_rng_state()        the state contains the seed and the count (``embed``)
    torch.set_rng_state(state)   restores both; ``fork_rng`` and checkpoints use these two functions

Numbers drawn for regular tensors move torch's generator and not the count, so ranks may draw
different amounts of them. ``torch.default_generator.manual_seed`` restarts the count too. After
``torch.default_generator.set_state`` the next random call detects that the generator has another
seed, and the numbers of that seed continue.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from hashlib import blake2b
from typing import Any, ClassVar
from weakref import WeakSet

import torch

from disttensor.cache import Cache
from disttensor.checks import check_int
from disttensor.torch_private import embed, read_embedded

_M64 = (1 << 64) - 1


class _State:
    seed = 0
    calls = 0
    of: int | None = None  # the seed of torch's generator when ``seed`` was set
    restarts = 0  # number of times that ``seed`` was set
    inside = 0  # greater than 0 while torch's generator is seeded for a call
    fork = (0, 0), 0  # the innermost ``fork_generators``: seed and call, blocks with the same
    left: Cache[int, tuple[int, int]] = Cache(64, lasting=True)  # by ``of``: seed and calls
    generators: ClassVar = WeakSet[torch.Generator]()  # of users, if seeded or given to a call


def manual_seed(seed: int) -> None:
    """Restarts the random numbers of DistTensors, but not of regular tensors. Every rank gives the
    same seed. ``torch.manual_seed`` restarts both: the last call counts.

    >>> dt.manual_seed(7)
    >>> a = dt.rand(3, mesh=mesh)
    >>> dt.manual_seed(7)
    >>> torch.equal(a, dt.rand(3, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()]))
    True
    """
    expected = "a whole number, the same on all ranks,"
    set_state(check_int("manual_seed: seed", seed, None, expected), 0)


def get_state() -> tuple[int, int]:
    """Returns (seed, random calls so far)."""
    if not _State.inside:
        of = torch.default_generator.initial_seed()
        if of != _State.of:
            set_state(*_State.left.get(of, (of, 0)))
    return _State.seed, _State.calls


def set_state(seed: int, calls: int) -> None:
    """Continues as after ``calls`` random calls of ``manual_seed(seed)``."""
    if _State.of is not None:
        _State.left[_State.of] = _State.seed, _State.calls
    _State.seed, _State.calls = seed & _M64, calls
    _State.of = torch.default_generator.initial_seed()
    _State.restarts += 1


def count() -> tuple[int, int]:
    """Counts a random call. Returns the seed and the number of the call."""
    get_state()
    _State.calls += 1
    return _State.seed, _State.calls


def note_generator(generator: torch.Generator) -> None:
    if generator is not torch.default_generator:
        _State.generators.add(generator)


def generators() -> list[torch.Generator]:
    """Returns the generators that users have made: each that was seeded, set, or given to a call on
    DistTensors."""
    return list(_State.generators)


# Changes to torch (``disttensor.patches``) --------------------------------------------------------


def wrap_generator_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``torch.Generator.manual_seed``, which ``torch.manual_seed`` calls."""

    @wraps(original)
    def manual_seed(self: Any, seed: Any) -> Any:
        generator = original(self, seed)
        note_generator(self)
        if self is torch.default_generator and not _State.inside:
            set_state(self.initial_seed(), 0)
        return generator

    return manual_seed


def wrap_generator_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``torch.Generator.set_state``."""

    @wraps(original)
    def set_state(self: Any, new_state: Any) -> Any:
        note_generator(self)
        return original(self, new_state)

    return set_state


def wrap_get_rng_state(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_rng_state() -> Any:
        values = get_state()
        state = original()
        embed(state, *values)
        return state

    return get_rng_state


def wrap_set_rng_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps set_rng_state. States of ``Generator.get_state`` have no count: a hash is the seed."""

    @wraps(original)
    def set_rng_state(new_state: Any) -> None:
        original(new_state)
        found, content = read_embedded(new_state, 2)
        digest = blake2b(content, digest_size=8).digest()
        seed, calls = found or (int.from_bytes(digest), 0)
        set_state(seed, calls)

    return set_rng_state
