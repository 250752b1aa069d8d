"""Observers see the engine at one seam, and nothing of the engine is replaced at run time."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor import observe, pipeline
from disttensor.dispatch import native
from disttensor.dispatch.call_plan import CallPlan
from disttensor.simulate.run import simulate
from disttensor.simulate.world import simulated_rank
from tests.support.pool import fake_world

OURS = ("disttensor", "ops", "reshard")
CODE = (FunctionType, BuiltinFunctionType, MethodType, classmethod, staticmethod, property, type)


def names() -> dict[str, Any]:
    """Returns the functions and classes of our modules and classes, by name."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in OURS:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, CODE) or callable(value):
                found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                for attr, held in list(vars(value).items()):
                    if isinstance(held, CODE):
                        found[f"{name}.{key}.{attr}"] = held
    return found


@contextmanager
def nothing_is_replaced() -> Iterator[Any]:
    """Yields a function that compares our names with the names before the block."""
    before = names()

    def check() -> None:
        now = names()
        assert not [k for k, v in before.items() if k in now and now[k] is not v]

    yield check
    check()


def model(mesh: Any) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return dt.shard_module(net, mesh, {"0.weight": [dt.Shard(0)], "2.weight": [dt.Shard(1)]})


class Calls(logging.Handler):
    """Calls a function where no guard of a replay looks: behind a logger."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def emit(self, record: Any) -> None:
        self.function()


LOGGER = logging.getLogger(__name__)
LOGGER.propagate = False


def in_replay(mesh: Any, check: Any) -> None:
    LOGGER.handlers = [Calls(check)]

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model(mesh)

        def forward(self, x: Any) -> Any:
            LOGGER.warning("runs")
            return self.inner(x)

    net = dt.replay(Looks())
    for _ in range(3):
        net(dt.ones(3, 4, mesh=mesh)).sum().backward()
    assert net.forward.replays == 2


def in_a_tracer(mesh: Any, check: Any) -> None:
    w = dt.ones(3, mesh=mesh)

    def f(x: torch.Tensor) -> torch.Tensor:
        check()
        return (x * w).sum()

    assert torch.equal(torch.func.grad(f)(torch.ones(3)), torch.ones(3))


def in_a_recorded_pipeline(mesh: Any, check: Any) -> None:
    w = dt.ones(3, mesh=mesh, requires_grad=True)

    def step(x: float) -> Any:
        check()
        return (w * x).sum()

    with dt.debugging.record_comms(), pipeline.record() as recorded:
        pipeline.run(step, [1.0, 2.0])
    assert [str(e.action) for e in recorded.events] == ["F0", "B0", "F1", "B1"]


@pytest.mark.parametrize("user", [in_replay, in_a_tracer, in_a_recorded_pipeline])
def test_no_name_of_ours_is_replaced(user: Any) -> None:
    with fake_world(4):
        mesh = dt.init_mesh((4,), ("tp",))
        user(mesh, lambda: None)  # imports
        with nothing_is_replaced() as check:
            user(mesh, check)


def test_no_name_of_ours_is_replaced_in_a_simulation() -> None:
    checks: list[Any] = [lambda: None]

    def build() -> Any:
        mesh = dt.init_mesh((4,), ("dp",))
        net = dt.shard_module(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), mesh)
        dt.shard_data_parallel(net, mesh, "dp")
        act = dt.replay(torch.tanh)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step() -> None:
            act(net(dt.ones(3, 4, mesh=mesh))).sum().backward()
            checks[0]()
            optimizer.step()
            optimizer.zero_grad()

        return step

    simulate(build, world=4)
    with nothing_is_replaced() as check:
        checks[0] = check
        simulate(build, world=4)


class Watcher(observe.Observer):
    """Counts the events of calls."""

    sees_calls = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.locals = self.steps = self.writes = 0

    def begin_call(self, planned: Any) -> None:
        if type(planned) is CallPlan:
            self.calls.append(planned.func.__name__)

    def run_local(self, local: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.locals += 1
        return local(*args, **kwargs)

    def run_step(self, step: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return step(*args, **kwargs)

    def write(self, x: Any, tracked: bool) -> None:
        self.writes += 1


@pytest.mark.parametrize("in_c", [True, False])
def test_an_observer_sees_calls_that_are_known(in_c: bool) -> None:
    def run() -> tuple[Any, Any]:
        y = (x.view(4, 2) + 1) * 2
        z = dt.ones(8, mesh=mesh, requires_grad=True)
        (z * x).sum().redistribute(placements=[dt.Replicate()]).backward()
        with torch.no_grad():
            y.add_(1)
        return y, z.grad

    with fake_world(2), native.using(in_c):
        mesh = dt.init_mesh((2,), ("dp",))
        x = dt.ones(8, mesh=mesh, placements=[dt.Shard(0)])
        plain = [run() for _ in range(3)][-1]
        watcher, outer = Watcher(), Watcher()
        with outer, watcher:
            seen = run()
        run()
    assert watcher.calls == ["view", "add", "mul", "mul", "sum", "add_"]
    assert outer.calls == watcher.calls
    assert (watcher.locals, watcher.writes) == (outer.locals, outer.writes) == (6, 1)
    assert watcher.steps == outer.steps >= 1
    assert all(torch.equal(a.local, b.local) for a, b in zip(plain, seen, strict=True))


def test_an_observer_of_another_thread_sees_no_calls() -> None:
    import threading

    with fake_world(2):
        mesh = dt.init_mesh((2,), ("dp",))
        x, watcher = dt.ones(8, mesh=mesh), Watcher()
        with watcher:
            thread = threading.Thread(target=lambda: x + 1)
            thread.start()
            thread.join()
            assert watcher.calls == []
            _ = x + 1
    assert watcher.calls == ["add"]


def test_an_observer_sees_nothing_of_a_simulated_rank() -> None:
    x = dt.ones(4, mesh=dt.ProcessMesh([0], ("dp",)))
    with Watcher() as seen, dt.debugging.record_comms() as log:
        with simulated_rank(0, 4, data=True):
            dt.ones(4, mesh=dt.init_mesh((4,)), placements=[dt.Shard(0)]).sum().item()
        assert not seen.calls and not len(log)
        x.relu()
    assert seen.calls == ["relu"] and not observe.observers
