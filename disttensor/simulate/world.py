"""Lets this process act as one rank of a simulated world: PyTorch's fake process group, tensors
without data, and modules of its own."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import torch

from disttensor.cache import clear_decisions
from disttensor.comm import compare_collectives, compare_programs
from disttensor.observe import hide_observers
from disttensor.random import counter
from disttensor.runtime import current_runtime, set_runtime_aside
from disttensor.simulate.flop_formulas import formulas
from disttensor.torch_private import FakeTensorMode, hide_process_groups, start_fake_world
from ops.registry import RULES
from reshard.registry import moves


@cache
def fake() -> Any:
    """Returns the one FakeTensorMode of this process: the engine keeps a few tensors for as long as
    it runs. The mode is made at the first use, because torch imports its compiler for it."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def torchrun_variables(rank: int, size: int, ranks_per_node: int) -> dict[str, str]:
    """Returns the environment variables that torchrun sets for this rank."""
    node, place = divmod(rank, ranks_per_node)
    on_node = min(ranks_per_node, size - node * ranks_per_node)  # the last node may have fewer
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(place),
        "LOCAL_WORLD_SIZE": str(on_node),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }


@contextmanager
def _own_registrations() -> Iterator[None]:
    """Removes the rules and formulas that a program registers: each rank registers its own, as each
    process does."""
    tables: list[dict[Any, Any]] = [RULES, moves, formulas()]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, entries in zip(tables, before, strict=True):
            if table != entries:
                table.clear()
                table.update(entries)
                clear_decisions()


@contextmanager
def simulated_rank(
    rank: int, size: int, ranks_per_node: int = 8, backend: str = "nccl", data: bool = False
) -> Iterator[None]:
    """Lets this process act as ``rank`` of ``size``, without the other ranks. Afterwards its
    process group, meshes, environment, random numbers of torch and registered rules are as before;
    observers that were open see nothing of it. (A program that changes more runs in a ``Child``.)

    Args:
        rank: the simulated rank.
        size: the number of ranks.
        ranks_per_node: for LOCAL_RANK and the other variables of torchrun.
        backend: the backend for which collectives are made.
        data: whether tensors have data.
    """
    numbers, seed = torch.get_rng_state(), counter.get_state()
    debugging = compare_collectives.enabled
    try:
        with (
            hide_observers(), compare_programs.preserve_calls(), set_runtime_aside(),
            _own_registrations(), hide_process_groups(),
            mock.patch.dict(os.environ, torchrun_variables(rank, size, ranks_per_node)),
        ):  # fmt: skip
            compare_collectives.enabled = False  # there are no other ranks to compare with
            start_fake_world(rank, size)
            current_runtime().stands_for = backend
            with nullcontext() if data else fake():
                yield
    finally:
        compare_collectives.enabled = debugging
        torch.set_rng_state(numbers)
        counter.set_state(*seed)


@contextmanager
def frozen_garbage() -> Iterator[Callable[[], None]]:
    """Yields a function that runs ``gc.collect()`` and ``gc.freeze()``. Automatic collection is off
    inside the block, because scanning torch's objects dominates the run time."""
    ours, collects = gc.get_freeze_count() == 0, gc.isenabled()
    gc.disable()

    def collect_garbage() -> None:
        gc.collect()
        if ours:
            gc.freeze()

    try:
        yield collect_garbage
    finally:
        if ours:
            gc.unfreeze()
        if collects:
            gc.enable()
