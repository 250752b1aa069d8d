"""Every test ends: a time limit for each, warnings as errors in worker processes too. Which tests
``make test`` runs, and what it prints, is in tests/support/quick.py and progress.py.

A test that runs longer than its limit fails with the stack it was in (SIGALRM). One that is stuck
in C, where Python cannot interrupt it, ends the pytest process with all stacks half a minute later.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
from collections.abc import Iterator
from types import FrameType

import pytest
import torch

from tests.support import pool
from tests.support.part import of_other_turns
from tests.support.progress import Progress
from tests.support.quick import longest_first, mark_quick

LIMIT = 120.0  # seconds for a test, on top of what @on_ranks allows its ranks
STUCK = 30.0  # seconds after the limit until the whole process is ended

_stderr: list[int] = []  # the real one: inside a test, pytest has its own in place


def pytest_configure() -> None:
    torch.set_num_threads(1)
    _stderr.append(os.dup(2))


def pytest_sessionstart(session: pytest.Session) -> None:
    plugins = session.config.pluginmanager
    reporter = plugins.get_plugin("terminalreporter")
    if reporter is not None:  # only the process that prints has one
        plugins.register(Progress(reporter))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Leaves the modules and the tests out of all garbage collections: they stay until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_quick(items)
    others = of_other_turns(items)
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = [item for item in items if item not in others]
    longest_first(items)


def pytest_sessionfinish() -> None:
    pool.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    marks = item.iter_markers("filterwarnings")
    own = [text for mark in reversed(list(marks)) for text in mark.args]
    pool.warning_filters = [*item.config.getini("filterwarnings"), *own]
    faulthandler.dump_traceback_later(_limit(item) + STUCK, exit=True, file=_stderr[0])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    __tracebackhide__ = True
    limit = _limit(item)

    def on_alarm(signum: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        raise TimeoutError(f"{item.nodeid} ran longer than {limit:g} s; here is where it was")

    before = signal.signal(signal.SIGALRM, on_alarm)
    in_world = torch.distributed.is_initialized()
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if torch.distributed.is_initialized() and not in_world:
            torch.distributed.destroy_process_group()
            raise AssertionError("the test leaves a process group: use fake_world, or @on_ranks")


def _limit(item: pytest.Item) -> float:
    mark = item.get_closest_marker("limit")
    if mark is not None:
        return float(mark.args[0])
    return LIMIT + float(getattr(getattr(item, "obj", None), "on_ranks_timeout", 0.0))
