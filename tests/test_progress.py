"""Bars: on the first rank, on a terminal or in a notebook, for long work, unless they are off."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import disttensor as dt
from disttensor import pipeline, progress
from tests.support.pool import fake_world, on_ranks

tqdm: Any = pytest.importorskip("tqdm.std").tqdm


class Terminal(io.StringIO):
    is_terminal = True

    def isatty(self) -> bool:
        return self.is_terminal


@contextmanager
def on_terminal(change: Callable[[pytest.MonkeyPatch], Any] = lambda m: None) -> Iterator[Terminal]:
    """A terminal outside of pytest, where also short work has a bar. It has what goes to stderr."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(progress, "DELAY", 0.0)
        m.delenv("PYTEST_CURRENT_TEST", raising=False)
        m.setattr("tqdm.auto.tqdm", EachUpdate)
        m.setattr(sys, "stderr", Terminal())
        change(m)
        yield sys.stderr  # type: ignore[misc]


class EachUpdate(tqdm):
    """A bar that shows each update, however fast they come."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, mininterval=0)


def work() -> None:
    with progress.bar("working", 3, "steps") as advance:
        for i in range(3):
            advance(note=f"step {i}")


def test_a_terminal_shows_a_bar_and_removes_it_at_the_end() -> None:
    with on_terminal() as out:
        threads = threading.active_count()
        work()
        assert threading.active_count() == threads
    lines = out.getvalue().split("\r")
    assert "working:   0%" in lines[1] and "0/3" in lines[1]
    assert any("2/3" in line and "step 1" in line for line in lines)
    assert lines[-1].strip() == "" and len(lines[-2].strip()) == 0


NO_BAR: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "a log file": lambda m: m.setattr(Terminal, "is_terminal", False),
    "switched off": lambda m: m.setenv("DISTTENSOR_PROGRESS", "0"),
    "a test": lambda m: m.setenv("PYTEST_CURRENT_TEST", "test_x"),
    "another rank, before the process group": lambda m: m.setenv("RANK", "1"),
    "no tqdm": lambda m: m.setitem(sys.modules, "tqdm.auto", None),
    "short work": lambda m: m.setattr(progress, "DELAY", 1.0),
}


@pytest.mark.parametrize("case", NO_BAR)
def test_nothing_is_shown(case: str) -> None:
    with on_terminal(NO_BAR[case]) as out:
        work()
    assert out.getvalue() == ""


def test_a_simulated_world_shows_nothing() -> None:
    with on_terminal() as out, fake_world(4):
        work()
    assert out.getvalue() == ""


@pytest.mark.parametrize("config", [{}, {"IPKernelApp": {}}])
def test_a_notebook_shows_a_bar_without_a_terminal(config: dict[str, Any]) -> None:
    ipython: Any = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(config=config)

    def notebook(m: pytest.MonkeyPatch) -> None:
        m.setattr(Terminal, "is_terminal", False)
        m.setitem(sys.modules, "IPython", ipython)

    with on_terminal(notebook) as out:
        work()
    assert ("working" in out.getvalue()) is bool(config)


def test_work_inside_of_work_has_no_bar_and_an_error_closes_the_bar() -> None:
    with on_terminal() as out:
        for _ in range(2):
            with pytest.raises(KeyError), progress.bar("outer") as advance:
                advance()
                work()
                raise KeyError
        assert "outer" in out.getvalue() and "working" not in out.getvalue()
        work()
        assert "working" in out.getvalue()


@on_ranks(2)
def test_only_the_first_rank_shows_a_bar() -> None:
    with on_terminal() as out:
        work()
    assert ("working" in out.getvalue()) is (dist.get_rank() == 0)


# The work that takes long -------------------------------------------------------------------------


def load_shards(folder: Path) -> None:
    dt.pretrained.save(nn.Linear(4, 2), folder)
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    dt.pretrained.load(model, folder, dt.ProcessMesh([0]))


def initialize(folder: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    dt.shard_module(model, dt.ProcessMesh([0]))


def checkpoint(folder: Path) -> None:
    checkpoints = dt.Checkpointer(folder)
    checkpoints.save(1, model=nn.Linear(4, 2))
    checkpoints.load(model=nn.Linear(4, 2))


def in_background(folder: Path) -> None:
    checkpoints = dt.Checkpointer(folder)
    checkpoints.save(1, background=True, model=nn.Linear(4, 2))
    checkpoints.wait()


def replay(folder: Path) -> None:
    model = dt.replay(dt.shard_module(nn.Linear(4, 2), dt.ProcessMesh([0])))
    model(dt.ones(3, 4, mesh=dt.ProcessMesh([0])))


def step_of(strategy: Any) -> Callable[[], Any]:
    x = dt.ones(4, mesh=dt.init_mesh((2,)))
    return lambda: x + 1


WORK: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "loading a model": (load_shards, ["saving", "placing", "initializing", "loading"]),
    "initializing": (initialize, ["placing", "initializing"]),
    "a checkpoint": (checkpoint, ["saving", "checking", "loading"]),
    "in the background": (in_background, []),
    "replay": (replay, ["placing", "recording"]),
    "search": (
        lambda _: pipeline.search(pipeline.Costs(1, 1, 1), stages=1, micro_batches=1),
        ["searching"],
    ),
    "simulate": (lambda _: dt.simulate.simulate(lambda: step_of(None), 2), ["simulating"]),
    "plan_strategy": (
        lambda _: dt.simulate.plan_strategy(step_of, 2, [dt.Strategy(dp=2)]),
        ["planning"],
    ),
}


@on_ranks(1)
@pytest.mark.parametrize("name", WORK)
def test_long_work_has_a_bar(name: str, tmp_path: Path) -> None:
    run, expected = WORK[name]
    with on_terminal() as out:
        run(tmp_path)
    bars = re.findall(r"\r(\w+):", out.getvalue())
    assert list(dict.fromkeys(bars)) == list(dict.fromkeys(expected)), out.getvalue()
    for line in NOTES.get(name, ()):
        assert re.search(line, out.getvalue()), out.getvalue()


NOTES = {
    "loading a model": [
        r"saving: 100%\|#+\| 40.0/40.0",
        r"loading: 100%\|#+\| 40.0/40.0",
    ],
    "a checkpoint": [r" [1-9][\d.]*/40.0 \[", r" 2/2 \[", "checking: 100%"],
    "plan_strategy": [r"1/1 \[", "simulating dp=2"],
    "simulate": ["rank 0 of 2"],
    "initializing": [r"1/1 \["],
}


@on_ranks(1)
def test_a_line_names_each_kind_of_call_that_is_compiled() -> None:
    mesh = dt.ProcessMesh([0])
    model = dt.compile(dt.shard_module(nn.Linear(4, 2), mesh), backend="eager")
    with on_terminal(NO_BAR["a log file"]) as out:
        for rows in (3, 3, 5, 5, 3):
            model(dt.ones(rows, 4, mesh=mesh))
    kinds = re.findall(r"disttensor: compile of Linear, (kind .*)\n", out.getvalue())
    assert kinds == [f"kind {n} of its calls: f32[{rows}, 4]" for n, rows in ((1, 3), (2, 5))]
