"""A rank of a world that is not there: PyTorch's fake process group, tensors without data."""

from __future__ import annotations

import gc
import os
import random as python_random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch

from disttensor.cache import clear_decisions
from disttensor.comm import desync
from disttensor.random import counter
from disttensor.runtime import current_runtime, set_runtime_aside
from disttensor.simulate import shapes
from disttensor.torch_private import FakeTensorMode, process_groups_aside, start_fake_world
from ops.registry import RULES
from reshard.registry import moves, starts


@cache
def _fake() -> Any:
    """One for all simulations of a process, as the engine keeps a few tensors for as long as it
    runs. Made when it is needed: torch imports its compiler for it."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def torchrun_variables(rank: int, size: int, ranks_per_node: int) -> dict[str, str]:
    """What torchrun would put into the environment of this rank."""
    node, place = divmod(rank, ranks_per_node)
    there = min(ranks_per_node, size - node * ranks_per_node)  # the last node may have fewer
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(place),
        "LOCAL_WORLD_SIZE": str(there),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }


@contextmanager
def _registered() -> Iterator[None]:
    """What a program registers is registered by each rank, as by each process."""
    tables: list[dict[Any, Any]] = [RULES, moves, starts, shapes.formulas()]
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
def imagined_rank(
    rank: int, size: int, ranks_per_node: int = 8, backend: str = "nccl", data: bool = False
) -> Iterator[None]:
    """Inside, this process is ``rank`` of ``size``, and nobody else is there; collectives are made
    as for ``backend``, and tensors are without ``data``. Afterwards it is what it was: its process
    group, meshes, environment, defaults, random numbers and registered rules are as before."""
    environment = dict(os.environ)
    dtype, device, grad = (
        torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(),
    )  # fmt: skip
    numbers = torch.get_rng_state(), python_random.getstate(), np.random.get_state()
    seed, debugging = counter.get_state(), desync.enabled
    try:
        with set_runtime_aside(), _registered(), process_groups_aside():
            os.environ.update(torchrun_variables(rank, size, ranks_per_node))
            desync.enabled = False  # there is nobody to compare with
            start_fake_world(rank, size)
            current_runtime().stands_for = backend
            with nullcontext() if data else _fake():
                yield
    finally:
        desync.enabled = debugging
        torch.set_rng_state(numbers[0])
        counter.set_state(*seed)
        python_random.setstate(numbers[1])
        np.random.set_state(numbers[2])
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        torch.set_grad_enabled(grad)
        os.environ.clear()
        os.environ.update(environment)


@contextmanager
def frozen_garbage() -> Iterator[Callable[[], None]]:
    """Gives a function that collects Python's garbage, and takes all objects there are from the
    collector, which looks through hundreds of thousands of torch's for each rank. They come back
    afterwards. Meanwhile nothing is collected but by that function, and before a step that is
    recorded: what a rank makes stays until then, and is looked through in vain."""
    ours, collects = gc.get_freeze_count() == 0, gc.isenabled()
    gc.disable()

    def set_aside() -> None:
        gc.collect()
        if ours:
            gc.freeze()

    try:
        yield set_aside
    finally:
        if ours:
            gc.unfreeze()
        if collects:
            gc.enable()
