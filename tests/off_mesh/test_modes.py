"""What is kept of a call that was first made inside a mode serves calls in every other mode."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import disttensor as dt
from disttensor import cache
from tests.support.pool import fake_world


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def double():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "none": contextlib.nullcontext,
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": double,
    "default device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "functions": Functions,
    "operators": Operators,
}
PLACES = {"inside": [0], "outside": [1]}


@functools.cache
def clearings():
    """What empties each cache of the packages."""
    modules = [m for name, m in sys.modules.items() if name.startswith(("disttensor", "ops"))]
    values = [value for module in modules for value in vars(module).values()]
    caches = [x for x in values if hasattr(x, "cache_clear") and not isinstance(x, type)]
    found = [x.cache_clear for x in caches]
    gc.unfreeze()  # tests/conftest.py freezes the modules, and get_objects leaves those out
    found += [x.clear for x in gc.get_objects() if type(x) is cache.Cache]
    gc.freeze()
    return [cache.clear_caches, *found]


def forget_all():
    """As in a new process: no call is known."""
    for clear in clearings():
        clear()


def program(ranks):
    """Returns what a step gives: dtypes, what requires grad, values and gradients."""
    mesh = dt.ProcessMesh(ranks)
    torch.manual_seed(0)
    w = dt.shard_tensor(
        torch.linspace(-1, 1, 12, dtype=torch.float32, device="cpu").reshape(3, 4), mesh
    ).requires_grad_()
    x = dt.shard_tensor(torch.ones(2, 4, dtype=torch.float32, device="cpu"), mesh)
    y = F.linear(x, w).softmax(-1)
    z = torch.where(y > 0.3, y, y.square())[:, 1:].cumsum(1)
    target = dt.shard_tensor(torch.zeros(2, dtype=torch.int64, device="cpu"), mesh)
    loss = F.cross_entropy(z, target) + F.dropout(y, 0.5).float().sum()
    found = [t.dtype for t in (y, z, loss)] + [t.requires_grad for t in (y, z, loss)]
    if loss.requires_grad:
        loss.backward()
        found += [w.grad.dtype, w.grad.local.tolist()] if ranks == [0] else []  # no grad outside
    return found + ([loss.local.tolist()] if ranks == [0] else [])


def run(mode, ranks):
    with MODES[mode]():
        return program(ranks)


@functools.cache
def alone(mode, where):
    """What a mode gives in a new process."""
    forget_all()
    return run(mode, PLACES[where])


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("first", MODES)
def test_a_first_call_inside_a_mode_leaves_nothing_of_it(first, where):
    with fake_world(2):
        program(PLACES[where])  # imports what is imported late
        for mode in MODES:
            expected = alone(mode, where)
            forget_all()
            run(first, PLACES[where])
            assert run(mode, PLACES[where]) == expected, f"{mode} after {first}"
